"""Step calls: hears what a `training_step` computes with trained weights or draws, whatever modules it calls.

A call is heard where `training_step` itself makes it, not within another one: of a module with trained weights (be it
the LightningModule), of a torch function that is given a trained weight, and of one that draws random numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pipeback.private import function_modes
from pipeback.splitting.draw_checks import DRAWS
from pipeback.splitting.torch_functions import about
from pipeback.tensors.structures import PLAIN, parts

DROPS = {
    "dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "alpha_dropout_",
    "feature_dropout", "feature_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_", "native_dropout", "rrelu",
    "rrelu_", "gumbel_softmax", "fractional_max_pool2d", "fractional_max_pool3d",
}  # fmt: skip
TURNS = {"T", "mT", "H", "mH", "real", "imag"}  # properties that autograd follows
OPERATORS = type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor)
LOOKS = {"detach", "size", "dim", "numel", "register_hook", "requires_grad_"}  # a weight that is looked at, not used


class Heard(NamedTuple):
    """A call that a `training_step` makes."""

    name: str  # as in messages
    uses: bool  # trained weights; otherwise it only draws
    does: Callable[[], Any]  # runs it
    made_of: tuple[Any, ...]  # its plain arguments, and by which operations its tensors come from the batch and calls
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operator: bool = False  # whether it is one of torch.ops


class StepCalls(TorchFunctionMode):
    """Gives each call of one `training_step` to `hear`, which returns what the call returns.

    inputs: the tensors of the batch. weights: the names of the trained parameters, by identity.
    """

    def __init__(self, weights: Mapping[int, str], inputs: Sequence[Tensor], hear: Callable[[Heard], Any]) -> None:
        super().__init__()
        self.inside = 0  # how many heard calls are running, one within the other
        self._weights, self._hear = weights, hear
        self._thread = threading.get_ident()
        self._origins = {id(tensor): hash(("input", n)) for n, tensor in enumerate(inputs)}
        self._alive: list[Any] = [*inputs]  # so that ids are not reused
        self._heard = 0

    @property
    def apart(self) -> bool:
        """Whether nothing is heard now, because a heard call or another thread is running."""
        return bool(self.inside) or threading.get_ident() != self._thread

    def module(self, name: str, does: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """Hear the call of a module with trained weights."""
        if self.apart or not torch.is_grad_enabled():
            return does()
        with self.off():
            return self._hears(Heard(name, True, does, self._origin(name, parts((args, kwargs))), args, kwargs))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.apart:
            return func(*args, **kwargs)
        known = about(func)
        name = known.name if known.property is None else known.property
        given = parts((args, kwargs))
        weight = next((self._weights[id(x)] for x in given if id(x) in self._weights), None)
        uses = weight is not None and torch.is_grad_enabled() and self._used(name, known.property)
        if not uses and name not in DRAWS and name not in DROPS:
            output = func(*args, **kwargs)
            if isinstance(output, Tensor) or (not isinstance(output, PLAIN) and any(map(_is_tensor, parts(output)))):
                self._note(output, self._origin(name, given))
            return output
        shown = f"{name} of self.{weight}" if uses else f"the random numbers of {name}"
        does = partial(func, *args, **kwargs)
        of_ops = isinstance(func, OPERATORS)
        return self._hears(Heard(shown, uses, does, self._origin(name, given), args, kwargs, of_ops))

    @contextmanager
    def off(self) -> Iterator[None]:
        """A context within which torch functions are not heard at all, if nobody else listens on top."""
        modes = function_modes()
        top = bool(modes) and modes[-1] is self
        if top:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            if top:
                self.__enter__()  # type: ignore[no-untyped-call]

    def _hears(self, call: Heard) -> Any:
        self.inside += 1
        try:
            output = self._hear(call)
        finally:
            self.inside -= 1
        self._note(output, ("call", self._heard))
        self._heard += 1
        return output

    @staticmethod
    def _used(name: str, read: str | None) -> bool:
        """Whether a function uses the values of a weight that it is given. read: the property that it reads."""
        return name not in LOOKS if read is None else read in TURNS

    def _origin(self, name: str, given: Sequence[Any]) -> tuple[Any, ...]:
        return (name, *map(self._of, given))

    def _of(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._origins.get(id(value), tuple(value.shape))
        return repr(value) if isinstance(value, PLAIN) else type(value).__name__

    def _note(self, output: Any, origin: Any) -> None:
        for n, tensor in enumerate(x for x in parts(output) if isinstance(x, Tensor)):
            self._origins[id(tensor)] = hash((origin, n))
            self._alive.append(tensor)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
