"""Call outputs: what a recorded call gives must have the structure that it had in the trace, and no new gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeback.private import pytree
from pipeback.tensors.structures import Absent, Form, Ref, openable, opened


class Opened:
    """Returns the tensors in the output of a call; raises if they differ from those in the trace in what matters.

    form: the structure in the trace. still: which of the tensors needed no gradient; later stages give them none. who,
    whole: for errors, see `refusals`.
    """

    __name__, __module__ = "opened", "pipeback"

    def __init__(self, form: Form, still: Sequence[int], who: str, whole: str) -> None:
        self.form, self.still, self.who, self.whole = form, still, who, whole
        self.expects: Any = form, still
        self._open = opener(form)

    def __call__(self, value: Any) -> list[Tensor]:
        found = self._tensors(value)
        for n in self.still:
            if type(found[n]) is not Absent and found[n].requires_grad:
                raise ValueError(
                    f"{self.who} gave a tensor that needs a gradient, which needed none when the model was traced; "
                    f"keep what calls it whole: {self.whole}"
                )
        return found

    def _tensors(self, value: Any) -> list[Tensor]:
        found: list[Tensor] = []
        if self._open is not None and self._open(value, found):
            return found
        tensors, form = opened(value, opens=openable)
        if form.spec != self.form.spec or _constants(form) != _constants(self.form):
            raise ValueError(
                f"{self.who} gave another structure than when the model was traced: {_told(form)} instead of "
                f"{_told(self.form)}; give the same one for every micro-batch of a shape, tensors for what changes, or "
                f"keep what calls it whole: {self.whole}"
            )
        return tensors


def _constants(form: Form) -> list[Any]:
    """Return the constants without devices: a stage may be on another device than where it was traced."""
    return [c for c in form.constants if not isinstance(c, torch.device)]


_Open = Callable[[Any, list[Tensor]], bool]


def opener(form: Form) -> _Open | None:
    """Return a function that appends the tensors of a structure to a list and says whether the structure has this form.

    It does what `opened` does in a fraction of the time. None for structures that have more than tuples, lists and
    dictionaries in them.
    """
    constants = iter(form.constants)

    def build(spec: pytree.TreeSpec) -> _Open | None:
        kind = spec.type
        if kind is None:
            constant = next(constants)
            return _a_tensor if isinstance(constant, Ref) else partial(_constant, constant)
        if kind not in (tuple, list, dict):
            return None
        inner = [build(child) for child in spec.children()]
        parts = [part for part in inner if part is not None]
        if len(parts) < len(inner):
            return None
        keys = spec.context if kind is dict else None

        def open_it(value: Any, found: list[Tensor]) -> bool:
            if type(value) is not kind or len(value) != len(parts) or (keys is not None and list(value) != keys):
                return False
            return all(part(child, found) for part, child in zip(parts, value.values() if keys is not None else value))

        return open_it

    return build(form.spec)


def _a_tensor(value: Any, found: list[Tensor]) -> bool:
    found.append(value)
    return isinstance(value, Tensor)


def _constant(constant: Any, value: Any, found: list[Tensor]) -> bool:
    return not isinstance(value, Tensor) and bool(value == constant)


def _told(form: Form) -> str:
    return str(form.fill([f"tensor {n}" for n in range(len(form.constants))]))
