"""An optimizer function gets the user's own parameters, so that it may group them by what it knows of them."""

import copy
from functools import partial

import pytest
import torch
from pytorch_optimizer import Lookahead
from torch import nn
from torch.nn.functional import mse_loss

import pipeback
from tests.laws.cases import data, network
from tests.lightning.cases import weights

WAYS = ("in a set", "noted on them", "identity")


def grouped(model, way, kind=torch.optim.SGD):
    """A function that gives the weights of some layers another rate, which are found in this way."""
    slow = [*model[0].parameters(), *model[3].parameters()]
    members = set(slow)
    for p in slow:
        p.slow = True

    def is_slow(p):
        return {
            "in a set": lambda: p in members,
            "noted on them": lambda: getattr(p, "slow", False),
            "identity": lambda: any(p is q for q in slow),
        }[way]()

    def optimizer(params):
        each = [[p for p in params if is_slow(p) == found] for found in (True, False)]
        return kind([{"params": each[0], "lr": 0.003}, {"params": each[1]}], lr=0.1)

    return optimizer


def plain(model, optimizer, batches):
    made = optimizer(list(model.parameters()))
    for x, y in batches:
        made.zero_grad()
        mse_loss(model(x), y).backward()
        made.step()
    return weights(model)


def piped(model, optimizer, batches, **options):
    with pipeback.Pipeline(model, loss=mse_loss, optimizer=optimizer, **options) as pipe:
        for x, y in batches:
            pipe.push(x, y)
        pipe.drain()
        with pipe.shown():
            return weights(pipe.model)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", [{}, {"stages": 1}, {"workers": 2}, {"store": "host"}], ids=str)
def test_groups_are_those_of_a_plain_loop(way, options):
    model = network()
    wanted = plain(copied := copy.deepcopy(model), grouped(copied, way), data(6, 4))
    assert torch.equal(piped(model, grouped(model, way), data(6, 4), method="sgd", **options), wanted)


@pytest.mark.parametrize("options", [
    {"vectorize": True}, {"replicas": 2}, {"replicas": 2, "masters": True},
    {"store": pipeback.Streaming("host", sparsity="set")},
], ids=str)  # fmt: skip
def test_groups_are_those_by_name(options):
    """With names, no parameter has to be known."""
    names = [name for name, _ in network().named_parameters() if name.startswith(("0.", "3."))]

    def by_name(named_parameters):
        each = [[p for name, p in named_parameters if (name in names) == slow] for slow in (True, False)]
        return torch.optim.SGD([{"params": each[0], "lr": 0.003}, {"params": each[1]}], lr=0.1)

    def build():
        return network().bfloat16() if options.get("masters") else network().double()

    model, batches = (
        build(),
        [(x.to(next(build().parameters())), y.to(next(build().parameters()))) for x, y in data(8, 4)],
    )
    found = piped(model, grouped(model, "in a set"), batches, method="pb", **options)
    assert torch.equal(found, piped(build(), by_name, batches, method="pb", **options))


def test_state_that_an_optimizer_begins_with():
    """Adagrad has its sums from the beginning, and those of masters are masters, too."""
    adagrad = partial(torch.optim.Adagrad, initial_accumulator_value=0.5)
    model = network()
    wanted = plain(copied := copy.deepcopy(model), grouped(copied, "in a set", adagrad), data(6, 4))
    assert torch.equal(piped(model, grouped(model, "in a set", adagrad), data(6, 4), method="sgd"), wanted)
    pipe = pipeback.Pipeline(
        network().bfloat16(), loss=mse_loss, optimizer=partial(adagrad, lr=0.1), method="pb", masters=True
    )
    state = pipe.optimizers[0].state
    assert all(state[w]["sum"].dtype == torch.float32 for w in pipe.optimizers[0].param_groups[0]["params"])


class Keeps(torch.optim.SGD):
    """An optimizer that holds its parameters in places of its own."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        first = [p for group in self.param_groups for p in group["params"]]
        self.mine, self.pair, self.limits = first, tuple(first[:1]), {p: float(p.abs().max()) + 0.02 for p in first}

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for p in (*self.mine, *self.pair):
            p.clamp_(-self.limits[p], self.limits[p])


@pytest.mark.parametrize(
    "kind",
    [lambda groups, lr: Lookahead(torch.optim.SGD(groups, lr=lr), k=2), Keeps],
    ids=["around another", "of its own"],
)
@pytest.mark.parametrize("options", [{}, {"store": "host"}], ids=str)
def test_optimizers_that_hold_parameters_elsewhere(kind, options):
    model = network()
    wanted = plain(copied := copy.deepcopy(model), grouped(copied, "identity", kind), data(8, 4))
    found = piped(model, grouped(model, "identity", kind), data(8, 4), method="sgd", **options)
    assert torch.equal(found, wanted) and not torch.equal(found, weights(network()))


def test_lists_of_the_users_stay_as_they_are():
    model = network()
    noted = list(model.parameters())

    class Notes(Keeps):
        def __init__(self, params, lr):
            super().__init__(params, lr)
            self.noted, self.by_name = noted, {"all": noted}

    pipe = pipeback.Pipeline(model, loss=mse_loss, optimizer=lambda params: Notes(params, 0.1), method="sgd")
    assert all(p is q for p, q in zip(noted, model.parameters(), strict=True))
    mine = {id(w) for optimizer in pipe.optimizers for group in optimizer.param_groups for w in group["params"]}
    for optimizer in pipe.optimizers:
        assert optimizer.noted is optimizer.by_name["all"]
        assert any(id(w) in mine for w in optimizer.noted) == bool(next(iter(optimizer.mine)).numel())


def test_a_stage_without_weights():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Identity(), nn.Linear(6, 6))
    wanted = plain(copied := copy.deepcopy(model), grouped(copied, "noted on them"), data(6, 4))
    assert torch.equal(piped(model, grouped(model, "noted on them"), data(6, 4), method="sgd"), wanted)
