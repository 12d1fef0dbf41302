"""Functions that a traced graph cannot name, as objects that it can call."""

from __future__ import annotations

from functools import lru_cache
from typing import Any


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
