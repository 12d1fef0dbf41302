"""Collection: Python's garbage collector waits while many objects are made of which none is garbage.

Whenever there are a quarter more objects than at its last full pass, it goes through all of them. A state of thousands
of micro-batches in flight has millions.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """A context in which garbage is not collected, except what is released by the last reference to it."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
