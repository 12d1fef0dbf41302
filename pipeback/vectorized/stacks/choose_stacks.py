"""Choose stacks: which stages look alike, and so may run as one; `fit_stacks` finds out whether they can and should."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from pipeback.methods.base import Method
from pipeback.schedules.programs import Flowing
from pipeback.schedules.timeline import in_flight
from pipeback.stages import compiled
from pipeback.stages.stage import Stage
from pipeback.vectorized.making.cuda_graph import CudaGraphed
from pipeback.vectorized.stacks.eligible import flushes, leaps
from pipeback.vectorized.stacks.stack import Stack
from pipeback.vectorized.tracing.capture import signature

LEAST = 2  # the fewest stages that are alike
STREAMED = (
    "with a store, a method of flushes or groups would bring all weights to the device at every tick, and not twice a "
    "flush"
)


class Shaper(NamedTuple):
    """How stacks are made of stages: for which method, and with which compiler."""

    method: Method
    stages: int
    options: compiled.Options | None
    graphed: bool
    most: int | None = None  # the most stages that may be on the device at once as one; None: all stay there

    @property
    def turns(self) -> int:
        """Of how many kinds the stages are: 2 if those of even and of odd number take turns."""
        schedule = self.method.schedule
        return max(1, schedule.turns) if isinstance(schedule, Flowing) and not self.method.fixed_groups else 1

    def stack(self, stages: Sequence[Stage]) -> Stack:
        """Return a stack of these stages."""
        flying = in_flight(self.method.schedule, self.stages)
        places = [stage.index // self.turns for stage in stages]
        stack = Stack(stages, places, max(flying[stage.index] for stage in stages) + 1, self.options)
        stack.leaps = self.most is None and leaps(self.method)
        if self.graphed:
            fuse = stack.maker.fuse
            stack.maker.fuse = CudaGraphed if fuse is None else partial(_graphed, fuse)
        for stage in stages:  # the stack is compiled, not its stages
            stage.join(stack, stage.module if isinstance(stage.call, compiled.Compiled) else stage.call)
        return stack


def alike(stages: Sequence[Stage], turns: int = 1, owner: Sequence[int] | None = None) -> list[list[Stage]]:
    """Return groups of stages that look alike, without the last one, before or in the loss, wherever they stand.

    turns: 2 if those of even and of odd number take turns. owner: the worker of each stage of the pipeline; None: one
    has all. A group may be a single stage.
    """
    groups: dict[Any, list[Stage]] = {}
    for stage in stages:
        if not stage.last:
            worker = 0 if owner is None else owner[stage.index]
            groups.setdefault((worker, stage.index % turns, signature(stage.module)), []).append(stage)
    return list(groups.values())


def check(
    stages: Sequence[Stage], method: Method, compile: bool | dict[str, Any], vectorize: bool | str,
    most: int | None = None,
) -> list[list[Stage]]:  # fmt: skip
    """Return groups of stages that may run as one. Raises ValueError where `vectorize` demands a stack and there is
    none, and for CUDA graphs without CUDA. most: see `Shaper`.
    """
    if most is not None and streams_flushes(method):
        if vectorize != "auto":
            raise ValueError(f'vectorize={vectorize!r}: {STREAMED}; use vectorize=False or "auto", or method="pb"')
        return []
    if vectorize == "cuda_graph" and any(s.device is not None and s.device.type != "cuda" for s in stages):
        raise ValueError('vectorize="cuda_graph" needs all stages on a CUDA device; move the model, or use True')
    if compile:
        compiled.options(compile, keep=False)
    groups = _groups(stages, method, len(stages), None)
    if not groups and vectorize != "auto":
        raise ValueError(
            f"vectorize={vectorize!r}: no stages are alike (in layers, shapes, options; the last one has the loss); "
            'use vectorize="auto" or False'
        )
    return groups


def stacked(
    stages: Sequence[Stage],
    method: Method,
    compile: bool | dict[str, Any],
    graphed: bool,
    count: int,
    owner: Sequence[int] | None = None,
    most: int | None = None,
) -> list[Stack]:
    """Return stacks of those of these stages that look alike; `fitting` finds out whether they are.

    Where a whole tick is one function, single stages are part of it as well. graphed: whether it becomes a CUDA graph.
    count: the stages of the pipeline. owner: see `alike`. most: see `Shaper`.
    """
    shaper = _shaper(method, compile, graphed, count, most)
    groups = _groups(stages, method, count, owner)
    if most is not None:  # stages without weights never come to the device
        groups = [part for group in groups if list(group[0].module.parameters()) for part in _parts(group, most)]
    return [shaper.stack(group) for group in groups]


def streams_flushes(method: Method) -> bool:
    """Whether a method with weights in a store moves less where each stage does many micro-batches at a visit."""
    return flushes(method)


def _parts(group: Sequence[Stage], most: int) -> list[list[Stage]]:
    """Divide neighbours among these stages into parts of at most so many, of equal size or one apart."""
    count = -(-len(group) // most)
    ends = [len(group) * n // count for n in range(count + 1)]
    return [list(group[begin:end]) for begin, end in pairwise(ends)]


def _shaper(method: Method, compile: bool | dict[str, Any], graphed: bool, count: int, most: int | None) -> Shaper:
    options = compiled.options(compile, keep=False) if compile else None
    return Shaper(method, count, options, graphed, most)


def _groups(stages: Sequence[Stage], method: Method, count: int, owner: Sequence[int] | None) -> list[list[Stage]]:
    groups = alike(stages, Shaper(method, count, None, False).turns, owner)
    outside = stages[-1].last and not stages[-1].judges
    if leaps(method) or flushes(method, outside=outside, shared=owner is not None):
        return groups
    # stages without weights, and single ones, gain nothing
    return [group for group in groups if len(group) >= LEAST and group[0].params]


def regrouped(
    stages: Mapping[int, Stage],
    stacks: Sequence[Stack],
    groups: Sequence[Sequence[int]],
    method: Method,
    compile: bool | dict[str, Any],
    graphed: bool,
    count: int,
    most: int | None = None,
) -> list[Stack]:
    """Return stacks of these groups of stages, in which a state has micro-batches in flight; others stay."""
    wanted = [list(numbers) for numbers in groups]
    if all(numbers in [stack.numbers for stack in stacks] for numbers in wanted):
        return list(stacks)
    shaper = _shaper(method, compile, graphed, count, most)
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
