"""Intercepted gradients: each is added to its sum as soon as autograd has it, and never reaches `.grad`.

A backward in a thread of our own must not add up gradients in `.grad`, which the user's thread may clear meanwhile. To
ask autograd for all gradients, and to add them afterwards, reads each from memory once more, and all are held at once.
So a hook stands before the node of each weight that would add to `.grad`. Within such a backward it adds the gradient
to our sum, as that node would have done, and hands the node nothing; otherwise it does nothing.

On a CPU a backward runs in the thread that has begun it, by which the hook tells ours from the user's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

Add = Callable[[int, Tensor], None]  # the number of the weight, and its gradient


class Intercepts:
    """The hooks before the nodes of the weights `params`. add: a method, of an object that is not kept alive."""

    def __init__(self, params: Sequence[Tensor], add: Add) -> None:
        self.thread = 0  # the one whose gradients are taken; 0: nobody's
        self._forms = _forms(params)
        mine, adding = weakref.ref(self), weakref.WeakMethod(add)
        # torch forgets a node that no graph has, and its hooks with it
        self._nodes = [get_gradient_edge(p).node if p.requires_grad else None for p in params]
        self._handles = [
            node.register_prehook(_hook(n, mine, adding)) for n, node in enumerate(self._nodes) if node is not None
        ]

    def fit(self, params: Sequence[Tensor]) -> bool:
        """Whether the weights still have these nodes: torch makes another one for another type or device."""
        return self._forms == _forms(params)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


@contextmanager
def taking(some: Sequence[Intercepts]) -> Iterator[None]:
    """A context within which the backwards of this thread add to the sums of these, and of no others."""
    thread = get_ident()
    for one in some:
        one.thread = thread
    try:
        yield
    finally:
        for one in some:
            one.thread = 0


def able(params: Sequence[Tensor]) -> bool:
    """Whether the backward of these weights runs in the thread that begins it."""
    return all(type(p) in (Tensor, torch.nn.Parameter) and p.device.type == "cpu" for p in params)


def _forms(params: Sequence[Tensor]) -> list[Any]:
    return [(p.dtype, p.device, p.requires_grad) for p in params]


def _hook(n: int, of: weakref.ref[Intercepts], add: weakref.WeakMethod[Add]) -> Callable[[Any], Any]:
    def intercept(found: tuple[Tensor | None]) -> tuple[None] | None:
        one = of()
        if one is None or one.thread != get_ident() or (adding := add()) is None:
            return None
        if (gradient := found[0]) is not None:
            adding(n, gradient)
        return (None,)

    return intercept
