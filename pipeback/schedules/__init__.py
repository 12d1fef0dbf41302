"""The schedules: what one stage does, as data, and in which order and when it runs.

Floor 1. It needs no torch and imports nothing of pipeback.
"""

from pipeback.schedules.ops import Op, Schedule, until
from pipeback.schedules.order import Order
from pipeback.schedules.programs import fill_drain, flowing, one_f_one_b

__all__ = ["Op", "Order", "Schedule", "fill_drain", "flowing", "one_f_one_b", "until"]
