"""A module with two names that two stages call: its weights are one, owned by the first and lent to the second."""

import copy
import time
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipeback
from pipeback import Pipeline

from .plain_training import equals_plain_training


class Twice(nn.Module):
    """One embedding for two sequences, with a layer between the two calls."""

    def __init__(self, again):
        super().__init__()
        self.again, self.middle, self.last = again, nn.Linear(4, 4), nn.Linear(4, 4)
        self.once_more = again

    def forward(self, a, b):
        return self.last(self.middle(self.again(a)) + self.once_more(b))


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def batches(count=8):
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(3, 3, 4, generator=generator)).unbind() for _ in range(count)]


def test_it_is_one_weight_with_plain_training_s_bits():
    torch.manual_seed(0)
    plain = Twice(nn.Linear(4, 4))
    model = copy.deepcopy(plain)
    data = batches()
    pipe = Pipeline(model, loss=mse_loss, optimizer=sgd, method="sgd", stages="layer", example=data[0][:2])
    assert [len(opt.param_groups[0]["params"]) for opt in pipe.optimizers] == [2, 2, 2]
    optimizer = sgd(plain.parameters())
    for a, b, y in data:
        loss = mse_loss(plain(a, b), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(pipe.push((a, b), y), loss)
    for name, value in plain.state_dict().items():
        assert torch.equal(pipe.model.state_dict()[name], value), name


@pytest.mark.parametrize("method", ["pb", "cerebras", "pipedream", "spectrain"])
def test_any_number_of_threads_has_equal_bits(method):
    found = []
    for workers in (None, 2):
        torch.manual_seed(0)
        data = batches(12)
        pipe = Pipeline(
            Twice(nn.Linear(4, 4)), loss=mse_loss, optimizer=sgd, method=method, stages="layer", example=data[0][:2],
            workers=workers,
        )  # fmt: skip
        losses = torch.stack([torch.as_tensor(float(pipe.push((a, b), y))) for a, b, y in data])
        found.append([losses, *pipe.model.state_dict().values()])
        pipe.close()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Slow(nn.Linear):
    """Takes a while, in which nobody else may set its weights."""

    def forward(self, x):
        before = self.weight
        time.sleep(0.003)
        assert self.weight is before
        return super().forward(x)


class SlowTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.slow, self.middle, self.last = Slow(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.slow(self.middle(self.slow(x)).tanh()))


def test_two_threads_are_in_it_at_once():
    found = []
    for workers in (None, 2):
        torch.manual_seed(0)
        pipe = Pipeline(
            SlowTwice(), loss=mse_loss, optimizer=sgd, method="pb", example=torch.zeros(3, 4), workers=workers,
            stages=pipeback.Splitting("layer", leaves=["slow"]),
        )  # fmt: skip
        losses = [pipe.push(x, y) for x, _, y in batches(20)]
        pipe.drain()
        found.append([torch.stack(losses), *(p.detach().clone() for p in pipe.model.parameters())])
        pipe.close()
    assert all(map(torch.equal, *found))


class Patched(Slow):
    """What it computes is an attribute of its own, as libraries do that wrap a forward; and it has a list."""

    def __init__(self):
        super().__init__(4, 4)
        self.calls = [self.bias]
        self._before = self.forward
        self.forward = partial(Patched.doubled, self)

    def doubled(self, x):
        return 2 * self._before(x) + self.calls[0].detach()


def test_a_forward_that_was_replaced_takes_the_lent_weights():
    torch.manual_seed(0)
    data, plain = batches(), SlowTwice()
    plain.slow = Patched()
    model = SlowTwice()
    model.slow = Patched()
    model.load_state_dict(plain.state_dict())
    splitting = pipeback.Splitting("layer", leaves=["slow"])
    pipe = Pipeline(model, loss=mse_loss, optimizer=sgd, method="sgd", stages=splitting, example=data[0][0])
    optimizer = sgd(plain.parameters())
    for x, _, y in data:
        loss = mse_loss(plain(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(pipe.push(x, y), loss)


def test_buffers_belong_to_one_stage():
    data = batches(1)
    with pytest.raises(ValueError, match="BatchNorm1d 'again' is called in stages 0 and 1, and its buffer 'running_m"):
        Pipeline(Twice(nn.BatchNorm1d(4)), loss=mse_loss, optimizer=sgd, stages="layer", example=data[0][:2])


class Often(nn.Module):
    """One layer twice before another one, and twice after it: four gradients are summed, in an order."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        x = self.a(self.a(x).tanh()).tanh()
        return self.a(self.a(self.b(x).tanh()).tanh())


def test_gradients_of_one_layer_are_summed_in_the_order_of_the_models_backward():
    batches = [torch.randn(7, 16, generator=torch.Generator().manual_seed(n)) for n in range(5)]
    assert equals_plain_training(Often(), batches).stages == 2
