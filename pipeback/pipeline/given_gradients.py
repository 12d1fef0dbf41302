"""Given gradients: those that a user gives for the outputs of a model, which are checked before anything runs on them.

As in torch's `output.backward(gradient)`, a gradient has the shape of its output, and a real one of another type is
converted to the output's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeback.stages.flight import Value
from pipeback.tensors.batches import copied

OWN = "call backward on the loss, and give what it leaves there: "


@dataclass(frozen=True)
class OutputForm:
    """What is known of a tensor of the output while its gradient is waited for."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        return f"of shape {tuple(self.shape)} and {self.dtype}"


def form_of(output: Value) -> Any:
    """The `OutputForm` of an output, or of each of its parts; None where it is with another rank."""
    if isinstance(output, tuple):
        return tuple(form_of(part) for part in output)
    return OutputForm(output.shape, output.dtype, output.device) if isinstance(output, Tensor) else None


def nothing(gradient: Value) -> bool:
    """Whether a loss depends on no part of an output."""
    return gradient is None or (isinstance(gradient, tuple) and all(part is None for part in gradient))


def taken_at_once(gradient: Any, output: Value) -> Value:
    """Return the gradient of an output that B takes at once. Raises TypeError or ValueError if it can be none."""
    plain = type(gradient) is Tensor and type(output) is Tensor  # as nearly always, and per micro-batch
    if plain and gradient.shape == output.shape and gradient.dtype == output.dtype:
        return gradient
    return taken(gradient, form_of(output))


def taken(gradient: Any, form: Any) -> Value:
    """Return a copy of the gradient of an output, as its stage takes it. form: that of the output.

    Raises TypeError or ValueError if it can be none.
    """
    if form is None or nothing(gradient):
        return copied(gradient)
    if not isinstance(form, tuple):
        single = isinstance(gradient, (tuple, list)) and len(gradient) == 1
        return _one(gradient[0] if single else gradient, form, "output of forward", f"{OWN}output.grad")
    if isinstance(gradient, Tensor) and len(form) == 1:
        gradient = (gradient,)
    cure = f"{OWN}tuple(part.grad for part in output), a gradient or None for each"
    if not isinstance(gradient, (tuple, list)) or len(gradient) != len(form):
        raise ValueError(
            f"backward was given {_shown(gradient)}, but the output of forward has {len(form)} tensors; {cure}"
        )
    return tuple(_one(g, part, f"part {n} of the output", cure) for n, (g, part) in enumerate(zip(gradient, form)))


def _one(gradient: Any, form: OutputForm | None, what: str, cure: str) -> Tensor | None:
    if gradient is None or form is None or not (form.dtype.is_floating_point or form.dtype.is_complex):
        return None  # nothing can be learnt through it
    if not isinstance(gradient, Tensor):
        raise TypeError(f"backward was given {_shown(gradient)}, but the {what} is a tensor {form}; {cure}")
    if gradient.shape != form.shape or gradient.is_complex() != form.dtype.is_complex:
        raise ValueError(f"backward was given {_shown(gradient)}, but the {what} is one {form}; {cure}")
    own: Tensor = copied(gradient)  # the caller may fill it anew before it is needed
    return own.to(form.device, form.dtype)


def _shown(gradient: Any) -> str:
    if isinstance(gradient, Tensor):
        return f"a tensor {form_of(gradient)}"
    of = f" of {len(gradient)}" if isinstance(gradient, (tuple, list)) else ""
    return f"{'an' if type(gradient).__name__[0] in 'aeiou' else 'a'} {type(gradient).__name__}{of}"
