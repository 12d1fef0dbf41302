"""Lazy loss: a tensor for a loss that has not been computed yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from pipeback.private import pytree, wrapper


class LazyLoss(Tensor):
    """A 0-d tensor that waits for its value when it is read: by float, .item(), +, torch.stack, format, …

    Only the shape is known at once; reading the dtype or the device also waits. It has no gradient. asked: is called
    when somebody else than this package reads it.
    """

    _read: Callable[[], Tensor]
    _known: Callable[[], bool | None]
    _asked: Callable[[], None]

    @staticmethod
    def __new__(
        cls, read: Callable[[], Tensor], known: Callable[[], bool | None], asked: Callable[[], None] = lambda: None
    ) -> LazyLoss:
        loss = wrapper(cls, ())
        loss._read, loss._known, loss._asked = read, known, asked
        return loss

    @property
    def known(self) -> bool | None:
        """Whether reading it waits for nothing; None if it will never be known."""
        return self._known()

    def asked(self) -> None:
        """Note that somebody reads it."""
        self._asked()

    def value(self) -> Tensor:
        """Return the loss; wait for it, and raise the error if it failed."""
        return self._read()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(_present, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = pytree.tree_map(_present, (args, kwargs or {}))
        return func(*args, **kwargs)


def _present(value: Any) -> Any:
    if not isinstance(value, LazyLoss):
        return value
    value.asked()
    return value.value()
