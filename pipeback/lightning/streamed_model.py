"""Streamed model: runs the model outside of F (forward in training) with one stage's weights on the device at a time.

In fit the pipeline fetches them from its store. Before fit, and to validate, test or predict without fit, they are
copied from host memory to the device, and freed there afterwards.

Where `training_step` is followed, weights are on the device until the pipeline takes them. If it makes several calls,
all weights are in host memory while validation runs, and each layer comes to the device when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeback.lightning.call_override import Fronts
from pipeback.lightning.find_stages import TrainedModule
from pipeback.splitting.cut_points import layer


class StreamedModel:
    """Serves calls of the model without gradients. bring(s): a context within which stage s is on the device."""

    def __init__(self, found: TrainedModule, device: torch.device) -> None:
        self.found, self.device = found, device
        self.bring: Callable[[int], AbstractContextManager[Any]] = self._carried
        self.stored = False  # the pipeline fetches the weights
        self._through: Callable[[Any], Any] | None = None  # runs the stages of a module that was traced
        self.own = found.module.__dict__.get("forward")
        self._fronts = Fronts()
        if found.step is None:
            self._fronts.put(found.module, self._forward)

    def end(self) -> None:
        """Give the model its own forward again."""
        self._fronts.back()

    @contextmanager
    def open(self, shown: AbstractContextManager[None]) -> Iterator[None]:
        """A context within which all modules can be called that `training_step` calls. shown: shows their weights."""
        step = self.found.step
        if not self.stored or step is None or step.single is not None:
            yield
            return
        with self.lifted(), shown, nullcontext() if self.device.type == "cpu" else self._visiting():
            yield

    def lifted(self) -> AbstractContextManager[None]:
        """A context within which the modules of a LightningModule are as they are, since stages run them."""
        return nullcontext() if self.found.step is None else self._fronts.lifted()

    def _forward(self, *inputs: Any, **named: Any) -> Any:
        found = self.found
        forward = self.own or partial(type(found.module).forward, found.module)
        if not self.stored and self.device.type == "cpu":
            return forward(*inputs, **named)
        shown = found.shown if found.step is None else found.step.single
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{shown} was called with gradients outside of training_step; its stages live in a store "
                "and come to the device one by one, which gives gradients there only: call it in torch.no_grad()"
            )
        if found.followed:
            if self._through is not None:
                return self._through(found.given(inputs, named))
            with self._visiting():
                return forward(*inputs, **named)
        if len(inputs) != 1 or named:
            raise TypeError(
                f"{shown} was called with {len(inputs)} positional and {len(named)} named arguments; the "
                "first stage takes one tensor or a tuple of tensors"
            )
        value = inputs[0]
        for s, stage in enumerate(found.stages):
            with self.bring(s):
                value = stage(value)
        return value

    def stream(
        self, bring: Callable[[int], AbstractContextManager[Any]], through: Callable[[Any], Any], held: Iterable[Tensor]
    ) -> None:
        """From now on `bring` fetches the weights of a stage, and `through` runs a call through all stages. held: the
        weights of the stages.
        """
        self.bring, self._through, self.stored = bring, through, True
        step = self.found.step
        for module, stand_in in () if step is None else step.stand_ins(self._forward, held):
            self._fronts.put(module, stand_in)

    def _carried(self, s: int) -> AbstractContextManager[None]:
        stage = self.found.stages[s]
        return _carried([*stage.parameters()], [*stage.buffers()], self.device)

    @contextmanager
    def _visiting(self) -> Iterator[None]:
        """Each layer, and each tensor that a module holds itself, is on the device during the call of its module."""
        module, hooks = self.found.module, list[Any]()
        paths = dict(module.named_modules())
        whole = [path for path, m in paths.items() if path in self.found.leaves or (path and layer(m))]
        with ExitStack() as stack:
            for path, m in paths.items():
                if any(path.startswith(f"{other}.") for other in whole):
                    continue
                deep, times = path in whole, list[ExitStack]()
                weights, buffers = [*m.parameters(recurse=deep)], [*m.buffers(recurse=deep)]
                if not weights and not buffers:
                    continue
                if m is module:
                    stack.enter_context(_carried(weights, buffers, self.device))
                    continue
                hooks.append(m.register_forward_pre_hook(partial(_come, times, weights, buffers, self.device)))
                hooks.append(m.register_forward_hook(partial(_go, times), always_call=True))
            try:
                yield
            finally:
                for hook in hooks:
                    hook.remove()


def _come(times: list[ExitStack], weights: list[Any], buffers: list[Any], device: torch.device, *_: Any) -> None:
    times.append(ExitStack())
    times[-1].enter_context(_carried(weights, buffers, device))


def _go(times: list[ExitStack], *_: Any) -> None:
    if times:
        times.pop().close()


@contextmanager
def _carried(weights: list[Any], buffers: list[Any], device: torch.device) -> Iterator[None]:
    """Within this context these are on the device; afterwards they have their old memory, with buffers updated."""
    kept = [t.data for t in (*weights, *buffers)]
    for t, value in zip((*weights, *buffers), kept, strict=True):
        t.data = value.to(device)
    try:
        yield
    finally:
        for t, value in zip(buffers, kept[len(weights) :], strict=True):
            value.copy_(t.data)  # statistics, in training mode
        for t, value in zip((*weights, *buffers), kept, strict=True):
            t.data = value


@contextmanager
def staying(module: nn.Module) -> Iterator[None]:
    """Within this context, moving or casting the modules around this one leaves it as it is."""
    module._apply = lambda fn, recurse=True: module  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module._apply
