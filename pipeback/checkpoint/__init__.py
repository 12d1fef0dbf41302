"""The checkpoints: the whole state of a pipeline, and its files, which are complete or absent.

Floor 7. It may import distributed, streaming, runtime, stages, methods, schedules and tensors.
"""

from pipeback.checkpoint.save_and_load import latest, load, read, save

__all__ = ["latest", "load", "read", "save"]
