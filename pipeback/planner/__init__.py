"""The planner: what training on any devices would take and hold, and what to choose, without torch.

Floor 2. It may import schedules.
"""

from pipeback.planner.routines import routine
from pipeback.planner.simulation import simulate

__all__ = ["routine", "simulate"]
