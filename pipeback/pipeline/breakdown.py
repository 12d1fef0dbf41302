"""Breakdown: the layers and costs of each stage, as plain rows.

FLOPs are those of matrix products, convolutions and attention, as torch.utils.flop_counter counts them; others are
not counted. Bytes come from the rehearsal, and so do seconds, unless F and B are repeated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeback.byte_sizes import written
from pipeback.notebook import seconds as in_seconds
from pipeback.notebook import table
from pipeback.splitting.lent import Lent
from pipeback.stages.compile_check import untouched
from pipeback.stages.flight import Value, cut, grown
from pipeback.stages.rehearsal import measure
from pipeback.stages.stage import Stage


class StageRow(NamedTuple):
    """A stage, and the costs of one micro-batch there."""

    stage: int
    name: str
    layers: str  # layers with weights: "2 Conv2d, 2 GroupNorm"
    parameters: int  # number of parameters that the stage owns, frozen ones included
    forward_flops: int
    backward_flops: int
    seconds: float  # time of the forward (F) and the backward (B); of several repeats, the median
    activations: int  # bytes that F leaves to B
    delay: int  # the delay D, in updates
    times: tuple[float, ...] = ()  # seconds of F and B, one by one; none without repeats
    input: int = 0  # bytes that F is given, with the target of the last stage
    output: int = 0  # bytes that F hands to the next stage


class Breakdown(list[StageRow]):
    """The rows of all stages; a notebook shows them as a table."""

    def _repr_html_(self) -> str:
        rows = [
            (r.stage, r.name, r.layers, f"{r.parameters:,}", f"{r.forward_flops + r.backward_flops:,}",
             in_seconds(r.seconds), written(r.activations), r.delay)
            for r in self
        ]  # fmt: skip
        head = ["stage", "name", "layers", "parameters", "FLOPs", "F and B", "activations", "delay"]
        return table("Breakdown, of one micro-batch", head, rows)


def breakdown(
    stages: Sequence[Stage],
    seconds: Sequence[float],
    delays: Sequence[int],
    x: Value,
    target: Any,
    present: Callable[[Stage], AbstractContextManager[None]],
    repeats: int,
) -> Breakdown:
    """One row per stage, for the micro-batch (x, target) that was rehearsed; nothing is trained and nothing changes.

    seconds: per stage, what the rehearsal measured. repeats: 0 for those, or how often F and B run once more.
    """
    from torch.utils.flop_counter import FlopCounterMode  # imports triton

    rows, value, inputs_of = [], cut(x), []
    for stage in stages:
        inputs_of.append(value if repeats else None)
        with present(stage), untouched(stage):
            with FlopCounterMode(display=False) as forward:
                leaves, given = stage.enter(value)
                output = stage.run(given, target)
            roots, inputs = grown(output), [t for t in (*leaves, *stage.params) if t.requires_grad]
            with FlopCounterMode(display=False) as backward:
                if roots and inputs:
                    torch.autograd.grad(roots, inputs, [torch.ones_like(y) for y in roots], allow_unused=True)
        s = stage.index
        rows.append(
            StageRow(
                s, stage.name, _layers(stage.module), sum(p.numel() for p in stage.module.parameters()),
                forward.get_total_flops(), backward.get_total_flops(), seconds[s],
                stage.learnt.activation_bytes + stage.learnt.host_bytes, delays[s],
                input=_bytes(value) + (_bytes(target) if stage.judges else 0),
                output=0 if stage.last else _bytes(output),
            )
        )  # fmt: skip
        value = cut(output)
    if not repeats:
        return Breakdown(rows)
    times: list[list[float]] = [[] for _ in stages]
    for _ in range(repeats):  # in rounds over all stages, so that whatever else the machine does is spread over them
        for stage, given, mine in zip(stages, inputs_of, times, strict=True):
            with present(stage), untouched(stage):
                mine.append(measure(stage, given, target))
    return Breakdown(row._replace(seconds=median(t), times=tuple(t)) for row, t in zip(rows, times, strict=True))


def _bytes(value: Value) -> int:
    parts = value if isinstance(value, tuple) else (value,)
    return sum(p.numel() * p.element_size() for p in parts if isinstance(p, Tensor))


def _layers(module: nn.Module) -> str:
    counts = Counter(_named(module))
    return ", ".join(f"{number} {name}" if number > 1 else name for name, number in counts.items())


def _named(module: nn.Module) -> Iterator[str]:
    """The classes of layers with weights, in order; names of weights that stand beside layers."""
    if isinstance(module, Lent):
        yield f"{module.__kind__} (lent)"
        return
    own = [key for key, p in module._parameters.items() if isinstance(p, Tensor)]
    whole = isinstance(module, nn.MultiheadAttention) or not module._modules
    if own and whole and type(module) is not nn.Module:
        yield type(module).__name__
        return
    yield from own
    for child in module.children():
        yield from _named(child)
