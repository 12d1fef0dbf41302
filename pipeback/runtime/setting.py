"""What every loop of a pipeline is built with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Setting(NamedTuple):
    """What every loop of a pipeline is built with."""

    delays: Sequence[int]
    order: str
    seed: int
    link: str
    threads: int | None  # workers in this process; None: the event loop
    worker: dict[str, Any]  # options of `Worker`
    stacks: Sequence[Any] = ()  # of stages that run as one
