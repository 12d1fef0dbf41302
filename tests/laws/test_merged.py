"""Law: one call of a method's hooks over all stages of a wave has the bits of a call per stage."""

import pytest
import torch
from torch.nn.functional import mse_loss

from pipeback import Pipeline, chain, methods
from pipeback.methods.pipedream import PipeDream
from pipeback.methods.spectrain import SpecTrain
from tests.laws.cases import OPTIMIZERS, data, everything
from tests.laws.test_strips import odd

PIPEMARE = {
    "pipemare": lambda: methods.create("pipemare", anneal=9),
    "without T1": lambda: methods.create("pipemare", t1=False),
    "without T2": lambda: methods.create("pipemare", anneal=9, t2=False),
    "half the delay": lambda: methods.create("pipemare", anneal=9, slack=1),
    "in a chain": lambda: chain(methods.create("pipemare", anneal=9), methods.create("sc")),
}
SGD = torch.optim.SGD


def groups(ps):
    """Two weights of a stage have other rates and momenta."""
    return SGD([{"params": [p], "lr": 0.01 / (n + 1), "momentum": 0.5 + n / 5} for n, p in enumerate(ps)], lr=1.0)


MORE = {
    "nesterov": lambda ps: SGD(ps, lr=0.02, momentum=0.9, nesterov=True),
    "fused": lambda ps: SGD(ps, lr=0.02, momentum=0.9, fused=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.003),
}


def trained(method, optimizer, drained=11, loaded=None):
    pipe = Pipeline(odd(), loss=mse_loss, optimizer=optimizer, method=method)
    for n, (x, y) in enumerate(data(19)):
        if n == drained:
            pipe.drain()
        if n == loaded:
            pipe.load_state_dict(pipe.state_dict())
        pipe.push(x, y)
    return everything(pipe)


def alike(make, optimizer):
    together, apart = make(), make()
    assert together.merges
    apart.merges = False
    assert torch.equal(trained(together, optimizer), trained(apart, optimizer))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", PIPEMARE)
def test_each_stage_has_its_own_rate_delay_and_count(case, optimizer):
    alike(PIPEMARE[case], OPTIMIZERS[optimizer])


@pytest.mark.parametrize(("inner", "options"), [("msnag", {}), ("pipemare", {"anneal": 5})])
def test_in_a_chain_around_what_reads_rates_or_moves_of_weights(inner, options):
    alike(lambda: chain(PIPEMARE["pipemare"](), methods.create(inner, **options)), OPTIMIZERS["momentum"])


@pytest.mark.parametrize("optimizer", [*MORE.values(), groups], ids=[*MORE, "groups"])
def test_with_any_optimizer(optimizer):
    alike(PIPEMARE["pipemare"], optimizer)


def test_a_state_that_is_loaded_between():
    """What a method keeps lies no longer beside the weights then."""
    make, momentum = PIPEMARE["pipemare"], OPTIMIZERS["momentum"]
    assert torch.equal(trained(make(), momentum, loaded=7), trained(make(), momentum))


class Asked(PipeDream):
    """Is asked for the weights of every B, since the correction of its base does not hold for an override."""

    def backward_weights(self, weights, used, state, when):
        return super().backward_weights(weights, used, state, when)


class AskedToo(SpecTrain):
    def backward_weights(self, weights, used, state, when):
        return super().backward_weights(weights, used, state, when)


@pytest.mark.parametrize(
    ("one", "other"),
    [(PipeDream, Asked), (lambda: PipeDream(slack=2), lambda: Asked(slack=2)),
     (lambda: SpecTrain(version=2), lambda: AskedToo(version=2))],
)  # fmt: skip
def test_backwards_on_what_forwards_used_need_not_ask(one, other):
    momentum = OPTIMIZERS["momentum"]
    assert torch.equal(trained(one(), momentum), trained(other(), momentum))
