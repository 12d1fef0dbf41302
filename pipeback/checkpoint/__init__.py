"""The checkpoints: the whole state of a pipeline, and its files, which are complete or absent.

Floor 7. It may import distributed and all rooms below.
"""

from pipeback.checkpoint.save_and_load import latest, load, read, save

__all__ = ["latest", "load", "read", "save"]
