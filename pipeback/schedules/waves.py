"""Waves: operations that may run at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeback.schedules.ops import Kind

Ops = Sequence[tuple[int, int]]  # (stage, micro-batch)


class Wave(NamedTuple):
    """Operations of one kind, at most one per stage, upstream first.

    The forwards of a wave run in the order given, as one may feed the next. The backwards or updates of a wave do not
    depend on each other, so that they can run as one. Only where the order goes by worker (`Order.placed`), a wave is
    one operation at all stages of a part, in the order given, and a backward feeds the next one, too.
    """

    kind: Kind
    ops: list[tuple[int, int]]  # (stage, micro-batch)
