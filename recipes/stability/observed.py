"""Observed: the largest stable ηλ of a method, found by training a quadratic with the library.

Stage 0 holds one weight for each of many curvatures λ, the last stage passes its input on, and the loss is
Σ λ/2 · w². The method runs with a delay of D updates between these two stages. Each weight follows its own recurrence,
since the methods here work elementwise, so that one run tries all curvatures. A weight is unstable if it is larger in
the last eighth of a run than in the fifth.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import pipeback

BUILD: dict[str, Any] = {  # by its delay D, over two stages; all but cerebras have the options of their own
    "pb": lambda d: pipeback.methods.create("pb", slack=d),
    "sc": lambda d: pipeback.methods.create("sc", slack=d),
    "lwp": lambda d: pipeback.methods.create("lwp", slack=d),
    "cerebras": lambda d: pipeback.methods.create("cerebras", slack=d),
    "lwp_w_sc": lambda d: pipeback.chain(
        pipeback.methods.create("lwp", form="weight", slack=d), pipeback.methods.create("sc", slack=d)
    ),
    "spectrain": lambda d: pipeback.methods.create("spectrain", slack=d),
    "msnag": lambda d: pipeback.methods.create("msnag", slack=d),
    "ef": lambda d: pipeback.methods.create("ef", slack=d),
}
GRID = 1.015  # from one curvature that is tried to the next
READS = 256  # readings of the weights in a run
FAR = 1e200  # of a loss: a weight that has come so far is unstable, and has no gradient any more
NOTHING = 1e-100  # a weight that has shrunk so far is stable, though it may be rounded to 0 and shrink no more
PERIODS = 48  # of the slowest oscillation in a run


class Factors(nn.Module):
    """y = w x, elementwise."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(count, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def largest(method: str, m: float, d: int, low: float, high: float) -> float:
    """The largest stable ηλ between these two; infinite if all are stable, nan if the least is unstable already."""
    count = math.ceil(math.log(high / low) / math.log(GRID)) + 1
    tried = torch.logspace(math.log10(low), math.log10(high), count, dtype=torch.float64)  # η = 1
    factors = Factors(count)
    pipe = pipeback.Pipeline(
        nn.Sequential(factors, nn.Identity()),
        loss=lambda output, _: (tried / 2 * output * output).clamp(max=FAR).sum(),
        optimizer=lambda ps: torch.optim.SGD(ps, lr=1.0, momentum=m),
        method=BUILD[method](d),
        micro_batch_size=1,
    )
    updates = max(4000, math.ceil(PERIODS * 2 * math.pi / math.sqrt(low)))
    chunk = torch.ones(math.ceil(updates / READS), 1, dtype=torch.float64)
    peaks = {4: torch.zeros(count, dtype=torch.float64), 7: torch.zeros(count, dtype=torch.float64)}
    for n in range(READS):
        pipe.push(chunk, chunk)
        eighth = n * 8 // READS
        if eighth in peaks:
            peaks[eighth] = torch.fmax(peaks[eighth], factors.w.detach().abs())
    stable = (peaks[7] < peaks[4]) | (peaks[7] < NOTHING)  # equal where there is no gradient any more
    if not stable[0]:
        return math.nan
    if stable.all():
        return math.inf
    return float(tried[int((~stable).int().argmax()) - 1] * math.sqrt(GRID))
