"""What a method is: which weights F runs on, which weights B runs on, and how U moves the weights.

    F(i):  ŵ = forward_weights(w)          B(i):  w̃ = backward_weights(w, ŵ)          U:  w ← update(w)

F is the forward of micro-batch i at a stage, B its backward and U the update of the stage's weights. Every hook has the
identity as its default, so a method consists only of what it changes. Hooks run without gradients, and only `update`
writes into the weights that it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from math import prod
from types import FunctionType
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from pipeback.schedules.ops import Schedule
from pipeback.schedules.placement import Kind, Placed, Placement
from pipeback.schedules.timeline import delays
from pipeback.schedules.worker_programs import as_stages
from pipeback.tensors.weight_list import Weights as Weights  # methods take it from here


class When(NamedTuple):
    """Where and when a hook is called.

    When one call serves several stages (`Method.merges`), `rates` and `delays` hold one number per weight, the plain
    numbers of a state are tuples with one per weight, and the other fields are those of the first stage.

    When weights are rows (`rows`), every weight is a tensor (n, …) of n stages: `rates` and `delays` hold a column
    (n, 1, …) per weight, the rates of parameter groups, `delay` and the plain numbers of a state are vectors (n), and
    `mb` and `version` are not told (`pipeback.methods.columns`).
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
    # of an update, the weights on which F(i) ran (methods with `needs_used`), or of several micro-batches F of the
    # first; if they are the newest, it is the list of the weights itself
    used: Weights | None = None
    rows: int = 0  # n, of how many stages each weight has a row; 0: it is the weight of one stage


# a method's own state: plain numbers, and lists with one tensor (or None) per weight; a list "velocity" that begins
# with None stands for the momentum buffers that the optimizer holds at present
State = dict[str, Any]


class Shift(NamedTuple):
    """w + c·x, not yet computed: the runtime computes it in place, for several stages at once.

    coefficients: c, one number per weight. directions: x, one tensor per weight and of its shape; None leaves that
    weight as it is.
    """

    weights: Weights
    coefficients: Sequence[float]
    directions: Sequence[Tensor | None]


class Past(NamedTuple):
    """The weights after `version` updates; the stage keeps as many older versions as `Method.history` says."""

    version: int


Chosen = Weights | Shift | Past


class Correction(NamedTuple):
    """What the hooks of a method compute, as lists with one number per weight; an empty list stands for "as it is".

    Under momentum SGD, with the velocity v:
        F runs on w + ahead·v
        B runs on w + back·v
        U is spike compensation for gradients that come `late` updates late
    With any optimizer:
        F runs on w + ahead·δ and B on w + back·δ, where δ ← drift·δ + (1 − drift)·(w' − w) is the list of the state
        whose name is `along`
        B runs on the weights that F `used`, shifted or not
        F runs on the version of stage 0 at which the micro-batch entered (`entry`)
        F of a micro-batch before whose turn its `group`, the micro-batches of one update, has seen an update, runs on
        w + x instead, where x is the list of the state of this name
        U runs at these `rates`
        U is the method's `own` update, which is called with rows (`When.rows`); what else is said of U does not hold
    If all are empty, F and B run on w, and U is the optimizer's own step.

    along: the name of δ in the state; empty: the shifts are along v. varies: whether the correction changes with every
    update.
    """

    ahead: Sequence[float] = ()
    late: Sequence[float] = ()
    back: Sequence[float] = ()
    drift: Sequence[float] = ()
    rates: Sequence[float] = ()
    used: bool = False
    varies: bool = False
    along: str = ""
    own: bool = False
    group: str = ""
    entry: bool = False


class OptimizerLike(Protocol):
    """The optimizer that `update` gets, with the rates of the micro-batch: the stage's, or one over several stages."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    @property
    def state(self) -> Any: ...

    def step(self) -> Any: ...


class Method:
    """The base of every method; subclasses override what they change and nothing else.

    schedule        a function (stage, stages) -> program; delays are counted on it and never restated
    copies          which weights are held beside the newest ones: "live" none, "scratch" one buffer for shifted
                    weights, "stash" every version that a micro-batch in flight still needs
    state_copies    how large the method's state is, in copies of the weights; see `state_numbers`
    merges          whether the hooks work weight by weight, on the numbers `when.rates` and `when.delays`, and keep
                    their state in lists with one entry per weight, so that one call may serve several stages
    flush_each_push whether every push is a flush of its own
    by_worker       whether a whole flush may run in the order that `placed` gives to each worker, and whether with a
                    store all its forwards may come first. The weights are the same either way, since every flush ends
                    with all its gradients summed
    placement       which stages a worker of several holds: "neighbours" next to each other, or several parts of them,
                    "loop" round robin and "v" forth and back
    chunks          how many parts each worker holds
    needs_entry     whether the hooks read `when.entry`
    needs_used      whether `update` reads `when.used`; `copies` must be "stash" then, and one more version is kept
    elementwise     whether the hooks treat every entry of a weight by itself, so that a stage may hold only some of
                    them: those that survive, or a rank's slice
    steps_itself    whether `update` makes the step without calling `optimizer.step()`; such a method is the last of a
                    chain
    reads_moments   whether the hooks read the second moment of Adam in the optimizer's state
    reads_rates     whether `update` may read the rates in the optimizer's groups, each of which has one rate then
    turns_moments   whether the method keeps it there in other coordinates than those of the weights
    fixed_groups    whether all forwards and backwards of a group, the micro-batches of one update, run on the weights
                    that the forward of the first one is given
    takes_rows      whether `update` can be called with rows of weights (`When.rows`)
    """

    schedule: Schedule
    copies: Literal["live", "scratch", "stash"] = "live"
    state_copies: float = 0
    merges: bool = False
    flush_each_push: bool = False
    by_worker: bool = False
    placement: Kind = "neighbours"
    chunks: int = 1
    needs_entry: bool = False
    needs_used: bool = False
    elementwise: bool = True
    steps_itself: bool = False
    reads_moments: bool = False
    reads_rates: bool = True
    turns_moments: bool = False
    fixed_groups: bool = False
    takes_rows: bool = False

    def __init_subclass__(cls) -> None:
        if isinstance(cls.__dict__.get("schedule"), FunctionType):
            cls.schedule = staticmethod(cls.__dict__["schedule"])  # a function as a class attribute is no method

    @classmethod
    def derived(cls, stages: int, updates: int) -> dict[str, Any]:
        """Values for options that a name alone leaves out. updates: how many the whole training will make."""
        return {}

    def schedule_at(self, start: int, pushed: int) -> Schedule:
        """The schedule of an empty pipeline that goes on at micro-batch `start`, with a push of `pushed` of them."""
        return self.schedule

    def placed(self, schedule: Schedule, placement: Placement) -> Placed:
        """The schedule of a whole flush for these workers, if `by_worker`: of the weights that `schedule` makes.

        By default, all stages of a worker run the program that it would run if they were one stage.
        """
        return Placed(as_stages(schedule), placement)

    def check(self, optimizer: torch.optim.Optimizer, stages: int) -> None:
        """Raise a ValueError that names the alternative when the equations do not allow this optimizer."""

    def delays(self, stages: int) -> list[int]:
        """D of every stage: the stage's updates between F and B of a micro-batch, counted on the schedule."""
        return delays(self.schedule, stages)

    def check_stages(self, stages: int) -> None:
        """Raise a ValueError that names the cure when the method cannot run on so many stages."""

    def history(self, stage: int, stages: int) -> int:
        """How many versions older than those in flight the stage keeps, because a later forward may ask for them."""
        return 0

    def held(self, stage: int, stages: int) -> int:
        """The most copies of the weights that the stage holds at once, the newest included; a law checks it."""
        if self.copies == "stash":
            D = self.delays(stages)[stage]
            return 1 + D + (self.needs_used and D > 0)  # what an update is handed, beside the version that it replaces
        return 2 if self.copies == "scratch" else 1

    def state_numbers(self, shape: Sequence[int]) -> float:
        """How many numbers of state the method keeps for a weight of this shape; a law checks it."""
        return self.state_copies * prod(shape)

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
        """Move the weights by the averaged gradient in their `.grad`, which may be None; return the new state."""
        optimizer.step()
        return state

    def update_rates(self, when: When, state: State) -> Sequence[float]:
        """The rates of the step inside `update`, one per weight, by which later methods of a chain predict."""
        return when.rates

    def correction(self, when: When, state: State) -> Correction | None:
        """The `Correction` that the hooks compute; None if it cannot say what they do.

        Stages that run as one apply the correction and do not call the hooks. They do not trust the correction of a
        class for a subclass that overrides hooks, but call the hooks there.
        """
        return None

    def advanced(self, state: State, updates: int) -> State:
        """The state after so many updates by `correction`, with new plain numbers; the lists are already up to date."""
        return state

    def options(self) -> dict[str, Any]:
        """The method's options as plain values: what a saved state must agree with. Those of `LATER` are left out."""
        names = [f.name for f in fields(self)] if is_dataclass(self) else list(vars(self))
        values = {name: getattr(self, name) for name in names if (name, getattr(self, name)) not in LATER}
        plain = {k: v for k, v in values.items() if v is None or isinstance(v, (bool, int, float, str))}
        return {k: v for k, v in plain.items() if (k, v) != ("late", 0)}  # earlier states do not have it

    def __repr__(self) -> str:
        inner = ", ".join(f"{k}={v!r}" for k, v in self.options().items())
        return f"{type(self).__name__}({inner})"


def overrides(method: Method, hook: str) -> bool:
    """Whether the method changes this hook, or was given one of its own; else it need not be called."""
    return hook in vars(method) or getattr(type(method), hook) is not getattr(Method, hook)


# options that methods were given later, at the values that change nothing: earlier states do not have them
LATER = (("placement", "neighbours"), ("late", 0))
# options that say which worker holds which stages; no number depends on them
PLACES = ("chunks", "placement")


HOOKS = ("forward_weights", "backward_weights", "update")


def described(method: Method) -> bool:
    """Whether `correction` describes the hooks: no subclass of the class that defines it overrides one of them."""
    if not any(overrides(method, hook) for hook in HOOKS):
        return True
    classes = type(method).__mro__
    says = next(n for n, kind in enumerate(classes) if "correction" in vars(kind))
    if any(hook in vars(kind) for kind in classes[:says] for hook in HOOKS):
        return False
    return method.correction(When(0, 1, 0, 0, 0), {}) is not None


def sampled(method: Method) -> Correction | None:
    """Return the correction of a method, at some stage with a delay, if it describes the hooks."""
    if not described(method):
        return None
    D = method.delays(3)[1]
    return method.correction(When(1, 3, 0, 0, D, (1.0,), (D,)), method.init([]))
