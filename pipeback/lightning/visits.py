"""Visits: the model outside of F, while the weights of its stages live elsewhere: each comes when it is its turn.

In fit the pipeline brings it from its store. Before, and to validate, test or predict without fit, it is copied from
host memory to the device, and given away after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from pipeback.lightning.body import Body


class Visits:
    """Serves calls of the model without gradients. bring: given a stage's number, the time in which it is there."""

    def __init__(self, found: Body, device: torch.device) -> None:
        self.found, self.device = found, device
        self.bring: Callable[[int], AbstractContextManager[Any]] = self._carried
        self.stored = False  # the pipeline brings it
        found.module.forward = self._forward

    def end(self) -> None:
        """The model's own forward again."""
        self.found.module.__dict__.pop("forward", None)

    def _forward(self, *inputs: Any, **named: Any) -> Any:
        found = self.found
        if not self.stored and self.device.type == "cpu":
            return type(found.module).forward(found.module, *inputs, **named)
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"self.{found.name} was called with gradients outside of training_step; its stages live in a store "
                "and come to the device one by one, which gives gradients there only: call it in torch.no_grad()"
            )
        if len(inputs) != 1 or named:
            raise TypeError(
                f"self.{found.name} was called with {len(inputs)} positional and {len(named)} named arguments; the "
                "first stage takes one tensor or a tuple of tensors"
            )
        value = inputs[0]
        for s, stage in enumerate(found.stages):
            with self.bring(s):
                value = stage(value)
        return value

    def stream(self, bring: Callable[[int], AbstractContextManager[Any]]) -> None:
        """From now on the weights are where `bring` gets them from."""
        self.bring, self.stored = bring, True

    @contextmanager
    def _carried(self, s: int) -> Iterator[None]:
        stage = self.found.stages[s]
        weights, buffers = list(stage.parameters()), list(stage.buffers())
        kept = [t.data for t in (*weights, *buffers)]
        for t, value in zip((*weights, *buffers), kept, strict=True):
            t.data = value.to(self.device)
        try:
            yield
        finally:
            for t, value in zip(buffers, kept[len(weights) :], strict=True):
                value.copy_(t.data)  # statistics, in training mode
            for t, value in zip((*weights, *buffers), kept, strict=True):
                t.data = value


@contextmanager
def staying(module: nn.Module) -> Iterator[None]:
    """Meanwhile what moves or casts the modules around this one leaves it where it is."""
    module._apply = lambda fn, recurse=True: module  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module._apply
