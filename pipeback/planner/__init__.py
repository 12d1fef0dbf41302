"""The planner: what training on any devices would take and hold, and what to choose, without torch.

Floor 2. It may import schedules.
"""

from pipeback.planner.hardware import Cluster, Device, Link, devices
from pipeback.planner.loss import Loss
from pipeback.planner.models import Model
from pipeback.planner.search import search
from pipeback.planner.simulation import simulate

__all__ = ["Cluster", "Device", "Link", "Loss", "Model", "devices", "search", "simulate"]
