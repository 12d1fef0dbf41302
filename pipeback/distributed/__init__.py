"""The processes of a pipeline: they meet, divide the stages, exchange tensors, and watch each other's health.

Floor 6. It may import streaming, tensor_parallel, runtime, stages, methods, sparsities, splitting, schedules, tensors
and weights.
"""

from pipeback.distributed.held_stages import HeldStages
from pipeback.distributed.rank_runner import RankRunner
from pipeback.distributed.ranks import Ranks, SingleProcess

__all__ = ["HeldStages", "RankRunner", "Ranks", "SingleProcess"]
