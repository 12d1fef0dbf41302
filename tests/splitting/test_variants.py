"""Micro-batches that differ in what is pushed beside their tensors, or in tensors that only early stages take."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipeback


class Scaled(nn.Module):
    """A mask that the first stage alone takes, and a number that later ones compute with."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third, self.last = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x, mask=None, scale=1.0):
        h = torch.tanh(self.first(x))
        if mask is not None:
            h = h.masked_fill(mask[:, None], 0.0)
        h = h + torch.relu(self.second(h)) * scale
        h = torch.tanh(self.third(h))
        return self.last(h if mask is None else h * 2)


MASK = torch.tensor([True, False, True, False, False])
NUMBERS = [{"scale": 1.0}, {"scale": 2.0}]
MASKS = [{"mask": MASK, "scale": 2.0}, {}, {"scale": 2.0}, {"mask": MASK}]


def batches(ways, count=12):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, count, 5, 4, generator=generator)
    return [({"x": x[n], **ways[n % len(ways)]}, y[n]) for n in range(count)]


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def built(method, example, **options):
    return pipeback.Pipeline(
        Scaled(), loss=mse_loss, optimizer=sgd, method=method, stages="layer", example=example, **options
    )


@pytest.mark.parametrize("options", [{}, {"workers": 2}], ids=str)
@pytest.mark.parametrize("ways", [NUMBERS, MASKS, MASKS[::-1]], ids=["numbers", "masks", "masks reversed"])
def test_plain_training(ways, options):
    data, model = batches(ways), Scaled()
    pipe, optimizer = built("sgd", data[0][0], **options), sgd(model.parameters())
    for x, y in data:
        assert torch.equal(pipe.evaluate(x), model(**x))
        loss = mse_loss(model(**x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert pipe.push(x, y).item() == loss.item()
    pipe.drain()
    assert all(map(torch.equal, pipe.model.parameters(), model.parameters()))


@pytest.mark.parametrize("at", [5, 6, 7, 8])
@pytest.mark.parametrize("ways", [NUMBERS, MASKS], ids=["numbers", "masks"])
def test_a_state_is_taken_up_by_a_pipeline_that_has_seen_another_form(ways, at):
    data = batches(ways)
    pipe = built("pb", data[0][0])
    for x, y in data[:at]:
        pipe.push(x, y)
    state = copy.deepcopy(pipe.state_dict())
    for example in range(len(ways)):
        other = built("pb", data[example][0])
        other.load_state_dict(state)
        pipe.load_state_dict(state)
        for x, y in data[at:]:
            assert torch.equal(pipe.push(x, y), other.push(x, y))
            assert torch.equal(pipe.evaluate(x), other.evaluate(x))
        assert all(map(torch.equal, pipe.model.parameters(), other.model.parameters()))
