"""The splitting: turns any model into stages: by its sequence, by declaration, as a known family, or by tracing.

A model is traced by running its own forward once and recording the calls.

Floor 2. It may import tensors.
"""

from pipeback.splitting.partition import StagePart, balance
from pipeback.splitting.split import Split, split_model

__all__ = ["Split", "StagePart", "balance", "split_model"]
