"""Law: gradients lie in memory as they do in one graph, whatever micro-batch came first: kernels round by that."""

import pytest
import torch
from torch import nn

from tests.laws.cases import pipeline, weights


class Turned(nn.Module):
    """Gives what it is given, in the other order in memory."""

    def forward(self, x):
        return x.t().contiguous().t()


def turned(width, *between):
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(width, width), *between, Turned(), nn.Linear(width, width))


def batches(width, sizes):
    torch.manual_seed(6)
    return [(torch.randn(n, width), torch.randn(n, width)) for n in sizes]


@pytest.mark.parametrize("first", [True, False])
def test_plain_training_with_gradients_in_another_order(first):
    """The first micro-batch, which is rehearsed, may have one sample and so no order; and a stage that computes
    entry by entry hands on the order that it is given.
    """
    for width in (16, 37, 64):
        for size in (7, 16, 33, 100):
            model, copied = turned(width, nn.Tanh()), turned(width, nn.Tanh())
            pipe = pipeline(copied, "sgd", "sgd")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            for x, y in batches(width, [1, size, size] if first else [size, size]):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                pipe.push(x, y)
            wanted = torch.cat([p.detach().flatten().double() for p in model.parameters()])
            assert torch.equal(weights(pipe), wanted), (width, size)


@pytest.mark.parametrize("runtime", [{}, {"workers": 2}])
def test_resumption_with_gradients_in_another_order(runtime):
    for width, size in ((37, 7), (64, 16), (64, 33)):
        some = batches(width, [1, *[size] * 5])
        pipe, again = (pipeline(turned(width), "pb", "sgd", **runtime) for _ in range(2))
        for x, y in some:
            pipe.push(x, y)
        again.load_state_dict(pipe.state_dict())
        for x, y in some[1:]:
            pipe.push(x, y)
            again.push(x, y)
        pipe.drain(), again.drain()
        assert torch.equal(weights(pipe), weights(again)), (width, size)
        pipe.close(), again.close()
