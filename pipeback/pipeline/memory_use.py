"""Memory use: bytes that training holds, counted while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeback.byte_sizes import written
from pipeback.notebook import table
from pipeback.stages.stage import Stage

OF_WHAT = {
    "weights": "one copy of the trainable weights",
    "copies": "copies of the weights at the peak, the live one included",
    "state": "state of the method, in copies of the weights",
    "activations": "kept on the device for backwards, at the peak",
    "host": "the same in host memory",
    "rounded": "weights of a half type beside their float32 masters",
    "beside": "gradients of small weights, and what stages that run as one hold",
}


class Memory(NamedTuple):
    """The memory that training holds, measured."""

    weights: int  # bytes of one copy of the trainable weights, as the optimizer steps them
    copies: float  # copies of the weights at the peak, weighted by stage size; 1.0 = the live ones alone
    state: float  # the method's own state, in copies of the weights
    # bytes kept for backwards on the device at the peak: one micro-batch's, times those in flight. What a stage has
    # given to the next one and has saved itself counts once, but twice where backwards are split. There, the gradients
    # that W waits with are counted, too
    activations: int
    host: int = 0  # the same in host memory, with activations="host"; with "recompute", states of random streams
    rounded: int = 0  # with masters: bytes of the rounded weights of a half type; `weights` counts their float32 copies
    # bytes held beside all this. For small weights, which lie in one run of memory: their gradients, also with weight
    # decay. For stages that run as one: places for more older versions than there are, for weights that are about to be
    # stepped, and for micro-batches of the shape that came before
    beside: int = 0

    def _repr_html_(self) -> str:
        rows = [
            (name, f"{value:.3g}" if name in ("copies", "state") else written(int(value)), OF_WHAT[name])
            for name, value in self._asdict().items()
        ]
        return table("Memory", ["", "measured", "of what"], rows)


def counted(stages: Sequence[Stage], owner: Sequence[int]) -> Memory:
    """The memory of these stages. owner: the worker of each stage of the model."""
    one = sum(stage.bytes() for stage in stages)
    held = sum(max(stage.versions.peak, stage.copies()) * stage.bytes() for stage in stages)
    state = 0
    for stage in stages:
        owned = {id(v) for w in stage.weights for v in stage.optimizer.state.get(w, {}).values()}
        tensors = [t for v in stage.state.values() if isinstance(v, list) for t in v if t is not None]
        state += sum(t.numel() * t.element_size() for t in tensors if id(t) not in owned)
    here = {(stage.replica, stage.index): stage for stage in stages}
    activations = sum(
        stage.added_bytes(here.get((stage.replica, stage.index - 1))) * stage.peak_flights
        if stage.stack is None
        else stage.stack.held
        for stage in stages
    )
    repeats: dict[tuple[int, int], int] = {}  # a worker does one at a time
    for stage in stages:
        worker = stage.replica, owner[stage.index]
        repeats[worker] = max(repeats.get(worker, 0), stage.learnt.repeat_bytes)
    host = sum(stage.learnt.host_bytes * stage.peak_flights for stage in stages)
    activations += sum(stage.gradients.split.bytes * stage.gradients.split.peak for stage in stages)
    rounded = sum(half.nbytes for stage in stages for half in stage.masters.halves)
    strips = {id(strip): strip for stage in stages if (strip := stage.weights.strip) is not None}
    beside = sum(strip.beside for strip in strips.values())
    for stack in {id(stage.stack): stage.stack for stage in stages if stage.stack is not None}.values():
        beside += stack.beside
    copies, kept = (held / one, state / one) if one else (1.0, 0.0)
    return Memory(one, copies, kept, activations + sum(repeats.values()), host, rounded, beside)
