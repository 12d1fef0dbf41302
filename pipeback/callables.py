"""Functions and values that a traced graph cannot name, as objects that it can call."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch import fx

from pipeback.private import pytree
from pipeback.structures import ABSENT, UNSEEN, Form, Object, Ref, fixed


class Applied:
    """The call of a custom autograd function."""

    __module__ = "pipeback"

    def __init__(self, function: Any) -> None:
        self.function, self.__name__ = function, function.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)


class Operator:
    """An operator of Tensor that no module has under its own name: x ** 2 is `TensorBase.pow` of torch._tensor."""

    __module__ = "pipeback"

    def __init__(self, function: Any) -> None:
        self.function, self.__name__ = function, function.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@lru_cache
def operator_of(function: Any) -> Any:
    """The function itself, or an `Operator` where the graph's code could not find it."""
    inside = getattr(function, "__module__", None) == "torch._tensor"
    return Operator(function) if inside and function.__qualname__ != f"Tensor.{function.__name__}" else function


class Made:
    """A structure that is made anew for every micro-batch, from the tensors that stand in it."""

    __name__, __module__ = "made", "pipeback"

    def __init__(self, form: Form) -> None:
        self.expects = form
        self.form = form._replace(constants=tuple(UNSEEN if c is ABSENT else c for c in form.constants))

    def __call__(self, *tensors: Any) -> Any:
        return self.form.fill(tensors)


def argument(graph: fx.Graph, filled: Callable[[Any], Any], value: Any, changes: bool) -> Any:
    """An argument of a call: nodes of the graph where tensors stand, or one that makes the whole of it.

    filled: a node for a `Ref` or the name of a weight, and any other constant as it is. changes: the call does
    something to the structure.
    """
    leaves, spec = pytree.tree_flatten(value)
    held = pytree.tree_leaves(value, is_leaf=lambda x: isinstance(x, Object))
    if not changes and not any(isinstance(x, Object) or fixed(x) for x in held):
        return pytree.tree_map(filled, value)
    nodes: list[fx.Node] = []
    constants: list[Any] = []
    for leaf in map(filled, leaves):
        constants.append(Ref(len(nodes)) if isinstance(leaf, fx.Node) else leaf)
        nodes += [leaf] if isinstance(leaf, fx.Node) else []
    return graph.call_function(Made(Form(spec, tuple(constants), True)), tuple(nodes))


def in_a_row(*values: Any) -> tuple[Any, ...]:
    """These values as a tuple."""
    return values
