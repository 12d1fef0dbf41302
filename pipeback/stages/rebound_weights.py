"""Rebound weights: those that were given other memory, as by `p.data = p.data - rate * p.grad`.

Whoever sets `.data` changes one tensor, while the module, the optimizer and a store share the memory that it had. So
the new values are copied there, and the tensor gets that memory back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def staying(weights: Iterable[Tensor]) -> Iterator[None]:
    """A context after which these weights lie where they did before it, with the values that they were given in it."""
    places = [(w, w.data) for w in weights]
    try:
        yield
    finally:
        for w, place in places:
            if w.data_ptr() != place.data_ptr():
                found, w.data = w.data, place
                with torch.no_grad():
                    w.copy_(found)
