"""Vectorised stages: stages that are alike run as one, and a whole tick of them may be one function.

A tick is the time in which every stage does one F (forward), one B (backward) and one U (update of the weights).

Floor 5. It may import runtime, stages, methods, splitting, schedules and tensors.
"""

from pipeback.vectorized.stack_executor import StackExecutor
from pipeback.vectorized.stacks.choose_stacks import check, stacked
from pipeback.vectorized.stacks.fit_stacks import fitting

__all__ = ["StackExecutor", "check", "fitting", "stacked"]
