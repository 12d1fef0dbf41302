"""Quick collections of garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen() -> Iterator[None]:
    """What is there already, all of torch for one, is looked at by no collection and by no `gc.get_objects`."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
