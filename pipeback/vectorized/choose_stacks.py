"""Choose stacks: which stages look alike, which of these can run as one, and whether that pays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeback.methods.base import Method
from pipeback.schedules.ops import Schedule
from pipeback.schedules.order import Order
from pipeback.schedules.programs import Flowing
from pipeback.schedules.timeline import in_flight
from pipeback.splitting.module_restore import untouched
from pipeback.stages import compiled
from pipeback.stages.flight import target_on
from pipeback.stages.joint_optimizer import Options
from pipeback.stages.stage import Stage
from pipeback.tensors import accelerators
from pipeback.vectorized.capture import Unfit, Unlike, signature
from pipeback.vectorized.cuda_graph import CudaGraphed
from pipeback.vectorized.eligible import leaps
from pipeback.vectorized.forms import leaves
from pipeback.vectorized.stack import Stack

LEAST = 2  # the fewest stages that are alike
# the speed-up of F and B from which "auto" runs stages as one where ticks are interpreted stage by stage: it covers the
# overhead, which is larger where only every second stage is busy at a tick (`pipeback bench auto` measures it)
ALL, SOME, SPARSE = 2.0, 5.0, 1.4  # with fewer than SPARSE ticks per micro-batch ALL holds, otherwise SOME
# the same where a tick is one function: a small stack gains little, and its gain is measured roughly. A single stage
# takes work from the event loop, which the gain of F and B does not count
WHOLE, SINGLE = 1.2, 1.0


class Shaper(NamedTuple):
    """How stacks are made of stages: for which method, and with which compiler."""

    method: Method
    stages: int
    options: compiled.Options | None
    graphed: bool

    @property
    def turns(self) -> int:
        """Of how many kinds the stages are: 2 if those of even and of odd number take turns."""
        schedule = self.method.schedule
        return max(1, schedule.turns) if isinstance(schedule, Flowing) else 1

    def stack(self, stages: Sequence[Stage]) -> Stack:
        """Return a stack of these stages."""
        flying = in_flight(self.method.schedule, self.stages)
        places = [stage.index // self.turns for stage in stages]
        stack = Stack(stages, places, max(flying[stage.index] for stage in stages) + 1, self.options)
        stack.leaps = leaps(self.method)
        if self.graphed:
            stack.fuse = CudaGraphed if stack.fuse is None else partial(_graphed, stack.fuse)
        for stage in stages:  # the stack is compiled, not its stages
            stage.join(stack)
        return stack


def alike(stages: Sequence[Stage], turns: int = 1) -> list[list[Stage]]:
    """Return groups of stages that look alike, without the stage with the loss, wherever they stand.

    turns: 2 if those of even and of odd number take turns. A group may be a single stage.
    """
    groups: dict[Any, list[Stage]] = {}
    for stage in stages:
        if not stage.judges:
            groups.setdefault((stage.index % turns, signature(stage.module)), []).append(stage)
    return list(groups.values())


def stacked(
    stages: Sequence[Stage], method: Method, compile: bool | dict[str, Any], vectorize: bool | str
) -> list[Stack]:
    """Return stacks of the stages that look alike (none without `vectorize`); `fitting` finds out whether they are.

    Where a whole tick is one function, single stages are part of it as well. Raises ValueError where `vectorize` demands
    a stack and there is none, and for CUDA graphs without CUDA.
    """
    if not vectorize:
        return []
    if vectorize == "cuda_graph" and any(s.device is not None and s.device.type != "cuda" for s in stages):
        raise ValueError('vectorize="cuda_graph" needs all stages on a CUDA device; move the model, or use True')
    options = compiled.options(compile, keep=False) if compile else None
    shaper = Shaper(method, len(stages), options, vectorize == "cuda_graph")
    groups = alike(stages, shaper.turns)
    if not leaps(method):  # then stages without weights, and single ones, gain nothing
        groups = [group for group in groups if len(group) >= LEAST and group[0].params]
    stacks = [shaper.stack(group) for group in groups]
    if not stacks and vectorize != "auto":
        raise ValueError(
            f"vectorize={vectorize!r}: no stages are alike (in layers, shapes, options; the last one has the loss); use "
            'vectorize="auto" or False'
        )
    return stacks


def regrouped(
    stages: Sequence[Stage],
    stacks: Sequence[Stack],
    groups: Sequence[Sequence[int]],
    method: Method,
    vectorize: bool | str,
) -> list[Stack]:
    """Return stacks of these groups of stages, in which a state has micro-batches in flight; others stay as they are."""
    wanted = [list(numbers) for numbers in groups]
    if not stacks or all(numbers in [stack.numbers for stack in stacks] for numbers in wanted):
        return list(stacks)
    shaper = Shaper(method, len(stages), stacks[0].options, vectorize == "cuda_graph")
    taken = {s for numbers in wanted for s in numbers}
    for stack in stacks:
        rest = [s for s in stack.numbers if s not in taken]
        if stack.numbers not in wanted and rest:
            wanted.append(rest)
    known = {tuple(stack.numbers): stack for stack in stacks}
    wanted += [stack.numbers for stack in stacks if not taken & set(stack.numbers) and stack.numbers not in wanted]
    return [known.get(tuple(some)) or shaper.stack([stages[s] for s in some]) for some in sorted(wanted)]


def _graphed(compile: Callable[[Any], Any], function: Any) -> CudaGraphed:
    return CudaGraphed(compile(function))


def inputs(stages: Sequence[Stage], x: Any, y: Any) -> tuple[dict[int, Any], dict[int, list[bool]]]:
    """Return the input of every stage for a micro-batch, and which of its tensors get a gradient back."""
    values, graphs = {}, []
    value = x
    for stage in stages:
        values[stage.index] = value
        with torch.enable_grad(), untouched(stage.module), accelerators.forked([stage.device]):
            own, given = stage.enter(value)
            out = stage.run(given, target_on(stage.device, y)) if stage.judges else stage.module(given)
        graphs.append((own, leaves(out)))
        value = tuple(v.detach() for v in out) if type(out) is tuple else out.detach()
    returned: dict[int, list[bool]] = {}
    back: Sequence[Any] = [None] * len(graphs[-1][1])
    for stage, (own, outs) in zip(reversed(stages), reversed(graphs), strict=True):
        seeds = back if stage is not stages[-1] else [torch.ones_like(out) for out in outs]
        some = [(o, g) for o, g in zip(outs, seeds, strict=True) if o.requires_grad and g is not None]
        moving = [v for v in own if v.requires_grad]
        found: list[Tensor | None] = [None] * len(moving)
        if some and moving:
            roots, given = zip(*some, strict=True)
            found = list(torch.autograd.grad(roots, moving, given, allow_unused=True))
        each = iter(found)
        back = [next(each) if v.requires_grad else None for v in own]
        returned[stage.index] = [g is not None for g in back]
    return values, returned


def split_by_kind(stack: Stack, values: Mapping[int, Any], shaper: Shaper) -> list[Stack]:
    """Return a stack for every form of input that the stages of this stack get."""
    kinds: dict[Any, list[Stage]] = {}
    if stack.flying:
        return [stack]
    for stage in stack.stages:
        x = values[stage.index]
        kinds.setdefault((type(x) is tuple, *((v.shape, v.dtype) for v in leaves(x))), []).append(stage)
    return [stack] if len(kinds) == 1 else [shaper.stack(some) for some in kinds.values()]


def learn(stack: Stack, values: Mapping[int, Any], returned: Mapping[int, Sequence[bool]]) -> None:
    """Let a stack make its graphs for micro-batches like these. Raises `Unfit` where it cannot run as one."""
    x = values[stack.first]
    graphs = stack.rings(stack.kind(x), x).written
    for s in stack.numbers:
        if s + 1 in returned and not all(returned[s + 1][n] for n in graphs.gives):
            raise Unfit(f"no gradient comes back for an output of stage {s}")


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
    batches: Sequence[tuple[Any, Any]],
    method: Method,
    vectorize: bool | str,
    options: Options,
    worker: Mapping[str, Any],
    *,
    again: bool,
) -> tuple[list[Stack], dict[str, str]]:
    """Return the stacks that can and should run as one on micro-batches like these, and the findings, by name.

    The stages of the other stacks run one by one from then on. batches: x and y of micro-batches. options: those of the
    optimizers. worker: its arguments. again: micro-batches of another form have come; stacks that they do not fit run
    their stages one by one on them. Raises ValueError where `vectorize` demands a stack and none can run as one.
    """
    reasons: dict[str, str] = {}
    shaper = Shaper(method, len(stages), stacks[0].options, vectorize == "cuda_graph")
    seen = any(worker.get(name) for name in ("clip_norm", "clip_value", "samples"))
    may_leap = leaps(method) and not seen
    every = list(stacks)
    for n, (x, y) in enumerate(batches):
        values, returned = inputs(stages, x, y)
        if not n and not again:
            every = [one for stack in every for one in split_by_kind(stack, values, shaper)]
            least = 1 if may_leap else LEAST
            for stack in every:
                if len(stack.stages) < least:
                    reasons[stack.name] = "stage by stage, because no other stage is alike"
        waiting, every = every, []
        while waiting:
            stack = waiting.pop(0)
            try:
                if stack.name not in reasons:
                    learn(stack, values, returned)
            except Unfit as error:
                unlike = isinstance(error.__cause__, Unlike) and not stack.flying
                if unlike and not n and not again and may_leap:
                    waiting[:0] = [shaper.stack([stage]) for stage in stack.stages]
                    continue
                reasons[stack.name] = str(error)
            every.append(stack)
    if again:
        return list(stacks), reasons
    kept = [stack for stack in every if stack.name not in reasons]
    leap = may_leap and all(stack.rows.plain([options] * len(stack.stages)) for stack in kept)
    for stack in list(kept):
        ticks = 1.0 if leap else calls(method.schedule, len(stages), stack)
        times = stack.gain() / ticks
        full = shaper.turns == 1 and ticks < SPARSE
        enough = (SINGLE if stack.alone else WHOLE) if leap else ALL if full else SOME
        as_one = "as a graph" if stack.alone else "as one"
        reasons[stack.name] = f"{as_one}, which makes F and B {times:.1f} times as fast"
        if stack.flying:
            continue
        if (vectorize == "auto" and times < enough) or (stack.alone and not leap):
            reasons[stack.name] = (
                f"stage by stage, because {as_one} F and B are {times:.2f} times as fast, which pays from {enough:g} on "
                f"with these options and {method!r}"
            )
            kept.remove(stack)
    several = [stack for stack in every if not stack.alone]
    missed = bool(several) and not any(stack in kept for stack in several)
    if (not kept or missed) and vectorize != "auto":
        told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise ValueError(f'vectorize={vectorize!r}: no stages can run as one ({told}); use vectorize="auto" or False')
    for stack in every:
        stack.told = reasons
        if stack not in kept:
            for stage, call in zip(stack.stages, stack.calls, strict=True):
                stage.leave_stack(call)
    return kept, reasons
