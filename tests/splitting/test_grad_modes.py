"""A forward that asks whether autograd records computes as in a plain loop, trained, evaluated and resumed."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import pipeback


def told_by_torch(h):
    return torch.relu(h) if torch.is_grad_enabled() else h


def told_by_a_tensor(h):
    return h * 2 if h.requires_grad else h


def told_by_a_graph(h):
    return h * 2 if h.grad_fn is not None else h


def told_by_inference_mode(h):  # in which nothing of a pipeline is computed
    return h if torch.is_inference_mode_enabled() else torch.relu(h)


def told_in_training_alone(h):  # as many models do before they use torch.utils.checkpoint
    return checkpoint(torch.relu, h, use_reentrant=False) if torch.is_grad_enabled() else torch.relu(h)


ASKING = [told_by_torch, told_by_a_tensor, told_by_a_graph, told_by_inference_mode, told_in_training_alone]


class Asking(nn.Module):
    def __init__(self, asked):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.asked = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), asked

    def forward(self, x):
        return self.c(self.asked(self.b(torch.tanh(self.a(x)))))


DATA = list(zip(*torch.randn(2, 4, 6, 4, generator=torch.Generator().manual_seed(1)), strict=True))


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def built(model, **options):
    return pipeback.Pipeline(
        model, loss=mse_loss, optimizer=sgd, example=DATA[0][0], **{"method": "sgd", "stages": "layer", **options}
    )


def evaluated(model, x):
    """As `evaluate` does it, without dropout and the like."""
    mode = model.training
    with torch.no_grad():
        found = model.eval()(x)
    model.train(mode)
    return found


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("asked", ASKING)
def test_evaluation_between_pushes(asked, mode):
    model = Asking(asked).train(mode)
    plain, pipe = copy.deepcopy(model), built(model)
    optimizer = sgd(plain.parameters())
    for x, y in DATA:
        assert torch.equal(pipe.evaluate(x), evaluated(plain, x))
        loss = mse_loss(plain(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert torch.equal(pipe.push(x, y), loss.detach())
    assert all(map(torch.equal, pipe.model.parameters(), plain.parameters()))


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("options", [{}, {"activations": "recompute"}, {"workers": 2}])
def test_micro_batches_in_flight_when_it_is_evaluated_and_resumed(options, mode):
    pipes = [built(Asking(told_by_torch).train(mode), method="pb", **options) for _ in range(3)]
    watched, plain, resumed = pipes
    for n, (x, y) in enumerate(DATA):
        for pipe in pipes[:2]:
            pipe.push(x, y)
        if n < 2:
            given = watched.evaluate(x[:3])
            assert torch.equal(given, evaluated(watched.model, x[:3]))
        if n == 2:
            resumed.load_state_dict(watched.state_dict())
            resumed.push(*DATA[3])
    for pipe in pipes:
        pipe.drain()
    for other in (plain, resumed):
        assert all(map(torch.equal, watched.model.parameters(), other.model.parameters()))
    assert torch.equal(resumed.evaluate(DATA[0][0]), evaluated(resumed.model, DATA[0][0]))


@pytest.mark.parametrize("asked", [lambda h: h[..., 1:9], lambda h: h[::2, 1:9], lambda h: h[..., 1:2].expand(-1, 8)])
def test_evaluation_of_a_slice_on_an_odd_place(asked):
    """torch computes with such a slice by other kernels than with a copy of it, whose last bits are others."""
    torch.manual_seed(0)
    model = Asking(asked)
    model.a, model.b, model.c = nn.Linear(4, 16), nn.Linear(16, 16), nn.Linear(8, 4)
    pipe = built(model)
    for x, _ in DATA:
        assert torch.equal(pipe.evaluate(x), evaluated(pipe.model, x))
