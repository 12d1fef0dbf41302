"""Fit stacks: finds out on the first micro-batches which stacks can run as one, and which of them should."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from pipeback.methods.base import Method
from pipeback.runtime.runners import FEW
from pipeback.schedules.ops import Schedule
from pipeback.schedules.order import Order
from pipeback.stages.joint_optimizer import Options
from pipeback.stages.stage import Stage
from pipeback.vectorized.making.cuda_graph import room_for
from pipeback.vectorized.making.timing import change_seconds
from pipeback.vectorized.stacks import whole_cost
from pipeback.vectorized.stacks.choose_stacks import Shaper
from pipeback.vectorized.stacks.eligible import why_not
from pipeback.vectorized.stacks.stack import Stack
from pipeback.vectorized.stacks.stage_inputs import StageInputs
from pipeback.vectorized.tracing.capture import Unfit, Unlike
from pipeback.vectorized.tracing.forms import leaves

# the speed-up of F and B from which "auto" runs stages as one where ticks are interpreted stage by stage: it covers the
# overhead, which is larger where only every second stage is busy at a tick (`pipeback bench auto` measures it)
ALL, SOME, SPARSE = 2.0, 5.0, 1.4  # with fewer than SPARSE ticks per micro-batch ALL holds, otherwise SOME
# the same of F, B and U where a tick is one function: a small stack gains little, and its gain is measured roughly. A
# single stage takes work from the event loop, which is not measured
WHOLE, SINGLE = 1.05, 1.0
FORWARD = 1 / 3  # of the time of F, B and U in the event loop, which F takes of micro-batches that go in turn, at most
CLEARLY = 1.05  # by how much a way of running stages has to be faster than the other to be taken instead of it

Reasons = dict[str, str]  # what is told of stacks, by their names


class Request(NamedTuple):
    """What the user has asked for.

    options: those of the optimizers. worker: the arguments of the worker. stages: how many the pipeline has. together:
    after how many micro-batches the pipeline waits for the last of them to come to the last stage; None: it need not.
    flush: the micro-batches of a flush that one worker does as a whole; 0: there is none. most: see `Shaper`. present:
    a context in which the weights of these stages are on their device. in_turn: whether micro-batches that come
    together go one by one through all stages (`ticks/in_turn`). graphed: whether stacks are made for CUDA graphs, be it
    by "auto". pushed: the micro-batches of the first push. apart: whether other ranks have other stages, so that none
    of these need run as one.
    """

    method: Method
    vectorize: bool | str
    options: Options
    worker: Mapping[str, Any]
    stages: int
    together: int | None = None
    flush: int = 0
    most: int | None = None
    present: Callable[[Sequence[Stage]], AbstractContextManager[None]] = lambda stages: nullcontext()
    in_turn: bool = False
    graphed: bool = False
    pushed: int = 1
    apart: bool = False

    @property
    def conditions(self) -> whole_cost.Conditions:
        """Under which stages are timed."""
        return whole_cost.Conditions(self.method, self.method.delays(self.stages), self.options, self.clip)

    @property
    def clip(self) -> tuple[float | None, float | None]:
        """The bounds on gradients: `clip_norm` and `clip_value` of the worker."""
        return self.worker.get("clip_norm"), self.worker.get("clip_value")

    @property
    def several(self) -> int:
        """The micro-batches of an update, if there are several; else 0."""
        every = getattr(self.method.schedule, "every", 1)
        return every if every > 1 else 0

    @property
    def waits(self) -> float:
        """The ticks per micro-batch at which some stages wait for the last of those that come together: until their
        losses are computed outside, or, with a store, are read.
        """
        together = self.pushed if self.together is None and self.most is not None else self.together
        return (self.stages - 1) / together if together else 0.0

    def why_not(self, stacks: Sequence[Stack]) -> str | None:
        """Why no tick can be one function with this method, these options and the optimizers of the stages; None if
        some can, or whole flushes.
        """
        if self.flush:
            return None
        if self.most is not None:
            return "weights come from a store for a part of the stages at a time"
        reason = why_not(self.method)
        if reason is not None:
            return reason
        if self.worker.get("samples"):
            return 'weights="samples" looks at the gradients of each stage'
        if any(self.clip) and stacks[0].maker.fuse is not None:
            return "clip_norm= looks at the gradients of each stage, which no compiled tick does"
        for stack in stacks:
            if stack.plan.masters:
                return "each stage steps its masters and rounds them"
            if stack.plan.complex and not self.several:
                return "each stage makes the step of its complex weights"
            if stack.maker.fuse is not None and (self.several or self.method.needs_entry):
                when = f"it updates once in {self.several} micro-batches" if self.several else "it keeps versions"
                return f"{when}, which no compiled tick does"
            if not self.several and not stack.plan.step([self.options] * len(stack.stages)):
                kind = type(stack.stages[0].optimizer).__name__
                return f"the step of {kind} with its options or hooks is not that of momentum SGD, Adam or AdamW alone"
        return None


def fitting(
    stacks: Sequence[Stack], seen: Sequence[StageInputs], asked: Request, *, again: bool
) -> tuple[list[Stack], Reasons]:
    """Return the stacks that can and should run as one on micro-batches like these, and the findings, by name.

    The stages of the other stacks run one by one from then on. batches: x and y of micro-batches. again: micro-batches
    of another form have come; stacks that they do not fit run their stages one by one on them. Raises ValueError where
    `vectorize` demands a stack and none can run as one.
    """
    if again:
        return list(stacks), _learnt(stacks, seen, asked)
    auto = asked.vectorize == "auto"
    if asked.graphed and auto:
        found = _captured(stacks, seen, asked)
        if found is not None:
            return found
        if not any(stack.flying for stack in stacks):  # all have graphs, or none has
            asked = asked._replace(graphed=False)
            stacks = _without_graphs(stacks, asked)
    shaper = Shaper(asked.method, asked.stages, stacks[0].maker.options, asked.graphed, asked.most)
    few = asked.together is not None and asked.together <= FEW
    asked = asked._replace(in_turn=few and stacks[0].maker.fuse is None and asked.why_not(stacks) is None)
    every, kept, reasons = _divided(stacks, seen, asked, shaper)
    several = [stack for stack in every if not stack.alone]
    missed = bool(several) and not any(stack in kept for stack in several)
    if (not kept or missed) and not auto and not asked.apart:
        raise none_can(asked.vectorize, reasons)
    return _chosen(every, kept, reasons, asked), reasons


def none_can(vectorize: bool | str, reasons: Reasons) -> ValueError:
    """The error where `vectorize` demands a stack and none can run as one."""
    told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    return ValueError(f'vectorize={vectorize!r}: no stages can run as one ({told}); use vectorize="auto" or False')


def _chosen(every: Sequence[Stack], kept: Sequence[Stack], reasons: Reasons, asked: Request) -> list[Stack]:
    """Let the stages of all other stacks run one by one; return those that are kept."""
    for stack in every:
        stack.told = reasons
        if stack not in kept:
            stack.settle(last=False)  # one by one, stages get inputs as they are
            for stage in stack.stages:
                stage.leave_stack(stack.call_of(stage))
    return list(kept)


def _captured(
    stacks: Sequence[Stack], seen: Sequence[StageInputs], asked: Request
) -> tuple[list[Stack], Reasons] | None:
    """Return what `fitting` does where "auto" lets ticks become CUDA graphs; None where it does not.

    Whatever can be part of a graph is, since no call by itself is as fast. Stacks do without graphs where no tick can
    be one, where memory is short, and where micro-batches come one by one, and so go through the stages in turn.
    """
    few = asked.pushed <= FEW and not any(stack.flying for stack in stacks)
    if few or asked.flush or asked.why_not(stacks) is not None:
        return None
    shaper = Shaper(asked.method, asked.stages, stacks[0].maker.options, True, asked.most)
    every, kept, reasons = _divided(stacks, seen, asked._replace(vectorize="cuda_graph"), shaper)
    nbytes = sum(stack.sample.nbytes for stack in kept)
    if not kept or not room_for(nbytes, kept[0].sample.device):
        return None
    return _chosen(every, kept, reasons, asked), reasons


def _without_graphs(stacks: Sequence[Stack], asked: Request) -> list[Stack]:
    """Return such stacks that are not made for graphs."""
    shaper = Shaper(asked.method, asked.stages, stacks[0].maker.options, False, asked.most)
    return [shaper.stack(stack.stages) for stack in stacks]


# -- which stacks can --------------------------------------------------------------------------------------------------


def _learnt(stacks: Sequence[Stack], every: Sequence[StageInputs], asked: Request) -> Reasons:
    """Let stacks make their graphs for micro-batches like these; return why some cannot, by name."""
    reasons: Reasons = {}
    for seen in every:
        for stack in stacks:
            try:
                with asked.present(stack.stages):
                    _learn(stack, seen)
            except Unfit as error:
                reasons[stack.name] = str(error)
    return reasons


def _divided(
    stacks: Sequence[Stack], seen: Sequence[StageInputs], asked: Request, shaper: Shaper
) -> tuple[list[Stack], list[Stack], Reasons]:
    """Divide stacks whose stages are not alike after all, or are faster as graphs of their own.

    Returns all stacks, those that are to run as one, and what is told of each, by name.
    """
    every, kept, reasons = list[Stack](), list[Stack](), Reasons()
    reason = asked.why_not(stacks)
    leap = reason is None
    waiting = [one for stack in stacks for one in _by_kind(stack, seen[0].values, shaper)]
    while waiting:
        stack = waiting.pop(0)
        apart = leap and not stack.alone and not stack.flying
        if stack.alone and not leap and asked.most is None:
            pays, told = False, "stage by stage, because no other stage is alike"
        else:
            try:
                with asked.present(stack.stages):
                    _learn(stack, seen[0])
                    pays, told = _judged(stack, asked, shaper, leap=leap)
                told += "" if leap else f"; no tick is one function: {reason}"
                timed = asked.vectorize == "auto" and not torch.are_deterministic_algorithms_enabled()
                apart = apart and timed and not asked.flush
                apart = apart and (
                    not pays or (asked.several == 0 and whole_cost.faster_apart(stack, asked.conditions, CLEARLY))
                )
            except Unfit as error:
                pays, told, apart = False, str(error), apart and isinstance(error.__cause__, Unlike)
        if apart:
            waiting[:0] = [shaper.stack([stage]) for stage in stack.stages]
            continue
        every.append(stack)
        reasons[stack.name] = told
        if pays or stack.flying:
            kept.append(stack)
    _settle(kept)
    for name, told in _learnt(kept, seen[1:], asked).items():
        reasons[name] = told
        kept = [stack for stack in kept if stack.name != name]
    if asked.in_turn and len({s for stack in kept for s in stack.numbers}) < asked.stages - 1:  # some would be left out
        return _divided(every, seen, asked._replace(in_turn=False), shaper)
    return every, kept, reasons


def _settle(stacks: Sequence[Stack]) -> None:
    """Let single stages agree on how pictures lie in memory: where two layouts meet, kernels are slow, or tensors are
    copied.
    """
    some = {id(stack): stack.maker.tried for stack in stacks if not stack.flying and stack.maker.tried}
    some = {n: tried for n, tried in some.items() if len({one.way.last for one in tried}) == 2}
    times = [
        sum(min(one.seconds for one in tried if one.way.last == last) for tried in some.values())
        for last in (False, True)
    ]
    alone = {s for stack in stacks if id(stack) in some for s in stack.numbers}
    for stack in stacks:  # others take and give tensors whose channels come before the pixels
        if id(stack) in some:
            s, count = stack.first, stack.stages[0].stages
            meet = sum(n not in alone for n in (s - 1, s + 1) if 0 <= n < count)
            times[1] += 2 * meet * change_seconds(stack.known, stack.sample.device) if meet else 0.0
    for stack in stacks:
        stack.settle(last=times[1] < times[0] if id(stack) in some else None)


def _by_kind(stack: Stack, values: Mapping[int, Any], shaper: Shaper) -> list[Stack]:
    """Return a stack for every form of input and output that the stages of this stack have."""
    if stack.flying:
        return [stack]
    kinds: dict[Any, list[Stage]] = {}
    for stage in stack.stages:
        came, went = (_form(values[s]) for s in (stage.index, stage.index + 1))
        kinds.setdefault((came, went), []).append(stage)
    return [stack] if len(kinds) == 1 else [shaper.stack(some) for some in kinds.values()]


def _form(x: Any) -> Any:
    return (type(x) is tuple, *((v.shape, v.dtype) for v in leaves(x)))


def _learn(stack: Stack, seen: StageInputs) -> None:
    """Let a stack make its graphs for micro-batches like these. Raises `Unfit` where it cannot run as one."""
    x = seen.values[stack.first]
    graphs = stack.rings(stack.kind(x), x).written
    for s in stack.numbers:
        returned = seen.returned(s + 1)
        if returned is not None and not all(returned[n] for n in graphs.gives):
            raise Unfit(f"no gradient comes back for an output of stage {s}")


# -- which stacks should -----------------------------------------------------------------------------------------------


def _judged(stack: Stack, asked: Request, shaper: Shaper, *, leap: bool) -> tuple[bool, str]:
    """Return whether a stack should run as one, and what is told of it. leap: whether whole ticks are one function."""
    if asked.flush:
        return _judged_flush(stack, asked)
    ticks = 1.0 if leap else calls(asked.method.schedule, asked.stages, stack)
    whole = leap and not asked.several and not asked.method.needs_entry
    gain = whole_cost.gain(stack, asked.conditions, whole=whole)
    times = 1 / (FORWARD + 1 / gain) if asked.in_turn else gain / (ticks + asked.waits)
    full = shaper.turns == 1 and ticks < SPARSE
    enough = (SINGLE if stack.alone else WHOLE) if leap or asked.most is not None else ALL if full else SOME
    as_one = "as a graph" if stack.alone else "as one"
    what = "F, B and U" if whole and stack.maker.plain else "F and B"
    if torch.are_deterministic_algorithms_enabled() and asked.vectorize == "auto":  # times must not change bits
        return leap, as_one if leap else f"stage by stage: {as_one} pays seldom with {asked.method!r}, and is not timed"
    if (stack.alone and not leap and asked.most is None) or (asked.vectorize == "auto" and times < enough):
        return False, (
            f"stage by stage: {as_one}, {what} are {times:.2f} times as fast, which pays from {enough:g} on with "
            f"these options and {asked.method!r}"
        )
    return True, f"{as_one}, which makes {what} {times:.1f} times as fast"


def _judged_flush(stack: Stack, asked: Request) -> tuple[bool, str]:
    """Return whether the stages should do the micro-batches of a flush at once, and what is told of it."""
    groups = "groups" if any(asked.method.delays(asked.stages)) else "flushes"
    as_one = f"{'as a graph' if stack.alone else 'as one'} in whole {groups}"
    if torch.are_deterministic_algorithms_enabled() and asked.vectorize == "auto":  # times must not change bits
        return True, as_one
    times = stack.flush_gain(asked.flush)
    if asked.vectorize == "auto" and times < WHOLE:
        return False, f"stage by stage: {as_one}, F and B are {times:.2f} times as fast, which pays from {WHOLE:g} on"
    return True, f"{as_one}, which makes F and B {times:.1f} times as fast"


def calls(schedule: Schedule, stages: int, stack: Stack) -> float:
    """Return the number of ticks per micro-batch at which the stack is busy, in the steady state."""
    order, count = Order(schedule, stages, policy="skewed"), 0
    warm, last = 4 * stages, 8 * stages
    for arrived in range(1, last + 1):
        for kind, ops in order.advance(arrived):
            if arrived > warm and kind != "U" and any(s in stack.numbers for s, _ in ops):
                count += 1
    return count / 2 / (last - warm)
