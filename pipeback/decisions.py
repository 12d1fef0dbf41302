"""Decisions: what Python has decided by numbers of the input, to be asked of a micro-batch before it is let in.

Models of transformers skip a padding mask where nothing is padded. A micro-batch that decides otherwise than the one
that was followed needs other operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipeback.follow import Call, Record, Ref, opened

DRAWS = ("rand", "drop", "bernoulli", "multinomial", "normal", "poisson", "exponential")


class Decisions:
    """Those of a record that depend on the input alone, by functions that neither draw nor write."""

    def __init__(self, record: Record) -> None:
        self.calls: list[Call] = []
        self.device = record.device
        made: dict[int, Call | None] = dict.fromkeys(range(record.inputs))  # of numbers that can be had in advance
        written = {r.number for call in record.calls if _writes(call) for r in call.refs()}
        needed: set[int] = set()
        checks = []
        for call in record.calls:
            numbers = [r.number for r in call.refs()]
            if call.module or call.attributes() or _draws(call) or any(n not in made or n in written for n in numbers):
                continue
            if call.check is not None:
                checks.append(call)
                needed.update(numbers)
            made.update(dict.fromkeys(call.out, call))
        for call in reversed(record.calls):
            if any(call is check for check in checks):
                self.calls.append(call)
            elif needed & set(call.out) and all(made.get(n) is call for n in call.out):
                self.calls.append(call)
                needed.update(r.number for r in call.refs())
        self.calls.reverse()

    @torch.no_grad()
    def hold(self, parts: Sequence[Tensor]) -> bool:
        """Whether these inputs lead to the same ones."""
        known = dict(enumerate(parts))

        def filled(value: Any) -> Any:
            if isinstance(value, torch.device) and value == self.device:
                return parts[0].device
            return known[value.number] if isinstance(value, Ref) else value

        for call in self.calls:
            args, kwargs = pytree.tree_map(filled, (call.args, call.kwargs))
            found = call.target(*args, **kwargs)
            if call.check is not None:
                if found != call.check[0]:
                    return False
                continue
            known.update(zip(call.out, [found] if call.form is None else opened(found)[0], strict=True))
        return True


def _name(call: Call) -> str:
    return getattr(call.target, "__name__", "")


def _draws(call: Call) -> bool:
    return any(word in _name(call) for word in DRAWS)


def _writes(call: Call) -> bool:
    name = _name(call)
    inplace = name.endswith("_") and not name.endswith("__")
    return inplace or name in ("__setitem__", "__delitem__") or (name.startswith("__i") and len(name) == 8)
