"""Facts: checks that a model gets the kind of data that it is for."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn

KINDS = {
    "inputs": "vectors (digits, or images with data.flat=true)",
    "channels": "images (fashion_mnist, cifar10)",
    "vocabulary": "sequences of tokens (shakespeare, translation)",
}


def takes(kind: str) -> Callable[[Callable[..., nn.Sequential]], Callable[..., nn.Sequential]]:
    """Return a decorator for builders of models that need the fact `kind`; other data raise ValueError."""

    def decorate(build: Callable[..., nn.Sequential]) -> Callable[..., nn.Sequential]:
        @wraps(build)
        def checked(**options: Any) -> nn.Sequential:
            if kind not in options:
                found = next((text for fact, text in KINDS.items() if fact in options), "something else")
                raise ValueError(f"model={build.__name__} is for {KINDS[kind]}, but the data are {found}")
            return build(**options)

        return checked

    return decorate
