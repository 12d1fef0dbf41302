"""Loss: how many tokens a method needs to a target, of its batch and of its delays.

    tokens(B) = tokens·(1 + B/B_crit)        McCandlish et al., arXiv 1812.06162: batches beyond B_crit gain little
    slow      = 1 + κ·τ'                     κ by method and optimizer: published, assumed, or calibrated by you
    τ'        = sqrt(Σ D_s²/S)               effective delay of S stages whose curvature is taken to be equal

The target is the loss that training without delay reaches after `tokens` tokens in small batches. B counts tokens per
update; D is the delay of stage s, in updates. That `slow` is linear in the delay is taken from few points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, sqrt
from typing import NamedTuple

from pipeback.planner import catalogue
from pipeback.planner.techniques import Technique, assumed

CRITICAL = 2e6  # tokens
SOURCE = "the order of Kaplan et al., arXiv 2001.08361, eq. 5.3, at the losses of models of billions of parameters"


class Slow(NamedTuple):
    """By which factor a delay needs more updates, and how this is known."""

    factor: float
    kappa: float
    known: str  # "published", "assumed", "calibrated", "given" or "no delay"
    source: str


@dataclass(frozen=True)
class Loss:
    """critical_batch: in tokens. slow: κ by method, instead of the catalogue's; `pipeback plan calibrate` fits it."""

    critical_batch: float = CRITICAL
    slow: Mapping[str, float] = field(default_factory=dict)
    calibrated: str = ""  # the file that `slow` comes from

    def __post_init__(self) -> None:
        if not 0 < self.critical_batch < inf:
            raise ValueError(f"critical_batch must be above 0, but is {self.critical_batch!r}; write for example 2e6")
        for name, kappa in self.slow.items():
            if not 0 <= kappa < inf:
                raise ValueError(f"slow of {name} must be at least 0, but is {kappa!r}; 0 costs nothing")
        if self.slow:
            known = catalogue.table("methods")
            named = {catalogue.key("method", name, known): kappa for name, kappa in self.slow.items()}
            object.__setattr__(self, "slow", named)  # as they are compared

    def batch(self, tokens: float) -> float:
        """By which factor updates of so many tokens need more tokens in all."""
        return 1 + tokens / self.critical_batch

    def delay(self, technique: Technique, stages: int, optimizer: str, samples: float = 1) -> Slow:
        """What the delays of so many stages cost, at updates of so many samples."""
        delays = technique.delays(stages)
        effective = effective_delay(delays)
        if not effective:
            return Slow(1.0, 0.0, "no delay", "")
        if technique.name in self.slow:
            kappa = float(self.slow[technique.name])
            return Slow(1 + kappa * effective, kappa, "calibrated" if self.calibrated else "given", self.calibrated)
        for known in technique.slow:
            if known.optimizer == optimizer and known.delay >= max(delays) and known.samples >= samples:
                return Slow(1 + known.kappa * effective, known.kappa, "published", known.source)
        other = assumed()
        return Slow(1 + other.kappa * effective, other.kappa, "assumed", other.source)


def effective_delay(delays: Sequence[int]) -> float:
    return sqrt(sum(d * d for d in delays) / len(delays))
