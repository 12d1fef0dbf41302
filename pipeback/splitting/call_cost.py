"""Call cost: the cost of a call, counted rather than measured, so that a model is always cut at the same places.

    work = FLOPs + 8·bytes + 10⁵·operations

FLOPs are those of products, convolutions and attention, as torch.utils.flop_counter counts them; bytes are those that
an operation reads and writes. The factors fit a core of a few tens of GFLOP/s, up to a small factor. Fixed factors make
the cuts the same on every machine, and not much worse than measured ones would.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pipeback.private import TorchDispatchMode, functions_unheard, pytree

BYTE, OPERATION = 8.0, 1e5  # in FLOPs


class Work(TorchDispatchMode):
    """A context that counts the work of all operations within it."""

    def __init__(self) -> None:
        from torch.utils.flop_counter import flop_registry  # imports triton

        super().__init__()  # type: ignore[no-untyped-call]
        self.done = 0.0
        self._flops = flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with functions_unheard():  # a tracer that hears of functions would take operators, without gradients, for them
            out = func(*args, **kwargs)
        if getattr(func, "is_view", False):
            return out
        flops = self._flops.get(getattr(func, "overloadpacket", None))
        if flops is not None:
            self.done += flops(*args, **kwargs, out_val=out)
        moved = sum(_bytes(t) for t in pytree.tree_leaves((args, kwargs, out)) if isinstance(t, Tensor))
        self.done += BYTE * moved + OPERATION
        return out


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
