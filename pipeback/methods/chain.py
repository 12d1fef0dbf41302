"""Chain: composes methods, one around the other: each one's `optimizer.step()` is the update of the next.

F (forward) on ŵ_n(… ŵ_1(w))        B (backward) on w̃_n(… w̃_1(w))
U (update): update_1 around update_2 … around the optimizer's step

A method that changes the rates of U changes those by which the methods after it predict, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch

from pipeback.methods.answers import initial, state_of
from pipeback.methods.base import (
    Chosen,
    Correction,
    Method,
    OptimizerLike,
    Past,
    Shift,
    State,
    When,
    described,
    overrides,
)
from pipeback.schedules.ops import Schedule
from pipeback.schedules.placement import Placed, Placement
from pipeback.schedules.timeline import in_flight
from pipeback.tensors.weight_list import Weights


def chain(*methods: Method) -> Method:
    """Compose methods, outermost first: each one's `optimizer.step()` is the update of the next.

    The shifts of F and B are applied in the same order. All must have one schedule.

    >>> import pipeback
    >>> pipeback.chain(pipeback.methods.create("lwp", form="weight"), pipeback.methods.create("sc"))
    chain(LinearWeightPrediction(form='weight', horizon=None, slack=2), SpikeCompensation(horizon=None, slack=2))
    """
    if not methods:
        raise ValueError('chain needs at least one method, such as pipeback.methods.create("pb")')
    return methods[0] if len(methods) == 1 else _Chain(methods)


class _Chain(Method):
    """The method that `chain` returns."""

    def __init__(self, methods: Sequence[Method]) -> None:
        self.methods = tuple(methods)
        first = self.methods[0]
        for other in self.methods[1:]:
            if _sample(other.schedule) != _sample(first.schedule):
                raise ValueError(f"chain: {first!r} and {other!r} have different schedules; give both the same slack=")
        for method in self.methods[:-1]:
            if method.steps_itself:
                raise ValueError(f"chain: {method!r} makes the step itself, with nothing inside; put it last")
            if method.reads_moments and self.methods[-1].turns_moments:
                raise ValueError(
                    f"chain: {method!r} predicts by the second moment of Adam, which {self.methods[-1]!r} keeps in "
                    "bases of its own; leave one of them out"
                )
        self.schedule = first.schedule
        ranks = ("live", "scratch", "stash")
        self.copies = max((m.copies for m in self.methods), key=ranks.index)
        self.state_copies = sum(m.state_copies for m in self.methods)
        self.merges = all(m.merges for m in self.methods)
        self.flush_each_push, self.by_worker = first.flush_each_push, first.by_worker
        self.placement, self.chunks = first.placement, first.chunks
        self.needs_entry = any(m.needs_entry for m in self.methods)
        self.needs_used = any(m.needs_used for m in self.methods)
        self.elementwise = all(m.elementwise for m in self.methods)
        self.steps_itself = self.methods[-1].steps_itself
        self.reads_moments = any(m.reads_moments for m in self.methods)
        self.turns_moments = self.methods[-1].turns_moments
        self.takes_rows = all(m.takes_rows or not overrides(m, "update") for m in self.methods)
        reads = [m.reads_rates and overrides(m, "update") for m in self.methods]
        self._divides = any(overrides(m, "update_rates") and any(reads[n:]) for n, m in enumerate(self.methods, 1))
        self.reads_rates = any(reads)
        own = any(one.own for m in self.methods if (one := _described(m)) is not None)
        self._composes = all(map(described, self.methods)) and _along_one(self.methods) and (self.takes_rows or not own)

    def schedule_at(self, start: int, pushed: int) -> Schedule:
        return next((m for m in self.methods if overrides(m, "schedule_at")), self.methods[0]).schedule_at(
            start, pushed
        )

    def placed(self, schedule: Schedule, placement: Placement) -> Placed:
        return self.methods[0].placed(schedule, placement)

    def check(self, optimizer: torch.optim.Optimizer, stages: int) -> None:
        for method in self.methods:
            method.check(optimizer, stages)

    def delays(self, stages: int) -> list[int]:
        return self.methods[0].delays(stages)

    def check_stages(self, stages: int) -> None:
        for method in self.methods:
            method.check_stages(stages)
            if any(method.history(s, stages) for s in range(stages)):
                raise ValueError(
                    f"chain: {method!r} runs forwards on older versions, which no other method can shift; use it alone"
                )

    def held(self, stage: int, stages: int) -> int:
        if self.copies == "stash" and any(m.copies == "scratch" for m in self.methods):
            return 1 + in_flight(self.schedule, stages)[stage]  # the shifted weights of every micro-batch in flight
        return max(m.held(stage, stages) for m in self.methods)

    def state_numbers(self, shape: Sequence[int]) -> float:
        return sum(m.state_numbers(shape) for m in self.methods)

    def init(self, weights: Weights) -> State:
        return {f"{n}/{key}": value for n, m in enumerate(self.methods) for key, value in initial(m, weights).items()}

    def forward_weights(self, weights: Weights, state: State, when: When) -> Chosen:
        chosen: Chosen = weights
        for n, method in enumerate(self.methods):
            chosen = method.forward_weights(computed(chosen), _part(state, n), when)
            when = _inside(method, _part(state, n), when)
        return _from(weights, chosen)

    def backward_weights(self, weights: Weights, used: Weights | None, state: State, when: When) -> Chosen:
        chosen: Chosen = weights
        for n, method in enumerate(self.methods):
            chosen = method.backward_weights(computed(chosen), used, _part(state, n), when)
            when = _inside(method, _part(state, n), when)
        return _from(weights, chosen)

    def update(self, weights: Weights, optimizer: OptimizerLike, state: State, when: When) -> State:
        fresh: State = {}
        if self._divides:  # a method inside reads the rates of groups, which one outside divides: each has one then
            for group in optimizer.param_groups:
                group.pop("rates", None)
        _Onion(self.methods, 0, weights, optimizer, state, when, fresh).step()
        return fresh

    def correction(self, when: When, state: State) -> Correction | None:
        if not self._composes:
            return None
        found = Correction()
        for n, method in enumerate(self.methods):
            part = _part(state, n)
            one = method.correction(when, part) or Correction()  # a method without hooks says nothing
            found = _around(found, one, f"{n}/")
            when = _inside(method, part, when)
        return found

    def advanced(self, state: State, updates: int) -> State:
        return {
            f"{n}/{key}": value
            for n, method in enumerate(self.methods)
            for key, value in method.advanced(_part(state, n), updates).items()
        }

    def options(self) -> dict[str, Any]:
        return {f"{n}/{type(m).__name__}/{k}": v for n, m in enumerate(self.methods) for k, v in m.options().items()}

    def __repr__(self) -> str:
        return f"chain({', '.join(map(repr, self.methods))})"


class _Onion:
    """The optimizer that method n of a chain sees: its step is the update of method n + 1."""

    def __init__(
        self,
        methods: Sequence[Method],
        n: int,
        weights: Weights,
        inner: OptimizerLike,
        state: State,
        when: When,
        fresh: State,
    ) -> None:
        self.methods, self.n, self.weights, self.inner = methods, n, weights, inner
        self.method_state, self.when, self.fresh = state, when, fresh
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self) -> None:
        n = self.n
        if n == len(self.methods):
            self.inner.step()
            return
        before = _part(self.method_state, n)
        when = _inside(self.methods[n], before, self.when)
        inside = _Onion(self.methods, n + 1, self.weights, self.inner, self.method_state, when, self.fresh)
        state = state_of(self.methods[n], "update", self.methods[n].update(self.weights, inside, before, self.when))
        self.fresh.update({f"{n}/{key}": value for key, value in state.items()})


def _along_one(methods: Sequence[Method]) -> bool:
    """Whether methods with known corrections shift along one direction only, and none shifts what F has used."""
    each = list(map(_described, methods))
    deltas = [one is not None and bool(one.along) for one in each]
    velocities = ["velocity" in method.init([]) for method in methods]
    stashed = [one is not None and one.used for one in each]
    first = stashed.index(True) if any(stashed) else len(methods)
    after = any(one is None or (bool(one.back) and not one.used) for one in each[first:])
    return sum(deltas) + any(velocities) < 2 and not after


def _described(method: Method) -> Correction | None:
    """Return the correction of a method at some stage, neither the first nor the last."""
    D = method.delays(3)[1]
    return method.correction(When(1, 3, 0, 0, D, (1.0,), (D,)), method.init([]))


def _around(outer: Correction, inner: Correction, name: str) -> Correction:
    """Return the correction of a method whose update goes around another one's. name: the prefix of the inner state."""
    return Correction(
        ahead=_sum(outer.ahead, inner.ahead),
        late=inner.late or outer.late,  # only the last method makes the step itself
        back=() if inner.used else _sum(outer.back, inner.back),
        drift=outer.drift if outer.along and not inner.along else inner.drift,
        rates=inner.rates or outer.rates,  # it has seen those of the outer ones
        used=outer.used or inner.used,
        varies=outer.varies or inner.varies,
        along=name + inner.along if inner.along else outer.along,
        own=outer.own or inner.own,
    )


def _sum(some: Sequence[float], others: Sequence[float]) -> Sequence[float]:
    return [a + b for a, b in zip(some, others, strict=True)] if some and others else some or others


def _inside(method: Method, state: State, when: When) -> When:
    """`when` for the methods after this one: with the rates at which it has them make their update."""
    return when._replace(rates=method.update_rates(when, state)) if overrides(method, "update_rates") else when


def _part(state: State, n: int) -> State:
    prefix = f"{n}/"
    return {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}


def _sample(schedule: Schedule) -> list[Any]:
    return [list(islice(schedule(s, 3), 48)) for s in range(3)]


def _from(weights: Weights, chosen: Chosen) -> Chosen:
    """Return what was chosen; a `Shift` of anything but the newest weights, to which the runtime adds it, computed."""
    return computed(chosen) if isinstance(chosen, Shift) and chosen.weights is not weights else chosen


def computed(chosen: Chosen) -> Weights:
    """Return the weights that a hook has chosen, a `Shift` computed at once."""
    if isinstance(chosen, Past):
        raise ValueError("a chain cannot predict from a past version")
    if not isinstance(chosen, Shift):
        return chosen
    return [
        w if x is None else w + c * x
        for w, c, x in zip(chosen.weights, chosen.coefficients, chosen.directions, strict=True)
    ]
