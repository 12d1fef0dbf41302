"""The stages: each holds a module, its weights, its optimizer and the micro-batches that wait for their backward.

Floor 3. It may import methods, splitting and tensors; stores and stacks come in as protocols (`home`).
"""

from pipeback.stages.flight import ActivationPolicy, Flight
from pipeback.stages.joint_optimizer import Options
from pipeback.stages.stage import Stage
from pipeback.stages.team import StageGroup

__all__ = ["ActivationPolicy", "Flight", "Options", "Stage", "StageGroup"]
