"""Written forms: how a saved state writes the structures in which tensors of micro-batches stand, as JSON has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pipeback.private import pytree
from pipeback.tensors.named_classes import SIMPLE
from pipeback.tensors.structures import Form, Object, Ref, is_named_tuple


def written(form: Form) -> dict[str, Any]:
    """Return a form as plain values. Raises ValueError if a saved state cannot hold it."""
    # torch writes only those named tuples that it was told of, but any object
    spec = pytree.tree_structure(_apart(pytree.tree_unflatten(form.constants, form.spec)))
    return {"structure": pytree.treespec_dumps(spec), "constants": [_plain(c) for c in form.constants]}


def read(plain: Mapping[str, Any]) -> Form:
    """Return the form that `written` gave. Raises ValueError for a class that was not imported."""
    constants = tuple(Ref(c["tensor"]) if isinstance(c, dict) else c for c in plain["constants"])
    try:
        spec = pytree.treespec_loads(plain["structure"])
    except NotImplementedError as error:
        raise ValueError(
            f"a micro-batch of the state has an object in it whose class is not here: {error}; import it before the "
            "state is loaded"
        ) from None
    leaves, spec = pytree.tree_flatten(_together(pytree.tree_unflatten(constants, spec)))
    return Form(spec, tuple(leaves), _has_objects(spec))


def _apart(value: Any) -> Any:
    """Return a structure with named tuples as objects."""
    if is_named_tuple(type(value)):
        return Object(type(value), (), None, [_apart(part) for part in value])
    return _inside(_apart, value)


def _together(value: Any) -> Any:
    """Return a structure with the named tuples that `_apart` has made objects of."""
    if isinstance(value, Object) and is_named_tuple(value.kind):
        return tuple.__new__(value.kind, [_together(part) for part in value.values])
    return _inside(_together, value)


def _inside(change: Callable[[Any], Any], value: Any) -> Any:
    """Return a structure whose parts are changed."""
    if pytree.tree_is_leaf(value):
        return value
    return pytree.tree_map(change, value, is_leaf=lambda x: x is not value)


def _has_objects(spec: pytree.TreeSpec) -> bool:
    return spec.type is Object or any(map(_has_objects, spec.children()))


def _plain(value: Any) -> Any:
    """Return a constant of a structure as a value that JSON has. Raises ValueError if there is none."""
    if isinstance(value, Ref):
        return {"tensor": value.number}
    if isinstance(value, SIMPLE):
        return value
    raise ValueError(
        f"a micro-batch has a {type(value).__name__} in it, {value!r}, which a saved state cannot hold; push tensors, "
        "numbers and strings"
    )
