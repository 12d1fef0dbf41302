"""Optimizers that help under delay, and are at home in a plain loop as well.

Floor 2. It imports tensors.
"""

from pipeback.optim.muon_adamw import MuonAdamW
from pipeback.optim.rotated_adamw import RotatedAdamW

__all__ = ["MuonAdamW", "RotatedAdamW"]
