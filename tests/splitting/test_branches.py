"""Decisions by values of the input: a micro-batch for which a forward takes another branch is traced along it, too."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from pipeback import Pipeline


class Padded(nn.Module):
    """Layers that multiply by the mask, but where nothing is padded; then one value less crosses the boundaries."""

    def __init__(self, layers=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))

    def forward(self, x, mask):
        mask = None if (mask == 1).all() else mask.unsqueeze(-1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if mask is not None:
                x = x * mask
        return x


class Asks(nn.Module):
    """Decides by what `ask` gives for its input."""

    def __init__(self, ask, where="input"):
        super().__init__()
        self.first, self.last, self.ask, self.where = nn.Linear(4, 4), nn.Linear(4, 4), ask, where

    def forward(self, x):
        number = self.ask(x) if self.where == "input" else 0
        x = self.first(x)
        if self.where != "input":
            number = self.ask(x)
        return self.last(x) * number


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def batches(count=12, samples=2):
    """Every third one has padding."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for n in range(count):
        mask = torch.ones(samples, 4)
        if n % 3 == 1:
            mask[0, 2:] = 0
        x, y = torch.randn(2, samples, 4, 4, generator=generator)
        found.append(((x, mask), y))
    return found


def padded():
    torch.manual_seed(0)
    return Padded()


def piped(method, data, example=0, **options):
    return Pipeline(padded(), loss=mse_loss, optimizer=sgd, method=method, example=data[example][0], stages="layer",
                    **options)  # fmt: skip


@pytest.mark.parametrize("example", [0, 1], ids=["whole first", "padded first"])
def test_both_ways_have_plain_training_s_bits(example):
    data, model = batches(), padded()
    pipe, optimizer = piped("sgd", data, example), sgd(model.parameters())
    for x, y in data:
        assert torch.equal(pipe.evaluate(x), model(*x))
        loss = mse_loss(model(*x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(pipe.push(x, y), loss)
    assert all(map(torch.equal, pipe.model.parameters(), model.parameters()))


@pytest.mark.parametrize("options", [{"workers": 2}, {"store": "host"}, {"activations": "recompute"}], ids=str)
def test_both_ways_in_flight_at_once(options):
    """Of pipelines that differ in their runtime, and in which way came first."""
    data, found = batches(), []
    method = "pb" if "activations" not in options else "pipedream"
    for more, example in (({}, 0), (options, 1)):
        pipe = piped(method, data, example, **more)
        losses = [float(pipe.push(x, y)) for x, y in data]
        found.append([torch.tensor(losses), *copy.deepcopy(pipe.model).parameters()])
        pipe.close()
    assert all(map(torch.equal, *found))


def test_micro_batches_of_a_push_go_their_own_ways():
    data, found = batches(6, samples=1), []
    for size in (None, 1):
        pipe = piped("pb", data, micro_batch_size=size)
        if size is None:
            for x, y in data:
                pipe.push(x, y)
        else:
            x = tuple(torch.cat([x[n] for x, _ in data]) for n in (0, 1))
            pipe.push(x, torch.cat([y for _, y in data]))
        pipe.drain()
        found.append(list(pipe.model.parameters()))
    assert all(map(torch.equal, *found))


def test_a_state_with_both_in_flight_is_taken_up_by_a_pipeline_that_has_seen_one():
    data = batches(15)
    pipe = piped("pb", data)
    for x, y in data[:9]:
        pipe.push(x, y)
    state = pipe.state_dict()
    other = piped("pb", data, example=1)
    other.load_state_dict(state)
    for x, y in data[9:]:
        assert torch.equal(pipe.push(x, y), other.push(x, y))
    assert all(map(torch.equal, pipe.model.parameters(), other.model.parameters()))


def test_ways_without_end_are_refused():
    x = torch.randn(2, 4)
    pipe = Pipeline(
        Asks(lambda x: x.mean().item()), loss=mse_loss, optimizer=sgd, method="pb", stages="layer", example=x
    )
    with pytest.raises(ValueError, match=r"Asks.forward has taken 64 branches .* item gave [-\d.]+; keep decisions"):
        for _ in range(70):
            pipe.push(torch.randn(2, 4), x)
    pipe.push(x, x)  # nothing has happened


def test_what_a_layer_gives_is_decided_by_within_a_layer():
    pipe = Pipeline(
        Asks(lambda x: 1 if x.sum() > 0 else 2, "first"), loss=mse_loss, optimizer=sgd, method="pb", stages="layer",
        example=torch.randn(2, 4),
    )  # fmt: skip
    with pytest.raises(Exception, match="Asks.forward takes another branch for this micro-batch: __bool__ gave"):
        for n in range(20):
            x = torch.randn(2, 4, generator=torch.Generator().manual_seed(n)) * 10
            pipe.push(x, x)


def test_what_was_pushed_is_not_changed_by_asking():
    def ask(x):
        copy = x.clone()
        copy[0, 0] = 0
        x.add_(1)
        copy += 1
        return 1 if copy.sum() > 0 else 2

    x = torch.zeros(2, 4)
    model = Asks(ask)
    pipe = Pipeline(model, loss=mse_loss, optimizer=sgd, method="pb", stages="layer", example=x)
    pipe.push(x, x)
    pipe.push(x, x)
    assert not x.any()
