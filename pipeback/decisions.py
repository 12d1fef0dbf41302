"""Decisions: what a forward decides by numbers of its input (`if mask.all()`), found out before a micro-batch goes in.

A model that was followed does what it did then. Where it would go another way for the numbers of a later micro-batch,
and these follow from the input by torch functions alone, it is followed that way too: a variant of the micro-batch's
form. Stages tell variants by a mark that travels beside the values: its shape says which.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipeback.follow import Attribute, Call, Record, Ref, opened

OPERATORS = "add sub mul truediv floordiv mod pow and or xor lshift rshift matmul"
CHANGING = {"__setitem__", "__delitem__", *[f"__i{name}__" for name in OPERATORS.split(" ")]}
SIDE = 32  # the longest side of a mark
MOST = 64  # ways for micro-batches of one form


class Decision(NamedTuple):
    """calls: in their order, the last one asks. constants: tensors that they take by name."""

    calls: list[Call]
    constants: dict[str, Tensor]

    def holds(self, inputs: Sequence[Tensor]) -> bool:
        """Whether it falls as it did when the model was followed."""
        known: dict[int, Tensor] = dict(enumerate(inputs))

        def filled(value: Any) -> Any:
            if isinstance(value, Ref):
                return known[value.number]
            return self.constants[value.name] if isinstance(value, Attribute) else value

        found = None
        with torch.no_grad():
            for call in self.calls:
                args, kwargs = pytree.tree_map(filled, (call.args, call.kwargs))
                found = call.target(*args, **kwargs)
                if call.check is None:
                    values = [found] if call.form is None else opened(found)[0]
                    known.update(zip(call.out, values, strict=True))
        return bool(found == self.calls[-1].check[0])


def decisions(record: Record, inputs: Sequence[Tensor] | None) -> list[Decision]:
    """Those that follow from the input alone: no layer, no weight, nothing that is changed in place.

    inputs: what was followed, for which they hold; None: they are known to.
    """
    makers: dict[int, Call] = {}
    clear = set(range(record.inputs))
    for call in record.calls:
        refs = {ref.number for ref in call.refs()}
        if _changes(call):
            clear -= refs
        elif not call.module and refs <= clear and set(call.attributes()) <= set(record.constants):
            clear |= set(call.out)
        makers.update(dict.fromkeys(call.out, call))
    found = []
    for n, call in enumerate(record.calls):
        wanted = [ref.number for ref in call.refs()]
        if call.check is None or not clear.issuperset(wanted):
            continue
        needed: set[int] = set()
        while wanted:
            number = wanted.pop()
            if number in makers and id(makers[number]) not in needed:
                needed.add(id(makers[number]))
                wanted += [ref.number for ref in makers[number].refs()]
        calls = [other for other in record.calls[:n] if id(other) in needed]
        found.append(Decision([*calls, call], record.constants))
    return [decision for decision in found if inputs is None or decision.holds(inputs)]


def mark(taken: Sequence[Decision], others: Sequence[Tensor]) -> Tensor:
    """What travels beside the values: its shape is of the way that was taken, whichever way came first.

    others: marks of other ways. Where the shape is one of theirs, which is rare, it is another.
    """
    number = zlib.crc32(repr([(_name(d.calls[-1]), d.calls[-1].check) for d in taken]).encode())
    while True:
        found = torch.zeros(1 + number % SIDE, 1 + number // SIDE % SIDE, dtype=torch.bool)
        if all(found.shape != other.shape for other in others):
            return found
        number += 1


def _name(call: Call) -> str:
    return getattr(call.target, "__name__", "")


def _changes(call: Call) -> bool:
    """Whether a function may change what it is given."""
    name = _name(call)
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in CHANGING or "out" in call.kwargs or bool(call.kwargs.get("inplace"))
