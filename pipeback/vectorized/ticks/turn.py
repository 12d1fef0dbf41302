"""Turn: the stages that do F (forward), B (backward) and U (update) at the same ticks: all, or those of even or of odd
number.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple

from pipeback.runtime.link import StageLink
from pipeback.vectorized.making.cuda_graph import CudaGraphed
from pipeback.vectorized.steps.row_tensors import AnyStep
from pipeback.vectorized.steps.step_plan import StepPlan
from pipeback.vectorized.ticks.captured_ticks import CapturedTicks
from pipeback.vectorized.ticks.loss_stage import LossStage
from pipeback.vectorized.ticks.output_stage import OutputStage
from pipeback.vectorized.ticks.tick import StackTick
from pipeback.vectorized.ticks.wiring import Ends, Where, entering, leaving, pieces


class StackRows(NamedTuple):
    """Some neighbouring rows of a stack, from one up to another. number: that of the stack in its turn."""

    number: int
    one: StackTick
    rows: tuple[int, int]

    @property
    def able(self) -> bool:
        """Whether the rows can do a tick without the others."""
        return self.rows == self.one.all or self.one.divides()


class Turn:
    """The stacks `moving`, the last stage as a graph, if it is among them, and other stages, which run one by one."""

    def __init__(
        self,
        moving: Sequence[StackTick],
        where: Where,
        judge: LossStage | OutputStage | None,
        plan: StepPlan | None,
        others: list[int],
    ) -> None:
        """plan: that of the last stage."""
        self.moving, self.judge, self.others = list(moving), judge, others
        self.rounds = 0  # ticks of all these stages; a stage's own are counted beside
        self.steps: list[AnyStep] = []  # of each stack, and of the last stage
        self.varies = False  # whether the steps hold for one tick only
        self.fused: Any = None  # a compiled tick with steps of this form
        self.fixed: list[Any] = []  # its arguments that stay the same
        self.told: list[Any] = []
        self.captured: CapturedTicks | None = None  # the compiled tick as a CUDA graph
        self.plans = [one.stack.plan for one in moving]
        if judge is not None and plan is not None:
            self.plans.append(plan)
        self.entering = [(one, *way) for one in moving for way in entering(one, where)]
        self.leaving = [(one, *way) for one in moving for way in leaving(one, where)]
        inside = chain(*(one.stack.numbers for one in moving), [] if judge is None else [judge.stage.index])
        self.inside = sorted(inside)  # the stages that are not run one by one
        self.size = len(self.inside) + len(others)
        self.whole = [StackRows(n, one, one.all) for n, one in enumerate(moving)]
        self._where = where
        self._parts: dict[range, list[StackRows]] = {}

    def parts(self, stages: range) -> list[StackRows]:
        """Return the rows of stacks whose stages are among these."""
        if stages not in self._parts:
            found = []
            for n, one, _ in self.whole:
                rows = [row for row, s in enumerate(one.stack.numbers) if s in stages]
                if rows:
                    found.append(StackRows(n, one, (rows[0], rows[-1] + 1)))
                    pieces(one, self._where, found[-1].rows)
            self._parts[stages] = found
        return self._parts[stages]

    def leave(self, link: StageLink, ends: Ends, mine: StackTick, stages: range, kind: Literal["F", "B"]) -> None:
        """Send what a stack has computed for stages outside of all stacks. ends: see `SteadyRun`, of F and of B."""
        (f, b), k = ends, self.rounds
        for one, direction, s, row in self.leaving:
            if one is mine and direction == kind and s in stages:
                place = one.stack.places[row]
                if kind == "F":
                    link.send("F", s + 1, f[s] + k, one.sent("F", f[s] + k + place, row))
                else:
                    link.send("B", s - 1, b[s] + k, one.sent("B", b[s] + k - place, row))

    def fuse(self, compiled: Any) -> None:
        """Use a compiled function for this turn, with these steps."""
        judge = [self.judge] if isinstance(self.judge, LossStage) else []  # a tick with any other is not compiled
        who: list[StackTick | LossStage] = [*self.moving, *judge]
        pairs, stay = list(zip(who, self.steps, strict=True)), isinstance(compiled, CudaGraphed)
        self.fused = compiled
        self.fixed = [one.fixed(step, stay=stay) for one, step in pairs]
        self.told = [one.told(step) for one, step in pairs]
        if isinstance(compiled, CudaGraphed):
            last = judge[0] if judge else None
            self.captured = CapturedTicks(compiled, self.moving, last, self.steps, self.fixed, self.told)

    def look(self) -> None:
        """Note that somebody may have changed the optimizers or their state."""
        self.fused = self.captured = None
        for plan in self.plans:
            plan.rows.alone = False
