"""Step plan: tells with which numbers all rows of a stack are stepped at once, if they can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from pipeback.methods.base import Correction, Method
from pipeback.private import hooked
from pipeback.stages.joint_optimizer import Options, rates_of
from pipeback.stages.stage import Stage
from pipeback.vectorized.steps import adam_rows, sgd_rows
from pipeback.vectorized.steps.adam_rows import AdamStep, columns
from pipeback.vectorized.steps.own_step import OwnStep, numbered_groups
from pipeback.vectorized.steps.row_state import RowState
from pipeback.vectorized.steps.row_tensors import AnyStep
from pipeback.vectorized.steps.rows import Rows
from pipeback.vectorized.steps.sgd_rows import Step
from pipeback.vectorized.steps.summed_step import SummedStep

T = TypeVar("T")
KNOWN = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW


class Asked(NamedTuple):
    """What a method asks of the step. delays: D of every stage of the pipeline."""

    method: Method
    delays: Sequence[int]
    correction: Callable[[], Correction]


class Answer(NamedTuple):
    """What a method asks of a step. plain: the step without it."""

    plain: Step | AdamStep | None = None
    step: Step | AdamStep | OwnStep | None = None
    correction: Correction | None = None


class StepPlan:
    """The steps of the stages of `rows`. state: that of a method that makes its own steps, during a run of ticks."""

    def __init__(self, rows: Rows) -> None:
        self.rows, self.stages = rows, rows.stages
        self.complex = any(map(torch.is_complex, rows.stepped))  # lists of the rows are of one type, and Adam squares
        self.totals: list[Tensor] = []  # sums of gradients, where stages make their own updates
        self.state = RowState(self.stages, rows.state)
        self._known: tuple[list[Options], Answer] = ([], Answer())
        self._summing: tuple[list[Options], SummedStep | None] = ([], None)

    def step(self, options: Sequence[Options], corrected: Asked | None = None, *others: Options) -> AnyStep | None:
        """Return the step that the stages' options ask for; None unless all ask for the same Adam or momentum SGD, and
        step the weights that F and B run on, not masters, which are real.

        The rates may differ. corrected: asks a method for its correction of the step, anew if any options change or
        if it varies.
        """
        if self.complex or self.hooked() or self.masters:
            return None
        known, answer = self._known
        asked = [*options, *others]
        if len(known) != len(asked) or any(a is not b for a, b in zip(known, asked, strict=True)):
            plain = self._uncorrected(options)
            answer = Answer(plain, plain)
            if plain is not None and corrected is not None:
                answer = self._answer(answer, corrected, options)
            self._known = asked, answer
        elif answer.step is not None and answer.step.varies and corrected is not None:
            answer = self._answer(answer, corrected, options)
            self._known = asked, answer
        return answer.step

    def _answer(self, before: Answer, asked: Asked, options: Sequence[Options]) -> Answer:
        """Ask for the correction. before: the last answer, of which tensors are taken over unless they change, too."""
        correction, plain, step = asked.correction(), before.plain, before.step
        assert plain is not None
        if correction.own and self.rows.stepped:
            own = step if isinstance(step, OwnStep) else self._own(plain, correction, asked, options)
            return Answer(plain, own and self._shifted(own, correction), correction)
        if before.correction is None or before.correction[:4] != correction[:4] or isinstance(step, OwnStep):
            return Answer(plain, self._corrected(plain, correction), correction)
        assert isinstance(step, Step | AdamStep)
        rates = self._by_weight(correction.rates) or plain.rates
        return Answer(plain, replace(step, rates=rates, varies=correction.varies), correction)

    @property
    def may_step(self) -> bool:
        """Whether it can be that `step` gives a step, whatever the options are."""
        return type(self.stages[0].optimizer) in KNOWN and not (self.complex or self.masters or self.hooked())

    def sum_up(self) -> None:
        """From now on sum gradients, since the stages make their own updates, of several micro-batches each."""
        self.totals = self.totals or list(map(torch.zeros_like, self.rows.stepped))

    @property
    def masters(self) -> bool:
        """Whether stages step float32 masters, and round them to the weights on which F and B run."""
        return any(stage.masters.weights for stage in self.stages)

    def hooked(self) -> bool:
        """Whether the user has hooks on the steps of an optimizer."""
        return any(hooked(stage.optimizer) for stage in self.stages)

    def _uncorrected(self, options: Sequence[Options]) -> Step | AdamStep | None:
        if not self.rows.stepped:
            return Step(0.0, (), [], [])
        of_stages = [rates_of(stage, some) for stage, some in zip(self.stages, options, strict=True)]
        rates = [[of_stage[n] for of_stage in of_stages] for n in range(len(self.rows.stepped))]
        same = self._common(adam_rows.settings, options)
        if same is not None:
            return AdamStep(same, rates, self.rows.stepped)
        groups = self._common(sgd_rows.settings, options)
        if groups is None or len({momentum for momentum, *_ in groups}) != 1:
            return None
        late = [[float(nesterov)] * len(self.stages) for *_, nesterov in groups]
        return Step(
            groups[0][0], tuple(decay for _, decay, _ in groups), rates, self.rows.stepped,
            late if any(map(any, late)) else [],
        )  # fmt: skip

    def _corrected(self, step: Step | AdamStep, correction: Correction) -> Step | AdamStep | None:
        ahead, late, back, drift = map(self._by_weight, correction[:4])
        drifts, moved = any(rho != 1 for some in drift for rho in some), any(map(any, back))
        mine: dict[str, Any] = {
            "rates": self._by_weight(correction.rates) or step.rates,
            "ahead": columns(ahead, self.rows.stepped) if any(map(any, ahead)) else (),
            "back": columns(back, self.rows.stepped) if moved else (),
            "drift": columns([[1 - rho for rho in some] for some in drift], self.rows.stepped) if drifts else (),
            "varies": correction.varies,
        }
        if isinstance(step, AdamStep):
            if not correction.along and any(map(any, [*ahead, *back])):
                return None  # there is no velocity
            return replace(step, late=late if any(map(any, late)) else [], **mine)
        spiked = step.momentum and any(map(any, late))
        return replace(step, late=late if spiked else step.late, **mine)

    def summed(self, corrected: Asked | None, *options: Options) -> SummedStep:
        """Return what a tick does where the stages make their own updates: `sum_up` came before. corrected: see `step`.

        options: of F and B, per stage.
        """
        known, step = self._summing
        changed = len(known) != len(options) or any(a is not b for a, b in zip(known, options, strict=True))
        if step is None or step.varies or changed:
            step = self._shifting(Correction() if corrected is None else corrected.correction())
            self._summing = list(options), step
        return step

    def _shifting(self, correction: Correction) -> SummedStep:
        ahead, back = self._shifts(correction)
        renewed = self.rows.state(correction.group) if correction.group else ()
        varies = correction.varies and _moves(correction)
        return SummedStep(self.totals, ahead, back, renewed=renewed, varies=varies)

    def _shifts(self, correction: Correction) -> list[Sequence[Tensor]]:
        """Return the columns of F and of B."""
        some = correction.ahead, correction.back
        return [columns(self._by_weight(one), self.rows.stepped) if any(one) else () for one in some]

    def _own(
        self, step: Step | AdamStep, correction: Correction, asked: Asked, options: Sequence[Options]
    ) -> OwnStep | None:
        if isinstance(step, AdamStep) and not correction.along and any([*correction.ahead, *correction.back]):
            return None  # there is no velocity
        first = self.stages[0]
        return OwnStep(
            asked.method, step, self.state, numbered_groups(first, options[0]),
            [asked.delays[stage.index] for stage in self.stages], (first.index, first.stages),
        )  # fmt: skip

    def _shifted(self, step: OwnStep, correction: Correction) -> OwnStep:
        ahead, back = self._shifts(correction)
        return replace(step, ahead=ahead, back=back, varies=correction.varies and _moves(correction))

    def _by_weight(self, numbers: Sequence[float]) -> list[list[float]]:
        """Turn lists of numbers per stage into lists per weight; an empty list stays empty."""
        count = len(self.rows.stepped)
        return [list(numbers[n::count]) for n in range(count)] if numbers else []

    def _common(self, ask: Callable[[Stage, Options], T | None], options: Sequence[Options]) -> T | None:
        """Return what `ask` gives for every stage, if it is the same for all; else None."""
        first, *others = (ask(stage, some) for stage, some in zip(self.stages, options, strict=True))
        return first if all(one == first for one in others) else None


def _moves(correction: Correction) -> bool:
    return bool(correction.ahead or correction.back)
