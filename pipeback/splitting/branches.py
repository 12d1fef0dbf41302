"""Branches: decisions of a forward by values of its input (`if mask.all()`), evaluated before a micro-batch goes in.

A traced model repeats the operations of the trace. If a later micro-batch would take another branch, and the deciding
value depends on the input through torch functions alone, the model is traced along that branch too, as a variant for
micro-batches of that form. A mark that travels beside the values tells stages the variant, by its shape.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeback.private import pytree, unset_fake_temporarily
from pipeback.splitting.call_trace import Attribute, Call, CallTrace
from pipeback.splitting.in_place import changes, set_property
from pipeback.tensors.structures import SINGLE, Ref, opened

SIDE = 32  # the longest side of a mark
MOST = 64  # variants for micro-batches of one form


class Branch(NamedTuple):
    """A decision by values of the input.

    calls: those that lead to the decision, in their order; the last one gives the value that decides. constants: the
    tensors that they take by name. number: the place of the decision among all decisions of the trace.
    """

    calls: list[Call]
    constants: Mapping[str, Tensor]
    number: int
    device: torch.device | None = None  # the device of the traced input

    def falls(self, inputs: Sequence[Tensor]) -> Any:
        """Return the deciding value for these inputs."""
        known: dict[int, Tensor] = dict(enumerate(inputs))

        def filled(value: Any) -> Any:
            kind = type(value)
            if kind is Ref:
                return known[value.number]
            if kind is torch.device and value == self.device:
                return inputs[0].device
            if kind is Attribute:
                return self.constants[value.name]
            if kind is tuple or kind is list:
                return kind(map(filled, value))
            if kind in SINGLE or pytree.tree_is_leaf(value):
                return value
            return pytree.tree_map(filled, value, is_leaf=lambda x: x is not value)

        found = None
        with torch.no_grad():
            for call in self.calls:
                args, kwargs = filled(call.args), {key: filled(part) for key, part in call.kwargs.items()}
                found = call.target(*args, **kwargs)
                if call is not self.calls[-1]:
                    values = [found] if call.form is None else opened(found)[0]
                    known.update(zip(call.out, values, strict=True))
        return found

    def holds(self, inputs: Sequence[Tensor]) -> bool:
        """Whether the decision for these inputs is that of the trace."""
        return bool(self.falls(inputs) == self.calls[-1].check[0])


def decisions(record: CallTrace) -> list[Branch]:
    """Return the decisions that depend on the input alone: not on layers, weights or tensors changed in place."""
    asking = [(n, call) for n, call in enumerate(record.calls) if call.check is not None]
    found = [_traced(call, record.calls[:n], record.constants, number) for number, (n, call) in enumerate(asking)]
    return [decision._replace(device=record.device) for decision in found if decision is not None]


def told(inputs: Sequence[Tensor], call: Call, before: Sequence[Call], constants: Mapping[str, Tensor]) -> Any:
    """Return the value that a call reads from a tensor, where the model is traced by shapes alone.

    before: the calls before it. Raises ValueError if the value depends on weights.
    """
    decision = _traced(call, before, constants, 0)
    if decision is None:
        raise ValueError(
            f"{_name(call)} asks for a number that depends on weights, which are not here; have such a micro-batch "
            "traced while the model is whole, by pipe.plan(x, y) before the first push, or keep the decision within "
            "one layer: give the path of the deciding module in stages=pipeback.Splitting(leaves=[...])"
        )
    with unset_fake_temporarily():
        return decision.falls(inputs)


def _traced(asks: Call, before: Sequence[Call], constants: Mapping[str, Tensor], number: int) -> Branch | None:
    """Return the earlier calls that lead from the input to `asks`; None if it also depends on anything else."""
    makers: dict[int, Call] = {}
    changed: set[int] = set()
    for call in before:
        makers.update(dict.fromkeys(call.out, call))
        if alters(call):
            changed |= {ref.number for ref in call.refs()}
    needed: set[int] = set()
    wanted = [asks]
    while wanted:
        call = wanted.pop()
        refs = [ref.number for ref in call.refs()]
        if call.module or alters(call) or changed.intersection(refs) or not set(call.attributes()) <= set(constants):
            return None
        more = [makers[ref] for ref in refs if ref in makers and id(makers[ref]) not in needed]
        needed |= {id(call) for call in more}
        wanted += more
    return Branch([*(call for call in before if id(call) in needed), asks], constants, number)


def mark(taken: Sequence[Branch], others: Sequence[Tensor], constants: Sequence[Any] = ()) -> Tensor:
    """Return the mark that travels beside the values; its shape depends on the branches taken, not on their order.

    others: the marks of other variants; in the rare case that one has the same shape, another is chosen. constants:
    the numbers and strings that were pushed, if others have been pushed beside tensors of the same shapes.
    """
    told = repr([(_name(d.calls[-1]), d.calls[-1].check) for d in taken])
    number = zlib.crc32((told + repr([*constants]) if constants else told).encode())
    while True:
        found = torch.zeros(1 + number % SIDE, 1 + number // SIDE % SIDE, dtype=torch.bool, device="cpu")
        if all(found.shape != other.shape for other in others):
            return found
        number += 1


def _name(call: Call) -> str:
    return getattr(call.target, "__name__", "")


def alters(call: Call) -> bool:
    """Whether a function may change what it is given."""
    return call.target is set_property or changes(_name(call), call.kwargs)
