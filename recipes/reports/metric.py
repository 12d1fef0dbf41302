"""Metric: the logged column by which methods are compared, whether more is better, and its number format."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

NAMES = {"accuracy": "accuracy", "bleu": "BLEU", "perplexity": "perplexity", "loss": "loss"}
GUESSES = ("val/accuracy", "val/bleu", "val/perplexity", "val/loss")  # tried in this order if a run names no metric
SHORT = 0.05  # the default target is this share short of the reference's final value


class Metric(NamedTuple):
    """A metric. column: its logged name. mode: "max" or "min", whichever is better."""

    column: str
    mode: str = "max"

    @property
    def share(self) -> bool:
        """Whether it lies between 0 and 1 and is shown in percent."""
        return self.column.rpartition("/")[2] == "accuracy"

    @property
    def name(self) -> str:
        last = self.column.rpartition("/")[2]
        return NAMES.get(last, last)

    @property
    def title(self) -> str:
        return self.name[0].upper() + self.name[1:]

    @property
    def held_out(self) -> str:
        return f"held-out {self.name}"

    @property
    def unit(self) -> str:
        return " %" if self.share else ""

    @property
    def scale(self) -> float:
        return 100.0 if self.share else 1.0

    @property
    def form(self) -> str:
        return ".1f" if self.share or self.name == "BLEU" else ".3f" if self.name == "loss" else ".2f"

    def text(self, value: float) -> str:
        """Return a value with its unit: 97.1 %."""
        return number(value * self.scale, self.form) + self.unit

    def best(self, values: Iterable[float]) -> float:
        return max(values) if self.mode == "max" else min(values)

    def reached(self, value: float, target: float) -> bool:
        return value >= target if self.mode == "max" else value <= target

    def ahead(self, value: float) -> float:
        """Return a sort key, by which better values come first."""
        return -value if self.mode == "max" else value

    def short_of(self, value: float) -> float:
        """Return the default target: 5 % short of this value."""
        return value - SHORT * abs(value) if self.mode == "max" else value + SHORT * abs(value)

    def parse(self, text: object) -> float:
        """Return the target that the user wrote as 0.9, 90% or 23.5. Raises ValueError for other text."""
        written = str(text).strip()
        percent = written.endswith("%")
        try:
            value = float(written.rstrip("% ")) / (100.0 if percent else 1.0)
        except ValueError:
            value = math.nan
        example = "0.9 or 90%" if self.share else "23.5"
        if not math.isfinite(value) or (percent and not self.share):
            raise ValueError(f"target must be a value of {self.column}, such as {example}, but is {written!r}")
        if self.share and not 0 <= value <= 1:
            raise ValueError(f"target={written}: {self.column} runs from 0 to 1; write for example {example}")
        return value


def number(value: float, form: str) -> str:
    if not math.isfinite(value):
        return "–" if math.isnan(value) else "∞" if value > 0 else "−∞"
    return format(value, form)


def spread(values: Sequence[float], form: str, scale: float = 1.0) -> str:
    """Return the mean and, over several seeds, the standard deviation, as text."""
    if not values:
        return "–"
    mean, deviation = mean_and_deviation(values)
    if abs(scale * mean) >= 10_000 and not form.startswith(","):
        form = ".0e"  # it would be too long otherwise
    text = number(scale * mean, form)
    return text if deviation is None else f"{text} ±{number(scale * deviation, form)}"


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and the standard deviation of the sample, which is None for one value."""
    if len(values) == 1:
        return values[0], None
    if min(values) == max(values):
        return values[0], 0.0  # exactly, without rounding errors
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
