"""Fork guard: refuses a pipeline in a child of fork(), which has copies of everything but its parent's threads.

A pipeline with threads or a store would hang in the child, and both would hold the lock of a store's folder. So the
child's calls raise an error, and it releases the lock, which stays with the parent.
"""

from __future__ import annotations

import os
from typing import Any
from weakref import WeakSet

_locked: WeakSet[Any] = WeakSet()


def refuse(process: int) -> None:
    """Raise RuntimeError in a child of the process that built a pipeline."""
    if os.getpid() != process:
        raise RuntimeError(
            f"process {os.getpid()} was forked from process {process}, which built this pipeline and has its threads, "
            "its store and what is in flight; build a new Pipeline in the child, with a store in another folder, or "
            'start it by multiprocessing.get_context("spawn")'
        )


def locks(store: Any) -> None:
    """Have children call `store.unlocked()`, which releases their copy of the lock."""
    _locked.add(store)


def _in_child() -> None:
    for store in list(_locked):
        store.unlocked()


os.register_at_fork(after_in_child=_in_child)
