"""Tensor-parallel stages: the ranks of a mesh dimension hold shards of a stage's weights and compute it together.

Floor 5. It may import runtime, stages, optim and schedules.
"""

from pipeback.tensor_parallel.experts import ExpertLoad
from pipeback.tensor_parallel.plans import ByColumns, ByRows, Experts, Local

__all__ = ["ByColumns", "ByRows", "ExpertLoad", "Experts", "Local"]
