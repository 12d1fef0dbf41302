"""Seen batches: what graphs know of a batch of `training_step`: its tensors, and where they and `None` stand.

Whatever else stands in a batch, say the names of files, differs from slice to slice. Graphs stand for a `training_step`
that does not look at it.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor

from pipeback.lightning.plain_values import NotPlain, trusted
from pipeback.tensors.structures import SINGLE, Form, Ref, openable, opened, parts

CODE = types.FunctionType, property, classmethod, staticmethod
READS = {
    "__getattr__",
    "__getattribute__",
    "__getitem__",
    "__iter__",
    "__len__",
    "__contains__",
    "__bool__",
    "__call__",
}
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
    if type(value) is Tensor:
        return [value]
    found = parts(value)
    return found if all(type(part) is Tensor for part in found) else opened(value)[0]


def form_of(batch: Any) -> Form:
    """Where the tensors of a batch stand. Raises `NotPlain` for one with objects in it."""
    check_classes(batch)
    form = opened(batch)[1]
    if form.objects:
        raise NotPlain("gets batches with objects in them")
    return form._replace(constants=tuple([c if c is None or isinstance(c, Ref) else _UNSEEN for c in form.constants]))


def filled(form: Form, tensors: Sequence[Tensor]) -> Any:
    """A batch of this form with these tensors."""
    unseen = Ref(len(tensors))
    constants = tuple([unseen if c == _UNSEEN else c for c in form.constants])
    return form._replace(constants=constants).fill([*tensors, _Unseen()])


def check_classes(value: Any) -> None:
    """Raise `NotPlain` where a structure has an object in it whose class has code of the user's, which runs unseen."""
    kind = type(value)
    if kind in SINGLE:
        return
    if not issubclass(kind, Tensor) and _runs(kind):
        raise NotPlain(f"has a {kind.__name__} in what it computes with, whose class has functions of its own")
    own = [*getattr(value, "__dict__", {}).values()] if openable(value) else []
    inside = [*value.values()] if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
    for part in (*own, *inside):
        check_classes(part)


def _runs(kind: type) -> bool:
    """Whether reading what objects of a class hold may run code of the user's."""
    mine = [each for one in kind.__mro__ if not trusted(one) for each in vars(one).items()]
    return any(name in READS or (name[0] != "_" and isinstance(found, CODE)) for name, found in mine)
