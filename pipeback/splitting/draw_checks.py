"""Draw checks: a forward that computes by random numbers in a way that a trace of it would not repeat is refused.

A torch function that draws is one call of the trace, which draws anew for each micro-batch. Two things are lost: a
decision by what was drawn, as layer drop makes one, and a number that a generator of Python or numpy has given.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from pipeback.splitting.call_origins import Decision, decided
from pipeback.splitting.call_trace import Call, CallTrace
from pipeback.splitting.outside_draws import at, extremes, read
from pipeback.splitting.refusals import draws_outside, drops_layers
from pipeback.tensors.structures import Ref

DRAWS = {
    "rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "bernoulli", "bernoulli_",
    "normal", "normal_", "uniform_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_", "poisson",
    "multinomial",
}  # fmt: skip

# comparisons, and whether one of a number from [0, 1) with 0 always ends alike; with 1, and outside, all do
COMPARED = {"lt": True, "ge": True, "gt": False, "le": False}


def check_draws(model: nn.Module, record: CallTrace, trace: Callable[[], CallTrace]) -> None:
    """Raise ValueError, which names the module, if the trace depends on what its forward has drawn.

    trace: traces the forward once more. A forward that has drawn from a generator of Python or numpy is traced with
    the least and with the largest numbers that this can give, so that a layer drop of any probability is seen.
    """
    if (path := _decided(record)) is not None:
        raise drops_layers(model, path)
    if record.draws is None:
        return
    for states in extremes(record.outside):
        with at(record.outside, states or read(record.outside)):
            if states is None or not trace().repeats(record):  # None: it cannot be told what to draw
                raise draws_outside(model, record.draws)


def _decided(record: CallTrace) -> str | None:
    """Return the path of a module that decides by a random number alone; None if there is none."""
    if not any(map(_draws, record.calls)):
        return None
    for each in decided(record):
        if not _certain(each) and not each.given and any(map(_draws, each.calls())):
            return each.call.where
    return None


def _certain(decision: Decision) -> bool:
    """Whether what decides compares a number from [0, 1) with one outside of it, as a layer drop of 0 does."""
    refs, made = [ref.number for ref in decision.call.refs()], decision.makers
    makers = made.get(refs[0], []) if len(refs) == 1 else []
    name = _name(makers[0]).strip("_") if len(makers) == 1 else ""
    if name not in COMPARED:
        return False
    drawn, bound = makers[0].args[:2]
    uniform = isinstance(drawn, Ref) and [_name(call) for call in made.get(drawn.number, ())] == ["rand"]
    outside = isinstance(bound, (int, float)) and (bound >= 1 or bound < 0 or (bound == 0 and COMPARED[name]))
    return uniform and outside


def _draws(call: Call) -> bool:
    return _name(call) in DRAWS


def _name(call: Call) -> str:
    return getattr(call.target, "__name__", "")
