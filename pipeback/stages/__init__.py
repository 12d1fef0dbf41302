"""The stages: a stage holds a module, its weights, its optimizer and the micro-batches that are in flight there.

A stage does three operations: F (the forward of a micro-batch), B (its backward) and U (the update of the weights).
A micro-batch is in flight at a stage from its F to its B.

Floor 3. It may import methods, splitting's segment and tensors; stores and stacks come in as protocols (`home`).
"""

from pipeback.stages.flight import ActivationPolicy, Flight
from pipeback.stages.joint_optimizer import Options
from pipeback.stages.stage import Stage
from pipeback.stages.team import StageGroup

__all__ = ["ActivationPolicy", "Flight", "Options", "Stage", "StageGroup"]
