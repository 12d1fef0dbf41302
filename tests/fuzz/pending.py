"""Faults that are known and not yet mended: a program that shows each, and which programs may meet it.

The search leaves those out, and a test sees each fail: whoever mends one is told to take it out here.
"""

from __future__ import annotations

from collections.abc import Callable

from .cases import METHODS
from .program import Program


def _calls(program: Program, *names: str) -> bool:
    return any(name in names for name, *_ in program.calls)


def _vectorized(program: Program) -> bool:
    return bool(program.runtime.get("vectorize"))


def _grouped(program: Program) -> bool:
    """Whether sums of gradients may wait for the next push."""
    return METHODS[program.method].reference([()] * program.stages, "sgd").every not in (None, 1)


PENDING: dict[str, tuple[Program, Callable[[Program], bool]]] = {
    "each joined twin of an optimizer counts for itself, in its groups": (
        Program(optimizer="counting", calls=(("push", 1),) * 8),
        lambda p: p.optimizer == "counting",
    ),
    "and on itself": (
        Program(optimizer="counter", calls=(("push", 1),) * 8),
        lambda p: p.optimizer == "counter",
    ),
    "zero_grad destroys gradient sums that are kept across pushes": (
        Program(stages=1, method="2bw-S+1", calls=(("push", 1), ("zero_grad",), ("drain",))),
        lambda p: _calls(p, "zero_grad", "own_backward") and _grouped(p),
    ),
    "stages that run as one: what vmap or the capture cannot do fails the first push": (
        Program(stages=4, form="followed", runtime={"vectorize": True}, calls=(("push", 1),)),
        lambda p: _vectorized(p) and (p.form == "followed" or p.model in ("convolutional", "depthwise")),
    ),
    "eval() takes effect at a random time with workers": (
        Program("dropping", stages=2, runtime={"workers": 2}, calls=(("push", 7), ("eval",)) * 3),
        lambda p: _calls(p, "eval", "train") and bool(p.runtime.get("workers") or p.options.get("replicas")),
    ),
}
