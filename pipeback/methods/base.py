"""What a method is: which weights F runs on, which weights B runs on, and how U moves the weights.

    F(i):  ŵ = forward_weights(w)          B(i):  w̃ = backward_weights(w, ŵ)          U:  w ← update(w)

Every hook has the identity as its default, so a method is only what it changes. Hooks run without gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from types import FunctionType
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from pipeback.schedules.ops import Schedule
from pipeback.schedules.timeline import delays
from pipeback.tensors.weight_list import Weights as Weights  # methods take it from here


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
    rates: Sequence[float] = ()  # η in force when i was pushed, one per weight
    delays: Sequence[int] = ()  # D, one per weight
    start: int = 0  # the first micro-batch since the pipeline was last drained
    base: int = 0  # the version at that moment
    entry: int = 0  # the version of stage 0 when i entered there (methods with `needs_entry`)


# a method's own state: lists of tensors (or None), one per weight, and plain numbers; "velocity", where it begins with
# None, is torch's momentum buffers, and others when somebody has put others into the optimizer
State = dict[str, Any]


class Shift(NamedTuple):
    """w + c·x, not yet computed: the stage computes it in place, for several stages at once.

    coefficients: one number per weight. directions: tensors shaped like the weights; None leaves a weight as it is.
    """

    weights: Weights
    coefficients: Sequence[float]
    directions: Sequence[Tensor | None]


class Past(NamedTuple):
    """The weights after `version` updates; the stage keeps as many as `Method.history` says."""

    version: int


Chosen = Weights | Shift | Past


class Correction(NamedTuple):
    """What the hooks of a method compute, as lists with one number per weight; an empty list stands for "as it is".

    Under momentum SGD, with the velocity v:
        F runs on w + ahead·v
        B runs on w + back·v
        U is spike compensation for gradients that come `late` updates late
    With any optimizer:
        B runs on the weights that F `used`, or on w + back·δ, where δ ← drift·δ + (1 − drift)·(w' − w) is the state's
        "drift"
        U runs at these `rates`
    If all are empty, F and B run on w, and U is the optimizer's own step.

    varies: the correction is another one after every update.
    """

    ahead: Sequence[float] = ()
    late: Sequence[float] = ()
    back: Sequence[float] = ()
    drift: Sequence[float] = ()
    rates: Sequence[float] = ()
    used: bool = False
    varies: bool = False


class OptimizerLike(Protocol):
    """The optimizer that `update` gets: the stage's, or one over several stages, at the rates of its micro-batch."""

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
                    state in lists with one entry per weight: one call may serve several stages
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
        """Return the weights on which F(i) runs."""
        return weights

    def backward_weights(self, weights: Weights, used: Weights | None, state: State, when: When) -> Chosen:
        """Return the weights on which B(i) runs. used: those on which F(i) ran if `copies` is "stash", else None."""
        return weights

    def update(self, weights: Weights, optimizer: OptimizerLike, state: State, when: When) -> State:
        """Move the weights by the averaged gradient in their `.grad`; returns the new state."""
        optimizer.step()
        return state

    def correction(self, when: When, state: State) -> Correction | None:
        """The `Correction` that the hooks compute; None if they do more, or keep more than v, δ and plain numbers.

        Stages that run as one do not call the hooks where they are given a correction. The correction of a class does
        not speak for a subclass that overrides hooks: those are called.
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
