"""Law: ticks at which all stages do the same, done as one function, are the event loop to rounding."""

from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipeback
from pipeback import methods
from pipeback.methods.base import described
from pipeback.methods.cerebras import Cerebras
from tests.helpers.choice import diagonal, mostly_rare, rare
from tests.laws.as_one import LEAP, OWN, SEVERAL, TURNED, S, block, decayed, doubles, model, pipelines, pushed, same
from tests.laws.cases import CASES, OPTIMIZERS, STEADY, allowed, network, weights

# of ticks that are done as one function, and of those that are not
KINDS = (
    "pb-slack1",
    "lwp-horizon3",
    "sc",
    "cerebras",
    "pipedream",
    "pipemare",
    "gpipe-4",
    "spectrain-v2",
    "ef",
    *SEVERAL,
)
pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")


@pytest.mark.parametrize("case", mostly_rare(STEADY, *KINDS))
def test_many_micro_batches_a_push(case, leapt):
    one, other = pipelines(case)
    same(pushed(other), pushed(one))
    assert sorted(other.ledger) == sorted(one.ledger)
    assert (sum(leapt) > 30) == (case in LEAP)
    assert other.memory() is not None and [s.peak_flights for s in other._engine.stages] == [
        s.peak_flights for s in one._engine.stages
    ]


def chained(outer, inner):
    return pipeback.chain(*(methods.create(name, **options) for name, options in (outer, inner)))


CHAINS = {
    "pipedream, lwp": (("pipedream", {}), ("lwp", {"slack": 1})),
    "staleness_lr, lwp": (("staleness_lr", {}), ("lwp", {})),
    "lwp, sc": (("lwp", {}), ("sc", {})),
    "lwp, spectrain": (("lwp", {}), ("spectrain", {"slack": 2})),
    "pipemare, sc": (("pipemare", {"anneal": 12}), ("sc", {})),
    "staleness_lr, lwp-weight": (("staleness_lr", {}), ("lwp", {"form": "weight"})),
    "lwp-weight, pipedream": (("lwp", {"form": "weight"}), ("pipedream", {"slack": 2})),
}


@pytest.mark.parametrize("name", mostly_rare(CHAINS, "pipedream, lwp", "lwp, spectrain", "pipemare, sc"))
def test_chains(name, leapt):
    """Their corrections are put together: shifts are added up, rates have seen those of the methods around them."""
    one, other = pipelines(chained(*CHAINS[name]))
    same(pushed(other), pushed(one))
    assert sorted(other.ledger) == sorted(one.ledger) and sum(leapt) > 30


@pytest.mark.parametrize(
    "apart",
    [
        (("lwp", {}), ("lwp", {"form": "weight"})),
        (("pipedream", {"slack": 2}), ("spectrain", {"slack": 2})),
        (("dc_asgd", {"slack": 2}), ("sc", {})),
    ],
    ids=["two directions", "a shift of what F used", "a step that takes no rows"],
)
def test_chains_that_are_no_correction_call_hooks(apart, leapt):
    one, other = pipelines(chained(*apart))
    same(pushed(other), pushed(one))
    assert not sum(leapt)
    assert all("no tick is one function: its weights or its update" in told for told in other.vectorized.values())


@pytest.mark.parametrize(
    ("case", "optimizer"), diagonal(["sc", "sc-horizon2", "lwp-weight", "lwp-weight+sc"], ["adam", "adamw"])
)
def test_adam_with_every_correction(case, optimizer, leapt):
    one, other = pipelines(case, optimizer)
    same(pushed(other), pushed(one))
    assert sum(leapt) > 30


OWN_STEPS = [(case, name) for case in OWN for name in OPTIMIZERS if allowed(case, name)]


@pytest.mark.parametrize(
    ("case", "optimizer"),
    mostly_rare(
        OWN_STEPS, ("ef", "adamw"), ("gap_aware", "momentum"), ("dc_asgd-adaptive", "adamw"),
        ("msnag-stash", "momentum"), ("pipeoptim", "adamw"), ("braking", "adamw"), ("staleness_lr+ef", "adamw"),
    ),
)  # fmt: skip
def test_updates_of_the_methods_own(case, optimizer, leapt):
    """They are called with rows, at rates that change at every push and differ from stage to stage."""
    found = []
    for pipe in pipelines(case, optimizer):

        def slower(n, pipe=pipe):
            for s, one in enumerate(pipe.optimizers):
                one.param_groups[0]["lr"] *= 0 if n == 3 and s == 2 else 0.9 + 0.01 * s

        found.append(pushed(pipe, before=slower))
    same(*reversed(found))
    assert sum(leapt) > 30


OTHERS = {
    **{case: CASES[case](S) for case in TURNED},
    "adamw and spike": methods.create("eigendelay", sides=0),
    "adamw, one vector": methods.create("eigendelay", sides=0, predict=False, slack=1, spike=False),
    "without prediction": methods.create("eigendelay", predict=False, stash=True, refresh=1),
}


SIZES = {"in flight": (9, 1, 23, 2, 15), "longer": (30, 1, 4, 15)}


@pytest.mark.parametrize(
    ("name", "sizes"),
    mostly_rare(
        product(OTHERS, SIZES), ("eigendelay", "in flight"), ("eigendelay-stash", "longer"),
        ("adamw and spike", "in flight"),
    ),
)  # fmt: skip
def test_steps_in_bases(name, sizes, leapt):
    """Of gradients whose covariances have full rank (`test_eigendelay`); groups have rates and decays of their own."""

    sizes = SIZES[sizes]

    def factory(params):
        groups = decayed(params).param_groups
        return torch.optim.AdamW([{**group, "eps": 0.01} for group in groups])

    found = []
    for on in (False, True):
        pipe = pipeback.Pipeline(
            network(S, dtype=torch.float64), loss=mse_loss, optimizer=factory, method=OTHERS[name],
            micro_batch_size=16, vectorize=on,
        )  # fmt: skip
        xs, ys = map(torch.cat, zip(*doubles(sum(sizes), samples=16), strict=True))
        losses = []
        for x, y in zip(*(v.split([16 * size for size in sizes]) for v in (xs, ys)), strict=True):
            for s, one in enumerate(pipe.optimizers):
                one.param_groups[0]["lr"] *= 0.9 + 0.01 * s
            losses.append(pipe.push(x, y))
        flying = weights(pipe)
        pipe.drain()
        found.append([torch.stack([loss.double() for loss in losses]), flying, weights(pipe)])
    same(*reversed(found))
    assert sum(leapt) > 30


@pytest.mark.parametrize("case", mostly_rare(OWN, "gap_aware", "dc_asgd-adaptive"))
def test_groups_of_weights_with_updates_of_the_methods_own(case, leapt):
    """Each group has a rate and a decay of its own, and its weights are of several forms."""
    found = []
    for on in (False, True):
        method = CASES[case](S)
        pipe = pipeback.Pipeline(
            model(make=lambda: nn.Sequential(block(), nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 2, 1), nn.Flatten())),
            loss=mse_loss, optimizer=decayed, method=method, micro_batch_size=3, vectorize=on,
        )  # fmt: skip
        found.append(pushed(pipe))
    same(*reversed(found))
    assert sum(leapt) > 30


@pytest.mark.parametrize(
    ("case", "optimizer"),
    [("spectrain-v2", "momentum"), rare("lwp-weight", "adamw"), rare("gap_aware", "momentum"), ("pipeoptim", "adamw")],
)
def test_states_of_shifted_weights_are_taken_up(case, optimizer, leapt):
    """What F used, or the last displacement, goes from one to the other, saved in flight."""
    first, second = (torch.cat(some) for some in zip(*doubles(60), strict=True))
    whole = next(pipelines(case, optimizer))
    whole.push(first, second)
    for kind in (0, 1):
        before, after = (list(pipelines(case, optimizer))[n] for n in (kind, 1))
        before.push(first[:90], second[:90])
        after.load_state_dict(before.state_dict())
        after.push(first[90:], second[90:])
        same([weights(after)], [weights(whole)])
    assert sum(leapt) > 30


def nudged(params):
    """Weights of two kinds, the few first, each with rate and decay of its own."""
    few, many = ([p for p in params if (p.dim() < 2) == low] for low in (True, False))
    groups = [{"params": few, "lr": 0.01}, {"params": many, "weight_decay": 0.01}]
    return torch.optim.SGD([group for group in groups if group["params"]], lr=0.02, momentum=0.9)


def curious(params):
    return torch.optim.Adam(params, lr=0.01, amsgrad=True)


FACTORIES = {**OPTIMIZERS, "nudged": nudged, "decayed": decayed, "curious": curious}


@pytest.mark.parametrize(
    ("method", "changing", "factory"),
    mostly_rare(
        product(["pb", "pipedream", "pipemare"], [False, True], FACTORIES),
        *(("pb", True, name) for name in FACTORIES), ("pb", False, "momentum"), ("pb", False, "decayed"),
    ),
)  # fmt: skip
def test_optimizers_and_rates_of_ticks(method, changing, factory, leapt):
    """Rates that change at every push, so that rows are stepped with different ones."""
    found, factory = [], FACTORIES[factory]
    for on in (False, True):
        pipe = pipeback.Pipeline(
            model(), loss=mse_loss, optimizer=factory, method=CASES[method](S), micro_batch_size=3, vectorize=on
        )

        def slower(n, pipe=pipe):
            for s, optimizer in enumerate(pipe.optimizers):
                optimizer.param_groups[0]["lr"] *= 0.9 + 0.01 * s if changing else 1

        found.append(pushed(pipe, before=slower))
    same(*reversed(found))
    assert (sum(leapt) > 30) == (factory is not curious)


@pytest.mark.parametrize(("sizes", "t1"), diagonal([(3, 2, 9, 1, 30, 20), (50,)], [True, False]), ids=str)
def test_after_a_warm_up(t1, sizes, leapt):
    """The pipeline is emptied once, and filled again; from then on ticks are those of a flowing pipeline."""
    method = methods.create("pipemare", warmup=8, t1=t1, **({"anneal": 6} if t1 else {}))
    one, other = pipelines(method)
    same(pushed(other, sizes), pushed(one, sizes))
    assert sorted(other.ledger) == sorted(one.ledger) and sum(leapt) > 10
    resumed, whole = list(pipelines(method))[1], next(iter(pipelines(method)))
    x, y = (torch.cat(some) for some in zip(*doubles(60), strict=True))
    before = list(pipelines(method))[1]
    before.push(x[:60], y[:60])
    resumed.load_state_dict(before.state_dict())
    resumed.push(x[60:], y[60:])
    whole.push(x, y)
    same([weights(resumed)], [weights(whole)])


@pytest.mark.parametrize("case", ["pipedream", "pipemare"])
def test_adam_where_backwards_run_on_other_weights(case, leapt):
    found = []
    for on in (False, True):
        pipe = pipeback.Pipeline(
            model(), loss=mse_loss, optimizer=decayed, method=CASES[case](S), micro_batch_size=3, vectorize=on
        )
        found.append(pushed(pipe))
    same(*reversed(found))
    assert sum(leapt) > 30


def test_a_loss_of_the_users_own_is_asked_every_time(leapt):
    def loss(output, target):
        loss.calls += loss.counted
        return (1 + loss.calls % 3) / 4 * mse_loss(output, target)

    found = []
    for on in (False, True):
        pipe = pipeback.Pipeline(
            model(), loss=loss, optimizer=OPTIMIZERS["momentum"], method="pb", micro_batch_size=3, vectorize=on
        )
        loss.calls, loss.counted = 0, False  # rehearsals ask it as often as they can in their time
        float(pipe.push(*(v[:3] for v in doubles(1)[0])))
        loss.counted = True
        found.append(pushed(pipe))
    same(*reversed(found))
    assert sum(leapt) > 30


def test_micro_batches_of_two_forms(leapt):
    """Micro-batches of three samples, and one of a single sample among them."""
    found = []
    for pipe in pipelines("pb"):
        xs, ys = map(torch.cat, zip(*doubles(70), strict=True))
        losses = [pipe.push(x, y).double() for x, y in zip(xs.split(103), ys.split(103), strict=True)]
        found.append([torch.stack(losses), weights(pipe)])
    same(*reversed(found))
    assert sum(leapt) > 30


class Louder(nn.Linear):
    """Twice as loud while it trains."""

    def forward(self, x):
        return super().forward(x).tanh() * (2.0 if self.training else 1.0)


def test_the_mode_may_change(leapt):
    """What is in flight keeps the mode that it came with, and what comes is computed in its own."""

    before = []

    def losses(vectorize, modes=(True, False)):
        def switch(n):
            before.append(sum(leapt))
            pipe._engine.model.train(modes[n])

        still = partial(torch.optim.SGD, lr=0.0, momentum=0.9)
        pipe = pipeback.Pipeline(
            model(make=lambda: Louder(6, 6)), loss=mse_loss, optimizer=still, method="pb", micro_batch_size=3,
            vectorize=vectorize,
        )  # fmt: skip
        return pushed(pipe, (30, 30), switch)[0]

    found = losses(True)
    assert before[1] > 2 * S and sum(leapt) - before[1] > 2 * S
    wanted = losses(False)
    same(found[1:], wanted[1:])
    assert not torch.allclose(wanted[1], losses(False, (True, True))[1])


def test_hooks_of_a_subclass_are_asked(leapt):
    class Doubled(Cerebras):
        def forward_weights(self, weights, state, when):
            shift = super().forward_weights(weights, state, when)
            return shift._replace(coefficients=[2 * c for c in shift.coefficients])

    assert described(Cerebras()) and not described(Doubled())
    one, other = pipelines(Doubled())
    same(pushed(other), pushed(one))
    assert not any(leapt)


GROUPS = {
    "pipemare, 3": methods.create("pipemare", anneal=12, micro_batches=3),
    "pipemare, 2, turns": methods.create("pipemare", anneal=12, micro_batches=2, slack=1),
    "xpipe, 2, turns": methods.create("pipeoptim", micro_batches=2),
    "xpipe, 17": methods.create("pipeoptim", slack=2, micro_batches=17),
}


@pytest.mark.parametrize(
    ("name", "optimizer"),
    mostly_rare(
        product(GROUPS, ["sgd", "adamw", "RMSprop"]),
        ("pipemare, 3", "sgd"), ("pipemare, 3", "RMSprop"), ("xpipe, 2, turns", "adamw"),
    ),
)  # fmt: skip
def test_updates_of_several_micro_batches(name, optimizer, leapt):
    """Each stage makes its own, at rates that change and within a tick of the others, with any optimizer."""
    factory = OPTIMIZERS.get(optimizer, partial(torch.optim.RMSprop, lr=0.003))
    found = []
    for on in (False, True):
        pipe = pipeback.Pipeline(
            model(), loss=mse_loss, optimizer=factory, method=GROUPS[name], micro_batch_size=3, vectorize=on
        )

        def slower(n, pipe=pipe):
            for s, one in enumerate(pipe.optimizers):
                one.param_groups[0]["lr"] *= 0.9 + 0.01 * s

        found.append([*pushed(pipe, (9, 1, 23, 2, 40), before=slower), pipe])
    (*wanted, one), (*mine, other) = found
    same(mine, wanted)
    assert sorted(other.ledger) == sorted(one.ledger) and sum(leapt) > 30
