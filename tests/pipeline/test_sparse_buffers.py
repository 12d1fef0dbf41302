"""Sparse tensors of a model: buffers, such as the adjacencies of graph networks, and what one layer hands the next."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipeback
from pipeback import checkpoint
from tests.lightning import ranks as lightning_ranks
from tests.lightning.cases import Regression
from tests.processes.crew import Crew

FORMS = ["to_sparse", "to_sparse_csr"]
WAYS = [{}, {"workers": 2}, {"store": "host"}, {"store": "disk"}, {"activations": "host"}, {"replicas": 2},
        {"stages": "layer", "example": torch.zeros(4, 6)}]  # fmt: skip


class Neighbours(nn.Module):
    """Each feature becomes the sum of its neighbours', then a linear layer."""

    def __init__(self, form):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("adjacency", getattr(torch.eye(6) + torch.eye(6).roll(1, 0), form)())

    def forward(self, x):
        return self.linear((self.adjacency @ x.T).T)


class Thinned(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.linear, self.form = nn.Linear(6, 6), form

    def forward(self, x):
        return getattr(self.linear(x).relu(), self.form)()


class Filled(nn.Module):
    def forward(self, x):
        return x.to_dense()


def graph(form):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), Neighbours(form), nn.Tanh(), Neighbours(form))


def handing(form):
    torch.manual_seed(0)
    return nn.Sequential(Thinned(form), Filled(), nn.Linear(6, 6))


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def batches(count=6):
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(2, 4, 6, generator=generator)) for _ in range(count)]


def plain(model):
    optimizer, losses = sgd(model.parameters()), []
    for x, y in batches():
        loss = mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def built(model, method="sgd", **options):
    return pipeback.Pipeline(model, loss=mse_loss, optimizer=sgd, method=method, **options)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: str(list(way)))
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", [graph, handing])
def test_a_synchronous_method_has_plain_training_s_losses(model, form, way, tmp_path):
    given = {**way, "store": f"disk:{tmp_path}"} if way.get("store") == "disk" else way
    with built(model(form), **given) as pipe:
        found = [torch.as_tensor(float(pipe.push(x, y))) for x, y in batches()]
    wanted = plain(model(form))
    if "replicas" in way:  # the mean of two means
        torch.testing.assert_close(found, wanted)
    else:
        assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", [graph, handing])
def test_a_state_with_micro_batches_in_flight_goes_on(model, form, tmp_path):
    pipe, other = built(model(form), "pb"), built(model(form), "pb")
    for x, y in batches(3):
        pipe.push(x, y)
    checkpoint.save(pipe, tmp_path / "saved")
    checkpoint.load(other, tmp_path / "saved")
    for x, y in batches()[3:]:
        assert torch.equal(pipe.push(x, y), other.push(x, y))
    pipe.drain()
    other.drain()
    assert all(map(torch.equal, pipe.model.parameters(), other.model.parameters()))


def of_ranks(model, form, **options):
    pipe = built(model(form), "pb", workers=pipeback.Processes(timeout=20.0), **options)
    for x, y in batches():
        n = pipe.ranks.replica
        pipe.push(*((x, y) if pipe.replicas == 1 else (x.chunk(2)[n], y.chunk(2)[n])))
    pipe.drain()
    found = [p.detach().clone() for p in pipe.model.parameters()]
    pipe.close()
    return found


@pytest.fixture(scope="module")
def crew():
    with Crew(2) as crew:
        yield crew


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("replicas", [1, 2])
def test_ranks(crew, form, replicas):
    with built(graph(form), "pb", replicas=replicas) as pipe:
        for x, y in batches():
            pipe.push(x, y)
        pipe.drain()
        wanted = [p.detach().clone() for p in pipe.model.parameters()]
    for found in crew.ranks(2).run(of_ranks, graph, form, replicas=replicas):
        assert all(map(torch.equal, found, wanted))


def fit(form, devices):
    return lightning_ranks.result("pb", devices, module=lambda: Regression(graph(form)))


@pytest.mark.parametrize("form", FORMS)
def test_devices_of_lightning(crew, form):
    wanted = fit(form, 1)
    for found in crew.ranks(2).run(fit, form, 2):
        assert all(torch.equal(found["weights"][k].to_dense(), v.to_dense()) for k, v in wanted["weights"].items())
    crew.again()
