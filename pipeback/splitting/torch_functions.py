"""Torch functions: properties of torch functions that the tracer needs, found out once per function."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from pipeback.splitting.data_sizes import FACTORIES, MAKERS, READERS, TELLING
from pipeback.splitting.in_place import PROPERTIES, changes, set_property
from pipeback.splitting.script_values import operator_of

# functions that give Python the values of a tensor
NUMBERS = {
    "item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__", "equal",
    "allclose", "is_nonzero",
}  # fmt: skip
AWAY = {"numpy", "__array__", "data_ptr", "__dlpack__", "storage", "untyped_storage"}  # these cannot be traced
ODD = {"__getitem__", "__setitem__", "_pad_packed_sequence", "register_hook"}  # these are recorded in their own ways
KIND = {"device", "dtype", "ndim", "layout", "requires_grad", "is_cuda", "is_cpu"}  # properties that are no tensors


class About(NamedTuple):
    """The properties of a torch function."""

    name: str
    target: Any  # the function that a stage calls
    property: str | None  # the name of the property that it reads or sets
    makes: bool  # it may give a tensor whose size depends on values
    reads: bool  # it gives Python a size of its first argument
    changes: bool  # it changes its first argument; a call with `out=` changes that, too
    acts: bool  # it is recorded even if it returns no tensor
    asks: bool  # it gives Python values of a tensor
    away: bool  # its result leaves torch
    fills: bool  # it is a function of torch.nn.init
    odd: bool  # it is recorded in another way than it is called
    kind: bool  # it tells Python the kind of a tensor, which is never recorded


def about(function: Any) -> About:
    """Return the properties of a torch function."""
    try:
        return _about(function)
    except TypeError:  # it has no hash
        return _about.__wrapped__(function)


@lru_cache(4096)
def _about(function: Any) -> About:
    name = getattr(function, "__name__", "")
    held = function.__self__.__name__ if name in ("__get__", "__set__") else None
    target = operator_of(function) if held is None else getattr if name == "__get__" else set_property
    maker = name in MAKERS or name in ("__getitem__", "where") or name in FACTORIES
    in_place = changes(name, {})
    return About(
        name,
        target,
        held,
        maker,
        name in READERS or (name == "__get__" and held in TELLING),
        in_place and (held is None or held == "data"),
        in_place and (held is None or held in PROPERTIES),
        name in NUMBERS,
        name in AWAY,
        getattr(function, "__module__", "") == "torch.nn.init",
        name in AWAY or name in ODD or held is not None,
        name == "__get__" and held in KIND,
    )
