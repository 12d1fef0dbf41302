"""Groups by name: those of the user's model, in every runtime, with the bits of a plain loop that groups alike."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipeback
from tests.laws.cases import data, network
from tests.lightning.cases import Regression, loader, strategy, trainer, weights


class Residual(nn.Module):
    """Is followed; one weight is used twice, and one is frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.last.weight
        self.first.bias.requires_grad_(False)

    def forward(self, x):
        return self.tied(x + self.last(self.norm(self.first(x))))


def by_name(named_parameters, kind=torch.optim.SGD):
    """Every name has a rate of its own, so that a wrong name gives other weights."""
    return kind([{"params": [p], "lr": 0.002 * len(name), "weight_decay": 0.1 * ("bias" in name)}
                 for name, p in named_parameters], lr=1.0)  # fmt: skip


class Called:
    def __call__(self, named):
        return by_name(named)


def plain(model, batches, kind=torch.optim.SGD):
    optimizer = by_name([(n, p) for n, p in model.named_parameters() if p.requires_grad], kind)
    for x, y in batches:
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
    return weights(model)


def piped(model, batches, optimizer=by_name, **options):
    given = {"loss": mse_loss, "optimizer": optimizer, "method": "sgd", **options}
    with pipeback.Pipeline(model, **given) as pipe:
        for x, y in batches:
            pipe.push(x, y)
        pipe.drain()
        with pipe.shown():
            return weights(pipe.model)


FOLLOWED = {"stages": "layer", "example": torch.randn(4, 6)}


@pytest.mark.parametrize("factory", [by_name, Called(), partial(by_name, kind=torch.optim.SGD)], ids=type)
@pytest.mark.parametrize(
    ("build", "options"),
    [(network, {}), (network, {"stages": 2}), (Residual, FOLLOWED)],
    ids=["", "joined", "followed"],
)
def test_names_are_those_of_the_model(build, options, factory):
    model = build()
    wanted = plain(copy.deepcopy(model), data(6, 4))
    assert torch.equal(piped(model, data(6, 4), factory, **options), wanted)


@pytest.mark.parametrize("options", [
    {"workers": 2}, {"store": "host"}, {"vectorize": "auto"}, {"masters": True}, {"compile": {"backend": "eager"}},
    {"store": pipeback.Streaming(sparsity="set")}, {"activations": "recompute"},
], ids=str)  # fmt: skip
def test_every_runtime(options):
    """Equal groups that are made without names give equal bits."""
    count = iter([name for name, _ in network().named_parameters()] * 2)

    def counted(params):
        return by_name([("" if p.numel() == 0 else next(count), p) for p in params])

    found = piped(network(), data(12), method="pb", **options)
    assert torch.equal(found, piped(network(), data(12), counted, method="pb", **options))


def test_replicas():
    assert torch.isfinite(piped(network(), data(8, 4), method="pb", replicas=2)).all()
    wanted = plain(network(), data(8, 4))
    torch.testing.assert_close(piped(network(), data(8, 4), replicas=2), wanted, rtol=1e-5, atol=1e-6)


def test_stages_without_weights_and_adam():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    wanted = plain(copy.deepcopy(model), data(6, 4), torch.optim.Adam)
    assert torch.equal(piped(model, data(6, 4), partial(by_name, kind=torch.optim.Adam)), wanted)


def test_torchs_optimizers_take_the_pairs_and_a_state_resumes():
    def optimizer(named_parameters):
        return torch.optim.SGD(named_parameters, lr=0.05, momentum=0.9)

    def build():
        return pipeback.Pipeline(network(), loss=mse_loss, optimizer=optimizer, method="pb")

    pipe, other, batches = build(), build(), data(12)
    for x, y in batches[:6]:
        pipe.push(x, y)
    assert pipe.optimizers[0].param_groups[0]["param_names"] == ["0.0.weight", "0.0.bias"]
    other.load_state_dict(pipe.state_dict())
    for x, y in batches[6:]:
        assert torch.equal(pipe.push(x, y), other.push(x, y))
    unnamed = piped(network(), batches, lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9), method="pb")
    pipe.drain()
    assert torch.equal(weights(pipe.model), unnamed)


def test_the_method_is_chosen_by_what_it_gives():
    with pytest.warns(UserWarning, match='method="pipedream" is taken'):
        pipe = pipeback.Pipeline(network(), loss=mse_loss, optimizer=partial(by_name, kind=torch.optim.Adam))
    pipe.push(*data(1)[0])


def test_groups_by_name_under_lightning():
    class Grouped(Regression):
        def configure_optimizers(self):
            return by_name(self.named_parameters())

    plainly, ours = Grouped(), Grouped()
    trainer().fit(plainly, loader())
    trainer(strategy("sgd")).fit(ours, loader())
    assert torch.equal(weights(plainly), weights(ours))


def test_what_is_not_asked_for():
    def unnamed(params):
        return torch.optim.SGD([p for name, p in params if "bias" in name], lr=0.1)

    def pairs(named):
        return torch.optim.SGD([p for p in named if p.requires_grad], lr=0.1)

    with pytest.raises(
        TypeError, match=r"stage 0: the optimizer function failed: .*unpack.*write optimizer=lambda named"
    ):
        piped(network(), data(1), unnamed)
    with pytest.raises(
        TypeError, match=r"named has pairs \(name, parameter\); .* write optimizer=lambda params: \.\.\."
    ):
        piped(network(), data(1), pairs)
    piped(network(), data(1), lambda named_parameters: torch.optim.SGD([p for _, p in named_parameters], lr=0.1))
    piped(network(), data(1), lambda params: torch.optim.SGD([p for p in params if p.requires_grad], lr=0.1))
