"""Choose stacks: which stages look alike, which of these can run as one, and whether that pays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from pipeback.methods.base import Method
from pipeback.schedules.ops import Schedule
from pipeback.schedules.order import Order
from pipeback.schedules.programs import Flowing
from pipeback.schedules.timeline import in_flight
from pipeback.splitting.module_restore import untouched
from pipeback.stages import compiled
from pipeback.stages.joint_optimizer import Options
from pipeback.stages.stage import Stage
from pipeback.tensors import accelerators
from pipeback.vectorized.capture import Unfit, signature
from pipeback.vectorized.cuda_graph import CudaGraphed
from pipeback.vectorized.eligible import leaps
from pipeback.vectorized.stack import Stack

LEAST = 2  # the fewest stages of a stack
# the speed-up of F and B from which "auto" runs stages as one where ticks are interpreted stage by stage: it covers the
# overhead, which is larger where only every second stage is busy at a tick (`pipeback bench auto` measures it)
ALL, SOME, SPARSE = 2.0, 5.0, 1.4  # with fewer than SPARSE ticks per micro-batch ALL holds, otherwise SOME
WHOLE = 1.2  # the same where a tick is one function: a small stack gains little, and its gain is measured roughly


def alike(stages: Sequence[Stage]) -> list[list[Stage]]:
    """Return runs of neighbouring stages that look alike and have weights, without the stage with the loss."""
    found: list[list[Stage]] = []
    kinds: list[Any] = []
    for stage in stages:
        kind = None if stage.judges or not stage.params else signature(stage.module)
        if kinds and kind is not None and kind == kinds[-1]:
            found[-1].append(stage)
        else:
            found.append([stage])
        kinds.append(kind)
    return [run for run in found if len(run) >= LEAST]


def stacked(
    stages: Sequence[Stage], method: Method, compile: bool | dict[str, Any], vectorize: bool | str
) -> list[Stack]:
    """Return stacks of the stages that look alike (none without `vectorize`); `learn` finds out whether they are.

    Raises ValueError where `vectorize` demands a stack and there is none, and for CUDA graphs without CUDA.
    """
    if not vectorize:
        return []
    if vectorize == "cuda_graph" and any(s.device is not None and s.device.type != "cuda" for s in stages):
        raise ValueError('vectorize="cuda_graph" needs all stages on a CUDA device; move the model, or use True')
    flying = in_flight(method.schedule, len(stages))
    stacks: list[Stack] = []
    turns = method.schedule.turns if isinstance(method.schedule, Flowing) else 1
    for run in alike(stages):
        mine = []
        for some in (run[::2], run[1::2]) if turns == 2 else (run,):
            options = compiled.options(compile, keep=False) if compile else None
            stack = Stack(some, max(flying[stage.index] for stage in some) + 1, options)
            stack.leaps = leaps(method)
            if vectorize == "cuda_graph":
                stack.fuse = CudaGraphed if stack.fuse is None else partial(_graphed, stack.fuse)
            for stage in some:  # the stack is compiled, not its stages
                stage.join(stack)
            mine.append(stack)
        if turns == 2:
            mine[0].partner, mine[1].partner = mine[1], mine[0]
        stacks += mine
    if not stacks and vectorize != "auto":
        raise ValueError(
            f"vectorize={vectorize!r}: no neighbouring stages are alike (in layers, shapes, options; the last one has "
            'the loss); use vectorize="auto" or False'
        )
    return stacks


def _graphed(compile: Callable[[Any], Any], function: Any) -> CudaGraphed:
    return CudaGraphed(compile(function))


def learn(stages: Sequence[Stage], stacks: Sequence[Stack], x: Any) -> dict[str, str]:
    """Let the stacks make their graphs for micro-batches like x; return why stacks do not fit, by name."""
    found: dict[str, str] = {}
    firsts = {stack.first: stack for stack in stacks}
    value = x
    for stage in stages[: max((stack.last for stack in stacks), default=-1) + 1]:
        stack = firsts.get(stage.index)
        if stack is not None:
            try:
                stack.rings(stack.kind(value))
            except Unfit as error:
                found[stack.name] = str(error)
        with untouched(stage.module), accelerators.forked([stage.device]), torch.no_grad():
            value = stage.module(stage.enter(value)[1])
    return found


def calls(schedule: Schedule, stages: int, stack: Stack) -> float:
    """Return the number of ticks per micro-batch at which the stack is busy, in the steady state."""
    order, count = Order(schedule, stages, policy="skewed"), 0
    warm, last = 4 * stages, 8 * stages
    for arrived in range(1, last + 1):
        for kind, ops in order.advance(arrived):
            if arrived > warm and kind != "U" and any(s in stack.numbers for s, _ in ops):
                count += 1
    return count / 2 / (last - warm)


def fitting(
    stages: Sequence[Stage],
    stacks: Sequence[Stack],
    xs: Sequence[Any],
    method: Method,
    vectorize: bool | str,
    options: Options,
    worker: Mapping[str, Any],
    *,
    again: bool,
) -> tuple[list[Stack], dict[str, str]]:
    """Return the stacks that can and should run as one on micro-batches like these, and the findings, by name.

    The stages of the other stacks run one by one from then on. options: those of the optimizers. worker: its arguments.
    again: micro-batches of another form have come; stacks that they do not fit run their stages one by one on them.
    Raises ValueError where `vectorize` demands a stack and none can run as one.
    """
    reasons: dict[str, str] = {}
    for x in xs:
        reasons |= learn(stages, stacks, x)
    if again:
        return list(stacks), reasons
    for stack in stacks:  # of two partners both run as one, or none
        if stack.partner is not None and stack.partner.name in reasons:
            reasons.setdefault(stack.name, reasons[stack.partner.name])
    kept = [stack for stack in stacks if stack.name not in reasons]
    ticks = {stack.name: calls(method.schedule, len(stages), stack) for stack in kept}
    gains = {stack.name: stack.gain() / ticks[stack.name] for stack in kept}
    seen = any(worker.get(name) for name in ("clip_norm", "clip_value", "samples"))
    leap = leaps(method) and not seen and all(stack.rows.plain([options] * len(stack.stages)) for stack in kept)
    for stack in list(kept):
        times = min(gains[stack.name], gains[(stack.partner or stack).name])
        reasons[stack.name] = f"as one, which makes F and B {times:.1f} times as fast"
        full = stack.partner is None and ticks[stack.name] < SPARSE
        enough = WHOLE if leap else ALL if full else SOME
        if vectorize == "auto" and times < enough:
            reasons[stack.name] = (
                f"stage by stage, because as one F and B are {times:.2f} times as fast, which pays from {enough:g} on "
                f"with these options and {method!r}"
            )
            kept.remove(stack)
    if not kept and vectorize != "auto":
        told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise ValueError(f'vectorize={vectorize!r}: no stages can run as one ({told}); use vectorize="auto" or False')
    for stack in stacks:
        stack.told = reasons
        if stack not in kept:
            for stage, call in zip(stack.stages, stack.calls, strict=True):
                stage.leave_stack(call)
    return kept, reasons
