"""Seen batches: what graphs know of a batch of `training_step`: its tensors, and where they and `None` stand.

Whatever else stands in a batch, say the names of files, differs from slice to slice. Graphs stand for a `training_step`
that does not look at it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor

from pipeback.lightning.plain_values import NotPlain
from pipeback.tensors.structures import SINGLE, Form, Ref, is_named_tuple, opened, parts

_UNSEEN = "unseen"  # in the place of what stands there


class _Unseen:
    """Stands for what a `training_step` must not look at: whatever is done with it is an error."""

    def _looked_at(self, *_: Any) -> NoReturn:
        raise NotPlain("looks at something in its batch that is no tensor")

    __class__ = property(_looked_at)
    __getattr__ = __call__ = __getitem__ = __iter__ = __contains__ = __len__ = _looked_at
    __bool__ = __int__ = __float__ = __index__ = __hash__ = __str__ = __repr__ = __format__ = _looked_at
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _looked_at
    __neg__ = __pos__ = __abs__ = __invert__ = __round__ = _looked_at
    __add__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = __matmul__ = _looked_at
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = __rpow__ = __rmatmul__ = _looked_at


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of a structure, in order."""
    found = parts(value)
    return found if all(type(part) is Tensor for part in found) else opened(value)[0]


def form_of(batch: Any) -> Form:
    """Where the tensors of a batch stand. Raises `NotPlain` for one with objects in it, whose classes may have code."""
    _check(batch)
    form = opened(batch)[1]
    return form._replace(constants=tuple([c if c is None or isinstance(c, Ref) else _UNSEEN for c in form.constants]))


def filled(form: Form, tensors: Sequence[Tensor]) -> Any:
    """A batch of this form with these tensors."""
    unseen = Ref(len(tensors))
    constants = tuple([unseen if c == _UNSEEN else c for c in form.constants])
    return form._replace(constants=constants).fill([*tensors, _Unseen()])


def _check(value: Any) -> None:
    kind = type(value)
    named = is_named_tuple(kind)
    if kind in (tuple, list, dict) or named:
        for part in value.values() if kind is dict else value:
            _check(part)
    if (named and _runs(kind)) or (kind not in SINGLE and opened(value)[1].objects):
        raise NotPlain(f"gets batches with a {kind.__name__} in them")


def _runs(kind: type) -> bool:
    """Whether reading an attribute of a named tuple may run code of the user's."""
    return any(isinstance(a, property) for one in kind.__mro__ for a in vars(one).values() if one is not object)
