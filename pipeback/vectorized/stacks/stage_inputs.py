"""Stage inputs: what a micro-batch gives to stages, one after the other, and which of it gets a gradient back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipeback.stages.flight import Value, for_trial
from pipeback.stages.own_memory import apart
from pipeback.stages.run_modules import untouched
from pipeback.stages.stage import Stage
from pipeback.tensors import accelerators
from pipeback.tensors.copies import to_device
from pipeback.vectorized.tracing.forms import leaves


class StageInputs:
    """The inputs of stages, by number."""

    def __init__(self) -> None:
        self.values: dict[int, Any] = {}
        self._reached: dict[int, list[list[bool]]] = {}  # of each output, which tensors of the input get its gradient
        self._returned: dict[int, list[bool]] = {}  # what was asked for since the last stage came

    def through(self, stage: Stage, value: Value, target: Any) -> Value:
        """Return what a stage makes of its input, or its loss. Nothing of the stage is changed."""
        self.values[stage.index] = value
        self._returned.clear()
        with torch.enable_grad(), untouched(stage), accelerators.forked([stage.device]):
            own, given = stage.enter(value)
            mine = to_device(stage.device, for_trial(stage, target))
            out = stage.run(given, mine) if stage.judges else stage.module(given)
            ends = leaves(out)
            # the last stage may be compiled, and inductor keeps no graph for later
            self._reached[stage.index] = [_reached(y, own, again=n < len(ends)) for n, y in enumerate(ends, 1)]
        out = apart(stage.module, (), out)  # which may leave the device
        found: Value = tuple(v.detach() for v in out) if type(out) is tuple else out.detach()
        if not stage.last:
            self.values[stage.index + 1] = found  # the next stage may be of another rank
        return found

    def returned(self, s: int) -> list[bool] | None:
        """Return which tensors of the input of a stage get a gradient back; None if that is not known."""
        if s not in self._returned and s in self._reached:
            self._return_from(s)
        return self._returned.get(s)

    def _return_from(self, first: int) -> None:
        """Go through the stages from the last one that is known to the `first`."""
        last = first
        while last + 1 in self._reached:
            last += 1
        behind = None
        for s in range(last, first - 1, -1):
            outputs = [True] * len(self._reached[s]) if behind is None else behind
            some = [own for own, there in zip(self._reached[s], outputs, strict=True) if there]
            behind = (
                [any(column) for column in zip(*some, strict=True)] if some else [False] * len(leaves(self.values[s]))
            )
            self._returned[s] = behind


def _reached(y: Any, inputs: tuple[Tensor, ...], *, again: bool) -> list[bool]:
    moving = [v for v in inputs if v.requires_grad]
    if not isinstance(y, Tensor) or not y.requires_grad or not moving:
        return [False] * len(inputs)
    grads = torch.autograd.grad(y, moving, torch.ones_like(y), retain_graph=again, allow_unused=True)
    found = iter(grads)
    return [v.requires_grad and next(found) is not None for v in inputs]
