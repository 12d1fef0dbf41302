"""Own step: an update that a method makes itself, called with the weights, gradients and states of all rows at once.

Numbers of which every row has its own are vectors (n) and columns (n, 1, …), see `When.rows`. A single stage has plain
numbers, as in the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pipeback.methods.answers import state_of
from pipeback.methods.base import Method, When
from pipeback.stages.joint_optimizer import Group, Options
from pipeback.vectorized.steps.adam_rows import FIRST, SECOND, STEP, AdamStep, columns
from pipeback.vectorized.steps.row_state import RowState
from pipeback.vectorized.steps.sgd_rows import Step


class RowOptimizer:
    """What the method sees as the optimizer of some rows.

    step: its step, at the rates of `groups`. rows: their number; 0: a single stage. trained: the weights, in order.
    """

    def __init__(self, step: Step | AdamStep, groups: list[Group], rows: int, trained: Sequence[Tensor]) -> None:
        self.param_groups, self._step, self._rows, self._trained = groups, step, rows, trained
        self._rates = [group["lr"] for group in groups]
        self._of = {id(w): n for n, group in enumerate(groups) for w in group["params"]}
        self._kept: Any = None
        self._move: Callable[[Step | AdamStep, Sequence[Tensor]], None] = lambda step, grads: None
        self._slower: dict[tuple[float, ...], Step | AdamStep] = {}  # steps at other rates
        self.state: dict[Tensor, dict[str, Any]] = {}

    def use(self, kept: Any, move: Callable[[Step | AdamStep, Sequence[Tensor]], None]) -> None:
        """Use this state of the optimizers, as rows, and this function for the step."""
        self._move = move
        if kept is self._kept:
            return
        self._kept = kept
        if isinstance(self._step, AdamStep):
            first, second, steps = kept
            each = [t if self._rows else t[0] for t in steps]
            self.state = {
                w: {FIRST: p, SECOND: q, STEP: t} for w, p, q, t in zip(self._trained, first, second, each, strict=True)
            }
        elif self._step.momentum:
            self.state = {w: {"momentum_buffer": v} for w, v in zip(self._trained, kept, strict=True)}
        else:
            self.state = {w: {} for w in self._trained}

    def step(self) -> None:
        """Step all weights with their gradients."""
        now = [group["lr"] for group in self.param_groups]
        step = self._step
        if any(a is not b for a, b in zip(now, self._rates, strict=True)):
            step = self._at(now)
        self._move(step, [w.grad for w in self._trained])  # type: ignore[misc]

    def _at(self, rates: Sequence[Any]) -> Step | AdamStep:
        """Return the step at other rates."""
        lists = [rate.tolist() if isinstance(rate, Tensor) and rate.dim() else [float(rate)] for rate in rates]
        key = tuple(rate for some in lists for rate in some)
        if key not in self._slower:
            self._slower.clear()
            self._slower[key] = replace(self._step, rates=[lists[self._of[id(w)]] for w in self._trained])
        return self._slower[key]


@dataclass
class OwnStep:
    """The numbers of an update that `method` makes itself, as `Step`.

    base: the optimizer's own step. state: that of the method, of all rows. groups: the optimizer's options, with
    numbers of weights as "params". delays: D of every row. rows: from which one up to which other one; None: all.
    """

    method: Method
    base: Step | AdamStep
    state: RowState
    groups: list[Group]
    delays: list[int]
    stages: tuple[int, int]  # that of the first row, and how many the pipeline has
    ahead: Sequence[Tensor] = ()
    back: Sequence[Tensor] = ()
    rows: tuple[int, int] | None = None
    drift: Sequence[Tensor] = ()
    varies: bool = False
    _made: tuple[Sequence[Tensor], RowOptimizer, When] | None = field(default=None, repr=False)

    def part(self, first: int, end: int) -> OwnStep:
        """Return the step of some of the rows."""
        ahead, back = ([t[first:end] for t in some] for some in (self.ahead, self.back))
        return replace(
            self, base=self.base.part(first, end), delays=self.delays[first:end], ahead=ahead, back=back,
            rows=(first, end), _made=None,
        )  # fmt: skip

    @property
    def form(self) -> tuple[Any, ...]:
        """Return the properties of a step that a compiled function relies on."""
        return "own", bool(self.ahead), bool(self.back)

    def move(
        self,
        weights: list[Tensor],
        grads: Sequence[Tensor],
        used: Sequence[Tensor] | None,
        kept: Any,
        move: Callable[[Step | AdamStep, Sequence[Tensor]], None],
    ) -> None:
        """Let the method step the weights. used: those on which F ran, if it differs. kept: the optimizers' state.

        move: does the optimizer's own step.
        """
        if not weights:
            return
        if self._made is None or self._made[0] is not weights:
            self._made = weights, *self._prepared(weights)
        _, optimizer, when = self._made
        optimizer.use(kept, move)
        if self.method.needs_used:
            when = when._replace(used=list(weights) if used is None else list(used))
        before = self.state.part(self.rows)
        for w, g in zip(weights, grads, strict=True):
            w.grad = g
        try:
            after = self.method.update(weights, optimizer, before, when)
        finally:
            for w in weights:
                w.grad = None
        self.state.put(self.rows, before, state_of(self.method, "update", after))

    def _prepared(self, weights: Sequence[Tensor]) -> tuple[RowOptimizer, When]:
        several, rates, n = self.state.several, self.base.rates, len(self.delays)
        like = weights[0]
        groups = []
        for group in self.groups:
            lr = rates[group["params"][0]]
            params = [weights[m] for m in group["params"]]
            groups.append({**group, "params": params, "lr": _vector(lr, like) if several else lr[0]})
        optimizer = RowOptimizer(self.base, groups, n if several else 0, weights)
        delays: Any = [self.delays] * len(weights)
        told: list[Any] = [columns(rates, weights), columns(delays, weights)]
        if not several:
            told = [[some[0] for some in rates], [D for (D,) in delays]]
        delay: Any = _vector(self.delays, like) if several else self.delays[0]
        first, count = self.stages
        return optimizer, When(first, count, -1, -1, delay, told[0], told[1], rows=n if several else 0)


def _vector(numbers: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device=like.device)


def numbered_groups(stage: Any, options: Options) -> list[Group]:
    """Return the parameter groups of a stage with these options, and the numbers of its weights as "params"."""
    place = {id(w): n for n, w in enumerate(stage.weights)}
    pairs = zip(stage.optimizer.param_groups, options.groups[stage.index], strict=True)
    found = [{**now, "params": [place[id(w)] for w in group["params"] if id(w) in place]} for group, now in pairs]
    return [group for group in found if group["params"]]
