"""Batches: what users push, in whatever structure it comes, cut into slices; and targets as messages within a worker.

A batch is a tensor, or a structure with tensors in it: tuples, lists, dictionaries and other mappings, what tokenizers
give (a UserDict), named tuples and dataclasses, in one another. Other objects are not looked into. `structures` takes a
batch apart and puts it together.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor

from pipeback.private import pytree
from pipeback.tensors.copies import replica
from pipeback.tensors.structures import PLAIN, SINGLE, Form, Object, Ref, apart, made, openable, opened, parts

NUMBERS = (bool, int, float, type(None))  # what may stand in a message beside tensors


class Structure:
    """The last part of a target that has a structure: the form in which the parts before it, tensors, stand."""

    def __init__(self, form: Form) -> None:
        self.form = form

    def __repr__(self) -> str:  # by which ranks compare what they were given
        return f"Structure({self.form})"


def bare(batch: Any) -> Any:
    """Return a batch whose UserDicts have their items and plain attributes only.

    A tokenizer's dictionary also keeps what it has made of every text. That differs each time, and no model needs it.
    """
    if type(batch) in SINGLE or not any(isinstance(leaf, UserDict) for leaf in parts(batch)):
        return batch
    return pytree.tree_map(lambda leaf: _items(leaf) if isinstance(leaf, UserDict) else leaf, batch)


def _items(batch: UserDict[Any, Any]) -> UserDict[Any, Any]:
    found = batch.__class__.__new__(batch.__class__)
    own = {name: value if isinstance(value, (Tensor, *PLAIN)) else None for name, value in vars(batch).items()}
    vars(found).update(own, data=bare(dict(batch.data)))
    return found


def tensors(batch: Any) -> list[Tensor]:
    """Return every tensor in a batch."""
    inside = parts(batch) if simple(batch) else opened(bare(batch), opens=_holds)[0]
    return [part for part in inside if isinstance(part, Tensor)]


def samples(batch: Any) -> list[int]:
    """Return the length of every tensor in a batch that has dimensions."""
    return [len(part) for part in tensors(batch) if part.dim()]


def sizes(length: int, size: int) -> list[int]:
    """Return the lengths of slices of `size` samples out of `length`; the last may have fewer."""
    return [min(size, length - begin) for begin in range(0, length, size)]


def cut(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Cut a batch into slices of so many samples, which are all that it has.

    Tensors are cut along their first dimension, and so is a list without tensors or containers that has one entry per
    sample (strings, say). Every slice gets everything else whole, in objects of its own.
    """
    ends = list(accumulate(sizes))
    bounds = list(zip([0, *ends], ends, strict=False))
    if _flat(batch):  # as most loaders give it: much sooner than by its form
        each = zip(*(_parts(leaf, bounds) for leaf in batch), strict=True)
        return list(each) if type(batch) is tuple else list(map(list, each))
    leaves, spec = pytree.tree_flatten(apart(bare(batch), set(), _holds), is_leaf=_list_of_plain)

    def part(leaf: Any, begin: int, end: int) -> Any:
        along = leaf.dim() > 0 if isinstance(leaf, Tensor) else isinstance(leaf, list) and len(leaf) == ends[-1]
        return leaf[begin:end] if along else leaf

    return [made(pytree.tree_unflatten([part(leaf, begin, end) for leaf in leaves], spec)) for begin, end in bounds]


def _flat(batch: Any) -> bool:
    """Whether a batch is a tuple or list of tensors, and of other values in which there is nothing to cut."""
    plain = type(batch) in (tuple, list) and SINGLE.issuperset(map(type, batch))
    return plain and any(isinstance(leaf, Tensor) for leaf in batch)


def _parts(leaf: Any, bounds: Sequence[tuple[int, int]]) -> list[Any]:
    """The parts of a tensor within these bounds; anything else whole."""
    along = isinstance(leaf, Tensor) and leaf.dim() > 0
    return [leaf[begin:end] for begin, end in bounds] if along else [leaf] * len(bounds)


def _holds(value: Any) -> bool:
    return (isinstance(value, (Mapping, list, tuple)) or is_dataclass(value)) and openable(value)


def _list_of_plain(node: Any) -> bool:
    return isinstance(node, list) and not any(isinstance(x, (Tensor, list, tuple, Mapping, Object)) for x in node)


def simple(target: Any) -> bool:
    """Whether a target is a message as it is: a tensor, a number, None, or a tuple of these."""
    inside = target if type(target) is tuple else (target,)
    return all(isinstance(part, (Tensor, *NUMBERS)) for part in inside)


def checked(target: Any) -> Any:
    """Return a target whose tensors are detached from the graphs that made them, which are not trained here.

    Raises TypeError if something in it is neither a tensor nor a number, a string or None.
    """
    if simple(target):
        return tuple(map(_cut_off, target)) if type(target) is tuple else _cut_off(target)
    tensors, form = opened(bare(target), opens=_holds)
    odd = [c for c in form.constants if not isinstance(c, (*NUMBERS, str, Ref))]
    if odd:
        kind = type(odd[0]).__name__
        array = hasattr(odd[0], "__array__")
        cure = "give torch.as_tensor of it" if array else "leave it out, or put what the loss needs into a dictionary"
        raise TypeError(
            f"y must be tensors, numbers, strings and Nones, alone or in tuples, lists, dictionaries, named tuples and "
            f"dataclasses, but {'is' if odd[0] is target else 'has'} something of type {kind}; {cure}"
        )
    return form.fill([_cut_off(tensor) for tensor in tensors])


def _cut_off(part: Any) -> Any:
    return part.detach() if isinstance(part, Tensor) else part


def copied(batch: Any) -> Any:
    """Return the same with a `replica` of every tensor."""
    if simple(batch):
        return tuple(map(_replica, batch)) if type(batch) is tuple else _replica(batch)
    tensors, form = opened(bare(batch), opens=_holds)
    return form.fill([replica(tensor) for tensor in tensors])


def _replica(part: Any) -> Any:
    return replica(part) if isinstance(part, Tensor) else part


def flat(target: Any) -> Any:
    """Return a target as a message: as it is, or its tensors and their `Structure`."""
    if simple(target):
        return target
    tensors, form = opened(bare(target), opens=_holds)
    return (*tensors, Structure(form))


def whole(message: Any) -> Any:
    """Return the target that `flat` has made a message of, with the tensors that are in the message now."""
    if type(message) is tuple and message and isinstance(message[-1], Structure):
        return message[-1].form.fill(message[:-1])
    return message
