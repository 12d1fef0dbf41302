"""Setting: the arguments with which every loop of a pipeline is built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Setting(NamedTuple):
    """The arguments with which every loop of a pipeline is built."""

    delays: Sequence[int]
    order: str
    seed: int
    link: str
    threads: int | None  # workers in this process; None: the event loop
    worker: dict[str, Any]  # options of `Worker`
    stacks: Sequence[Any] = ()  # stacks of stages that run as one
    skewed: bool = False  # whether some stages of the pipeline do, perhaps in another process
