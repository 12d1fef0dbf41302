"""Forward check: the stages of a traced model, run one after the other, must give the same output as its forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from pipeback.tensors.copies import replica
from pipeback.tensors.structures import opened


def check_equal(
    model: nn.Module,
    forward: Callable[[], Any],
    stages: Sequence[nn.Module],
    x: Any,
    unchanged: Callable[[], AbstractContextManager[None]],
) -> None:
    """Raise ValueError unless the stages give what the forward does: bit for bit on the CPU.

    x: the input of the first stage. unchanged: a context that restores buffers and the random state.
    """
    found = []
    for run in (forward, lambda: _chain(stages, x)):
        with unchanged(), torch.enable_grad():  # which kernels run depends on which tensors need a gradient
            found.append([part.detach() for part in opened(run())[0]])
    for a, b in zip(*found, strict=True):
        if not _equal(a, b):
            raise ValueError(
                f"the stages of {type(model).__name__} do not give what its forward does: something in it changes from "
                "call to call, or in place under another name; give the path of the module that does so in "
                "stages=pipeback.Splitting(leaves=[...]), or "
                "keep the whole model one stage: stages=pipeback.Splitting(leaves=[''])"
            )


def _chain(stages: Sequence[nn.Module], x: Any) -> Any:
    for s, stage in enumerate(stages):
        try:
            x = stage(_given(x, s > 0))
        except RuntimeError as error:
            if "a leaf Variable" not in str(error):
                raise ValueError(
                    f"stage {s} cannot do what the forward does there: {error}; if the forward differentiates its own "
                    "layers (torch.autograd.grad), have one module do it, under torch.enable_grad(), and give the path "
                    "of that module in stages=pipeback.Splitting(leaves=[...]), or keep the whole model one stage: "
                    "stages=pipeback.Splitting(leaves=[''])"
                ) from error
            x = stage(_given(x, True, cloned=True))
    return x


def _equal(a: Tensor, b: Tensor) -> bool:
    """Compare bit for bit on the CPU, and closely elsewhere, where kernels may sum in another order in each run."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    same = torch.isclose(a, b, equal_nan=True) if a.device.type != "cpu" else (a == b) | ((a != a) & (b != b))
    return bool(same.all())


def _given(x: Any, grad: bool, cloned: bool = False) -> Any:
    """Return new tensors for the input of a stage.

    grad: whether they need a gradient. cloned: clone them once more, since autograd forbids to change leaves of its
    graph in place.
    """
    given = x if type(x) is tuple else (x,)
    parts = tuple(replica(part).requires_grad_(grad and part.is_floating_point()) for part in given)
    parts = tuple(part.clone() for part in parts) if cloned else parts
    return parts if len(parts) > 1 else parts[0]
