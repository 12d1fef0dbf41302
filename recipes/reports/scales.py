"""Scales: the range of an axis that holds what a reader should see, its round numbers, and places on it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from matplotlib.ticker import LogLocator, MaxNLocator

STEPS = [1, 2, 2.5, 5, 10]


class Scale(NamedTuple):
    """An axis from low to high. logarithmic: then both are above zero."""

    low: float
    high: float
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """Return the place of a value in percent of the axis; below 0 or above 100 if it lies outside."""
        if self.logarithmic:
            return 100 * math.log(max(value, 1e-6 * self.low) / self.low) / math.log(self.high / self.low)
        return 100 * (value - self.low) / (self.high - self.low)

    def holds(self, value: float) -> bool:
        return -0.01 <= self.place(value) <= 100.01

    def marks(self, most: int) -> list[float]:
        """Return at most about `most` round numbers on the axis."""
        if self.logarithmic:
            near = LogLocator(10, subs=(1.0, 2.0, 5.0)).tick_values(self.low, self.high)
            some = [float(n) for n in near if self.holds(n)]
            return some if len(some) <= most + 2 else [n for n in some if math.log10(n).is_integer()]
        return [float(n) for n in MaxNLocator(most, steps=STEPS).tick_values(self.low, self.high) if self.holds(n)]


def of_curves(curves: Iterable[Sequence[float]], share: bool, whole: bool = False) -> Scale | None:
    """Return the scale for curves; None without curves.

    share: values from 0 to 1, whose axis ends at tenths. whole: show how they begin, too.
    """
    # by the number of measurements, so that the pictures over samples, steps and seconds show the same range
    seen = [value for curve in curves for value in curve[0 if whole else len(curve) // 5 :]]
    if not seen:
        return None
    low, high = min(seen), max(seen)
    if share:
        top = min(1.0, math.ceil(10 * high + 0.2) / 10)
        return Scale(max(0.0, min(math.floor(10 * low) / 10, top - 0.1)), top)
    if low > 0 and high > 8 * low:
        return Scale(low / 1.15, high * 1.15, logarithmic=True)
    room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return Scale(low - room, high + room)
