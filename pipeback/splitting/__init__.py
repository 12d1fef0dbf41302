"""The splitting: how any model becomes stages: by its sequence, by declaration, as a known family, or by tracing.

A model is traced (reports say "followed") by running its own forward once and recording the calls.

Floor 2. It may import tensors.
"""

from pipeback.splitting.partition import StagePart, balance
from pipeback.splitting.split import Split, split_model

__all__ = ["Split", "StagePart", "balance", "split_model"]
