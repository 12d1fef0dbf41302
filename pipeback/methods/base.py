"""What a method is: which weights F runs on, which weights B runs on, and how U moves the weights.

    F(i):  ŵ = forward_weights(w)          B(i):  w̃ = backward_weights(w, ŵ)          U:  w ← update(w)

Every hook has the identity as its default, so a method is only what it changes. Hooks run without gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from itertools import islice
from types import FunctionType
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from pipeback.schedules.ops import Schedule
from pipeback.schedules.timeline import delays, in_flight
from pipeback.tensors.weight_list import Weights


class When(NamedTuple):
    """Where and when a hook is called.

    When several stages are served by one call (`Method.merges`), `rates` and `delays` hold the numbers of each
    weight, and the other fields are those of the first stage.
    """

    stage: int  # s
    stages: int  # S
    mb: int  # i; of an update, the last micro-batch that it includes
    version: int  # updates this stage has made
    delay: int  # D, counted on the schedule, steady state
    rates: Sequence[float] = ()  # η in force when i was pushed, one a weight
    delays: Sequence[int] = ()  # D, one a weight
    start: int = 0  # the first micro-batch since the pipeline was last drained
    base: int = 0  # the version at that moment
    entry: int = 0  # the version of stage 0 when i entered there (methods with `needs_entry`)


# a method's own state: lists of tensors (or None), one a weight, and plain numbers; "velocity", where it begins with
# None, is torch's momentum buffers, and others when somebody has put others into the optimizer
State = dict[str, Any]


class Shift(NamedTuple):
    """w + c·x, not yet computed: the stage computes it in place, for several stages at once.

    coefficients: one number a weight. directions: tensors shaped like the weights; None leaves a weight as it is.
    """

    weights: Weights
    coefficients: Sequence[float]
    directions: Sequence[Tensor | None]


class Past(NamedTuple):
    """The weights after `version` updates; the stage keeps as many as `Method.history` says."""

    version: int


Chosen = Weights | Shift | Past


class Correction(NamedTuple):
    """What hooks amount to, in lists of one number a weight, or of none: under momentum SGD F on w + ahead·v, B on
    w + back·v, U with spike compensation for gradients that come `late` updates late; with any optimizer B on the
    weights that F `used`, or on w + back·δ, δ ← drift·δ + (1 − drift)·(w' − w), the state's "drift", and U at these
    `rates`. Empty: F and B on w; the optimizer's own step.

    varies: it is another one after every update.
    """

    ahead: Sequence[float] = ()
    late: Sequence[float] = ()
    back: Sequence[float] = ()
    drift: Sequence[float] = ()
    rates: Sequence[float] = ()
    used: bool = False
    varies: bool = False


class OptimizerLike(Protocol):
    """What `update` is given: the stage's optimizer (or one over several stages), at the rates of its micro-batch."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    @property
    def state(self) -> Any: ...

    def step(self) -> Any: ...


class Method:
    """The base of every method; subclasses override what they change and nothing else.

    schedule        (stage, stages) -> program; its delays are counted, never restated
    copies          where weights live beside the current ones: "live" nowhere, "scratch" one buffer for shifted
                    weights, "stash" every version that a micro-batch in flight still needs
    state_copies    method state, in copies of the weights
    merges          the hooks work weight by weight, on the numbers `when.rates` and `when.delays`, and keep their
                    state in lists with one entry a weight: one call may serve several stages
    flush_each_push every push is a flush of its own
    by_worker       the neighbours that one worker holds may all run the program of one stage, with as many stages as
                    there are workers, and with a store all forwards of a flush may come first: no weight can tell the
                    difference, which ends with every flush
    needs_entry     the hooks read `when.entry`
    steps_itself    `update` makes the step without calling `optimizer.step()`: in a chain it stands last
    """

    schedule: Schedule
    copies: Literal["live", "scratch", "stash"] = "live"
    state_copies: int = 0
    merges: bool = False
    flush_each_push: bool = False
    by_worker: bool = False
    needs_entry: bool = False
    steps_itself: bool = False

    def __init_subclass__(cls) -> None:
        if isinstance(cls.__dict__.get("schedule"), FunctionType):
            cls.schedule = staticmethod(cls.__dict__["schedule"])  # a function as a class attribute is no method

    def schedule_at(self, start: int, pushed: int) -> Schedule:
        """The schedule that begins, in an empty pipeline, at micro-batch `start` with a push of `pushed`."""
        return self.schedule

    def check(self, optimizer: torch.optim.Optimizer, stages: int) -> None:
        """Raise a ValueError that names the alternative when the equations do not allow this optimizer."""

    def delays(self, stages: int) -> list[int]:
        """D of every stage: own updates between reading F's weights and B, counted on the schedule."""
        return delays(self.schedule, stages)

    def check_stages(self, stages: int) -> None:
        """Raise a ValueError that names the cure when the method cannot run on so many stages."""

    def history(self, stage: int, stages: int) -> int:
        """Older versions to keep, beyond those in flight, because a later forward may ask for them."""
        return 0

    def held(self, stage: int, stages: int) -> int:
        """Copies of the weights at the peak, the live one included: what the memory law checks."""
        if self.copies == "stash":
            return 1 + self.delays(stages)[stage]
        return 2 if self.copies == "scratch" else 1

    def init(self, weights: Weights) -> State:
        """The state before the first micro-batch."""
        return {}

    def forward_weights(self, weights: Weights, state: State, when: When) -> Chosen:
        """What F(i) runs on."""
        return weights

    def backward_weights(self, weights: Weights, used: Weights | None, state: State, when: When) -> Chosen:
        """What B(i) runs on; `used` is what F(i) ran on where `copies` is "stash", else None."""
        return weights

    def update(self, weights: Weights, optimizer: OptimizerLike, state: State, when: When) -> State:
        """Move the weights by the averaged gradient in their `.grad`; returns the new state."""
        optimizer.step()
        return state

    def correction(self, when: When, state: State) -> Correction | None:
        """What the hooks amount to, if that is a `Correction`; None: they do more, or their state is more than v, δ and
        plain numbers.

        Stages that run as one then need not call the hooks. A subclass with hooks of its own is asked through these.
        """
        return None

    def advanced(self, state: State, updates: int) -> State:
        """The state after so many updates by `correction`: its plain numbers; the lists are taken care of."""
        return state

    def options(self) -> dict[str, Any]:
        """The method's options as plain values: what a saved state must agree with."""
        names = [f.name for f in fields(self)] if is_dataclass(self) else list(vars(self))
        values = {name: getattr(self, name) for name in names}
        return {k: v for k, v in values.items() if v is None or isinstance(v, (bool, int, float, str))}

    def __repr__(self) -> str:
        inner = ", ".join(f"{k}={v!r}" for k, v in self.options().items())
        return f"{type(self).__name__}({inner})"


def overrides(method: Method, hook: str) -> bool:
    """Whether the method changes this hook; an identity is not called on the hot path."""
    return getattr(type(method), hook) is not getattr(Method, hook)


HOOKS = ("forward_weights", "backward_weights", "update")


def described(method: Method) -> bool:
    """Whether `correction` speaks for the hooks: it says something, and none stands in a class below."""
    if not any(overrides(method, hook) for hook in HOOKS):
        return True
    classes = type(method).__mro__
    says = next(n for n, kind in enumerate(classes) if "correction" in vars(kind))
    if any(hook in vars(kind) for kind in classes[:says] for hook in HOOKS):
        return False
    return method.correction(When(0, 1, 0, 0, 0), {}) is not None


class _Chain(Method):
    """Methods one around the other; see `chain`."""

    def __init__(self, methods: Sequence[Method]) -> None:
        self.methods = tuple(methods)
        first = self.methods[0]
        for other in self.methods[1:]:
            if _sample(other.schedule) != _sample(first.schedule):
                raise ValueError(f"chain: {first!r} and {other!r} have different schedules; give both the same slack=")
        for method in self.methods[:-1]:
            if method.steps_itself:
                raise ValueError(f"chain: {method!r} makes the step itself, with nothing inside; put it last")
        self.schedule = first.schedule
        ranks = ("live", "scratch", "stash")
        self.copies = max((m.copies for m in self.methods), key=ranks.index)
        self.state_copies = sum(m.state_copies for m in self.methods)
        self.merges = all(m.merges for m in self.methods)
        self.flush_each_push, self.by_worker = first.flush_each_push, first.by_worker
        self.needs_entry = any(m.needs_entry for m in self.methods)
        self.steps_itself = self.methods[-1].steps_itself

    def schedule_at(self, start: int, pushed: int) -> Schedule:
        return self.methods[0].schedule_at(start, pushed)

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

    def init(self, weights: Weights) -> State:
        return {f"{n}/{key}": value for n, m in enumerate(self.methods) for key, value in m.init(weights).items()}

    def forward_weights(self, weights: Weights, state: State, when: When) -> Chosen:
        chosen: Chosen = weights
        for n, method in enumerate(self.methods):
            chosen = method.forward_weights(computed(chosen), _part(state, n), when)
        return chosen

    def backward_weights(self, weights: Weights, used: Weights | None, state: State, when: When) -> Chosen:
        chosen: Chosen = weights
        for n, method in enumerate(self.methods):
            chosen = method.backward_weights(computed(chosen), used, _part(state, n), when)
        return chosen

    def update(self, weights: Weights, optimizer: OptimizerLike, state: State, when: When) -> State:
        fresh: State = {}
        _Onion(self.methods, 0, weights, optimizer, state, when, fresh).step()
        return fresh

    def options(self) -> dict[str, Any]:
        return {f"{n}/{type(m).__name__}/{k}": v for n, m in enumerate(self.methods) for k, v in m.options().items()}

    def __repr__(self) -> str:
        return f"chain({', '.join(map(repr, self.methods))})"


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
        inside = _Onion(self.methods, n + 1, self.weights, self.inner, self.method_state, self.when, self.fresh)
        state = self.methods[n].update(self.weights, inside, _part(self.method_state, n), self.when)
        self.fresh.update({f"{n}/{key}": value for key, value in state.items()})


def _part(state: State, n: int) -> State:
    prefix = f"{n}/"
    return {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}


def _sample(schedule: Schedule) -> list[Any]:
    return [list(islice(schedule(s, 3), 48)) for s in range(3)]


def computed(chosen: Chosen) -> Weights:
    """The tensors of a choice, for whoever needs them at once."""
    if isinstance(chosen, Past):
        raise ValueError("a chain cannot predict from a past version")
    if not isinstance(chosen, Shift):
        return chosen
    return [
        w if x is None else w + c * x
        for w, c, x in zip(chosen.weights, chosen.coefficients, chosen.directions, strict=True)
    ]
