"""Eras: between them, the modules of a stack have come to compute something else, and need other graphs.

A number that the forward reads and that changes with every batch would have graphs made for every batch. Where making
them took longer than they were in use, several times in a row, stages go on one by one, until a number stays longer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pipeback.vectorized.tracing.capture import Unfit

TIMES = 3  # in a row that graphs were used for too short a time


class Eras:
    """Those of one stack. number: of the present one."""

    spent = 0.0  # seconds that all stacks of this process took to make graphs

    def __init__(self) -> None:
        self.number = 0
        self._since, self._before = time.perf_counter(), Eras.spent
        self._took, self._short = 0.0, 0

    def begin(self) -> None:
        """Note that the modules compute something else from now on."""
        self.number += 1
        now, took = time.perf_counter(), Eras.spent - self._before
        self._took = took or self._took  # nothing is made while it is not worth it
        self._short = self._short + 1 if now - self._since - took < self._took else 0
        self._since, self._before = now, Eras.spent

    @contextmanager
    def making(self) -> Iterator[None]:
        """A context within which graphs are made."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            Eras.spent += time.perf_counter() - begin

    @property
    def worth(self) -> bool:
        """Whether graphs are worth making now."""
        return self._short < TIMES or torch.are_deterministic_algorithms_enabled()  # which times may not decide

    def check(self) -> None:
        """Raise `Unfit` if they are not."""
        if not self.worth:
            raise Unfit("what their forward reads changes too often for new graphs")
