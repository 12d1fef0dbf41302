"""The pictures: schedules and runs as grids of text, figures and Perfetto traces.

Floor 2. It may import schedules; a pipeline comes in as an argument only.
"""

from pipeback.draw.figures import beside, compare, grid, measured, picture, summary, trace

__all__ = ["beside", "compare", "grid", "measured", "picture", "summary", "trace"]
