"""Captured ticks: the ticks of a turn as replays of a CUDA graph.

Where all stages but the last are in stacks and run at every tick, the graph itself hands on what each needs at the next
tick. Then a further tick needs no more than an input, a target, and the places of what waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from pipeback.private import pytree
from pipeback.runtime.link import Name
from pipeback.tensors.copies import to_device
from pipeback.vectorized.making.cuda_graph import Captured, CudaGraphed, copy_each
from pipeback.vectorized.steps.own_step import OwnStep
from pipeback.vectorized.steps.row_tensors import AnyStep
from pipeback.vectorized.steps.step_form import RingPlaces, count
from pipeback.vectorized.ticks.fused_tick import hands_on
from pipeback.vectorized.ticks.loss_stage import LossStage
from pipeback.vectorized.ticks.tick import StackTick
from pipeback.vectorized.tracing.forms import leaves


class CapturedTicks:
    """The ticks of these stacks, and of the last stage if it is among them.

    steps: of each. fixed: the arguments that stay in place. told: the numbers of the steps.
    """

    def __init__(
        self,
        function: CudaGraphed,
        moving: Sequence[StackTick],
        judge: LossStage | None,
        steps: Sequence[AnyStep],
        fixed: Sequence[Any],
        told: Sequence[tuple[Any, ...]],
    ) -> None:
        self._function, self._moving, self._judge, self._fixed, self._told = function, moving, judge, fixed, told
        self._steps, self._rows = steps, [one.stack.rows.whole for one in moving]
        if judge is not None:
            self._rows.append(judge.rows.whole)
        self._first = next(
            (one for one in moving if not one.first), None
        )  # the stack of the first stage, if it is here
        self._graph: Captured | None = None
        # what is done between two ticks outside of the graph: checks of the loss, copies of weights, and more of a step
        checks = judge is None or judge.check
        keeps = any(one.stash is not None or one.versions is not None for one in moving)
        moves = any(one.rings.factored for one in moving) or any(
            isinstance(step, OwnStep) or step.drift for step in steps
        )
        self._goes_on = hands_on(moving, judge) and not checks and not keeps and not moves

    def run(self, changing: Sequence[tuple[Any, ...]]) -> None:
        """Do a tick. changing: the arguments that change, of each stack and the last stage."""
        if self._graph is None:
            every = [(*some, *how) for some, how in zip(changing, self._told, strict=True)]
            self._graph = self._function.at(self._fixed, every)
        else:
            for inside, some in zip(self._graph.inside, changing, strict=True):
                mine = inside[: len(some)]
                copy_each(zip(pytree.tree_leaves(mine), pytree.tree_leaves(list(some)), strict=True))
        self._graph.replay()

    def go_on(
        self,
        box: dict[Name, Any],
        first: int,
        last: int,
        waits: Callable[[int], Sequence[RingPlaces]],
        judged: Callable[[int, Tensor], None],
        most: int,
    ) -> int:
        """Do further ticks, up to `most` with the one before, while `box` has inputs and targets that are alike.

        Returns how many it did. first, last: the micro-batches of which the tick before did F at the first and at the
        last stage. waits: for so many ticks later, where tensors of each stack wait. judged: takes the loss of every
        tick but the last of these.
        """
        if self._graph is None or self._judge is None or not self._goes_on:
            return 0
        for n in range(1, most):
            names = ("F", 0, first + n), ("Y", self._judge.stage.index, last + n)
            x, target = map(box.get, names)
            if not self._takes(x, target):
                return n - 1
            judged(last + n - 1, self._loss())
            for name in names:
                del box[name]
            self._tick(self._graph, waits(n), x, target)
            for rows, step in zip(self._rows, self._steps, strict=True):
                count(rows, step)
        return most - 1

    def _takes(self, x: Any, target: Any) -> bool:
        """Whether an input of the pipeline and a target are there, of the form for which the graph was captured."""
        if (
            x is None
            or type(target) is not Tensor
            or self._first is None
            or self._judge is None
            or not self._judge.form
        ):
            return False
        return self._first.fits(x) and (target.shape, target.dtype) == self._judge.form[-1]

    def _tick(self, graph: Captured, waits: Sequence[RingPlaces], x: Any, target: Any) -> None:
        """Do a tick at which stacks get from each other what the graph has handed on."""
        *stacks, (_, wanted, *_) = graph.inside
        first = next(xs for (_, _, xs, *_), one in zip(stacks, self._moving, strict=True) if one is self._first)
        places = [pair for mine, now in zip(stacks, waits, strict=True) for pair in zip(mine[0], now, strict=True)]
        inputs = [(some[0], t) for some, t in zip(first, leaves(x), strict=True)]
        copy_each([*places, *inputs, (wanted, to_device(wanted.device, target))])
        graph.replay()

    def _loss(self) -> Tensor:
        """Return a copy of the loss of the last tick."""
        assert self._graph is not None
        return self._graph.found[-1][0].clone()  # type: ignore[no-any-return]

    def results(self) -> list[Any]:
        """Return copies of the outputs of the last tick; those that waited in rings are there."""
        assert self._graph is not None
        stacks = self._graph.found[: len(self._moving)]
        found: list[Any] = [(_copies(ys), (), _copies(gxs), factors) for ys, _, gxs, factors in stacks]
        if self._judge is not None:
            found.append((self._loss(), _copies(self._graph.found[-1][1])))
        return found


def _copies(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if t is None else t.clone() for t in tensors]
