"""Waves: operations that may run at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeback.schedules.ops import Kind

Ops = Sequence[tuple[int, int]]  # (stage, micro-batch)


class Wave(NamedTuple):
    """Operations of one kind, at most one per stage, upstream first.

    The forwards of a wave run in the order given, as one may feed the next. The backwards or updates of a wave do not
    depend on each other, so that they can run as one.
    """

    kind: Kind
    ops: list[tuple[int, int]]  # (stage, micro-batch)
