"""The pipeline: the public face, and how options become a running pipeline.

Floor 8. It may import every room below; only lightning and recipes import it.
"""

from pipeback.pipeline.pipeline import Pipeline

__all__ = ["Pipeline"]
