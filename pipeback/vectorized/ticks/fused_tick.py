"""Fused tick: all that stacks and the last stage do at a tick, as one compiled function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pipeback.vectorized.making.cuda_graph import side_by_side
from pipeback.vectorized.steps.row_tensors import AnyStep
from pipeback.vectorized.steps.step_form import How
from pipeback.vectorized.ticks.loss_stage import LossStage
from pipeback.vectorized.ticks.tick import StackTick


def fused(
    moving: Sequence[StackTick],
    judge: LossStage | None,
    steps: Sequence[AnyStep],
    compile: Callable[[Any], Any],
) -> Callable[..., Any]:
    """Return all stacks and the last stage as one compiled function: (fixed, changing) -> the outputs of `compiled`.

    steps: one for each stack and the last stage, of the form for which the function is compiled.
    """
    parts: list[StackTick | LossStage] = [*moving, *([] if judge is None else [judge])]
    calls = [partial(one.compiled, How.of(step)) for one, step in zip(parts, steps, strict=True)]
    cuda = moving[0].rings.device.type == "cuda"

    def tick(fixed: Sequence[tuple[Any, ...]], changing: Sequence[tuple[Any, ...]]) -> list[Any]:
        every = [partial(call, *some, *rest) for call, some, rest in zip(calls, fixed, changing, strict=True)]
        return side_by_side(every, cuda)

    tick.__code__ = tick.__code__.replace(co_name="tick")  # torch counts recompilations per code object
    compiled: Callable[..., Any] = compile(tick)
    return compiled
