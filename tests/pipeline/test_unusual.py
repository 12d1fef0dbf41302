"""Modules and losses that are written in an unusual way train as plain torch does, bit for bit."""

import pytest
import torch
from torch import nn

import pipeback
from tests.laws.cases import data, everything, network, pipeline

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")


class ByKeyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.group, self.batch, self.linear = (
            nn.LayerNorm(6), nn.GroupNorm(2, 6), nn.BatchNorm1d(6), nn.Linear(6, 6),
        )  # fmt: skip

    def forward(self, x):
        return self.linear(input=self.batch(input=self.group(input=self.norm(input=x))))


class Expanded(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("row", torch.arange(6.0).expand(3, 6))
        self.register_buffer("ones", torch.ones(1).expand(6))
        self.register_buffer("calls", torch.zeros(1).expand(4))

    def forward(self, x):
        self.calls = self.calls + 1
        return self.linear(x) * self.ones + self.row[1]


class Force(nn.Module):
    """The gradient of an energy, as the forces of an atomistic model are."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            return torch.autograd.grad(self.linear(x).tanh().sum(), x, create_graph=True)[0]


def penalised(output, target):
    """With a penalty on the gradient of the squared error."""
    error = (output - target) ** 2
    (gradient,) = torch.autograd.grad(error.sum(), output, create_graph=True)
    return error.mean() + 0.1 * (gradient**2).mean()


MODELS = {
    "keyword": lambda: nn.Sequential(ByKeyword(), nn.Tanh(), nn.Linear(6, 6)),
    "expanded": lambda: nn.Sequential(Expanded(), nn.Tanh(), Expanded()),
    "force": lambda: nn.Sequential(nn.Linear(6, 6), Force(), nn.Linear(6, 6)),
    "penalty": lambda: network(3),
}


def built(name, method, optimizer=lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9), **options):
    torch.manual_seed(0)
    loss = penalised if name == "penalty" else nn.functional.mse_loss
    return pipeback.Pipeline(MODELS[name](), loss=loss, optimizer=optimizer, method=method, **options)


@pytest.mark.parametrize("name", MODELS)
def test_as_plain_torch(name):
    pipe = built(name, "sgd")
    torch.manual_seed(0)
    model = MODELS[name]()
    loss = penalised if name == "penalty" else nn.functional.mse_loss
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for x, y in data(8, samples=20):
        optimizer.zero_grad()
        wanted = loss(model(x), y)
        wanted.backward()
        optimizer.step()
        assert pipe.push(x, y).item() == wanted.item()
    assert all(torch.equal(v, pipe.model.state_dict()[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("options", [{"workers": 2}, {"activations": "recompute"}, {"activations": "host"}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_every_runtime_and_a_state_in_flight(name, options):
    method = "pipedream" if options.get("activations") == "recompute" else "pb"
    found = []
    for other in ({}, options):
        pipe = built(name, method, **other)
        for n, (x, y) in enumerate(data(9, samples=20)):
            if n == 5:
                state = pipe.state_dict()
                pipe.close()
                pipe = built(name, method, **other)
                pipe.load_state_dict(state)
            pipe.push(x, y)
        pipe.drain()
        found.append(everything(pipe))
        pipe.close()
    assert torch.equal(*found)


def test_a_normalisation_of_one_value_called_by_keyword():
    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(1)

        def forward(self, x):
            return self.norm(input=x[..., None])[..., 0]

    with pytest.warns(UserWarning, match="LayerNorm 'norm' normalises over a single value"):
        pipeline(nn.Sequential(One(), nn.Linear(6, 6)), "pb").push(*data(1)[0])


def test_a_shorter_micro_batch_of_a_loss_that_differentiates():
    pipe = built("penalty", "pb", micro_batch_size=4)
    assert torch.isfinite(pipe.push(*data(1, samples=6)[0]))


# -- sparse gradients ----------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "sparse adam": lambda p: (torch.optim.SparseAdam if len(p) == 1 else torch.optim.Adam)(p, lr=0.01),
}


def table(sparse=True):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(9, 6, sparse=sparse), nn.Sequential(nn.Flatten(), nn.Linear(18, 6)), nn.Linear(6, 6)
    ).double()


def indices(count=10, samples=4):
    generator = torch.Generator().manual_seed(1)
    draw = lambda: torch.randn(samples, 6, generator=generator, dtype=torch.float64)  # noqa: E731
    return [(torch.randint(0, 9, (samples, 3), generator=generator), draw()) for _ in range(count)]


def pushed(optimizer, method="sgd", sparse=True, **options):
    pipe = pipeback.Pipeline(
        table(sparse), loss=nn.functional.mse_loss, optimizer=OPTIMIZERS[optimizer], method=method, **options
    )
    for x, y in indices():
        pipe.push(x, y)
    pipe.drain()
    found = torch.cat([v.flatten() for v in pipe.model.state_dict().values()])
    pipe.close()
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_sparse_gradients_as_plain_torch(optimizer):
    model = table()
    optimizers = [OPTIMIZERS[optimizer](list(layer.parameters())) for layer in model]
    for x, y in indices():
        for one in optimizers:
            one.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        for one in optimizers:
            one.step()
    wanted = torch.cat([v.flatten() for v in model.state_dict().values()])
    for options in ({}, {"workers": 2}, {"store": "host"}, {"clip_norm": 1e9}, {"activations": "recompute"}):
        assert torch.equal(pushed(optimizer, **options), wanted), options
    # the same sums in another order
    assert (pushed(optimizer, clip_norm=pipeback.Clipping(value=1e9)) - wanted).abs().max() < 1e-12
    assert (pushed(optimizer, replicas=2) - wanted).abs().max() < 1e-12
    assert (pushed(optimizer, "gpipe", micro_batch_size=2) - wanted).abs().max() < 1e-12


@pytest.mark.parametrize("method", ["pb", "cerebras", "lwp", "sc", "spectrain", "pipedream"])
def test_sparse_gradients_of_every_method(method):
    whole = pushed("momentum", method, sparse=False)
    assert (pushed("momentum", method) - whole).abs().max() < 1e-12
    assert (pushed("momentum", method, clip_norm=pipeback.Clipping(value=0.01)) - whole).abs().max() > 1e-6


def test_a_state_with_sparse_sums():
    options = {"method": pipeback.methods.create("gpipe", micro_batches=3), "loss": nn.functional.mse_loss}
    found = []
    for again in (False, True):
        pipe = pipeback.Pipeline(table(), optimizer=OPTIMIZERS["momentum"], **options)
        for n, (x, y) in enumerate(indices()):
            if n == 5 and again:
                state = pipe.state_dict()
                pipe = pipeback.Pipeline(table(), optimizer=OPTIMIZERS["momentum"], **options)
                pipe.load_state_dict(state)
            pipe.push(x, y)
        pipe.drain()
        found.append(torch.cat([v.flatten() for v in pipe.model.state_dict().values()]))
    assert torch.equal(*found)
