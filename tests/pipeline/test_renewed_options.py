"""Options that are set between the forward of a micro-batch and its step go with it, also into a saved state."""

import pytest
import torch
from torch.nn.functional import mse_loss

import pipeback
from tests.laws.cases import data, everything, network


def made(**options):
    model = network(4, dtype=torch.float64)
    return pipeback.Pipeline(
        model, loss=None, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), method="pb", **options
    )


def set_rates(pipe, n):
    for optimizer in pipe.optimizers:
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + n % 3)


def train(pipe, numbers, late):
    batches = data(12, dtype=torch.float64)
    for n in numbers:
        if not late:
            set_rates(pipe, n)
        output = pipe.forward(batches[n][0])
        mse_loss(output, batches[n][1]).backward()
        pipe.backward(output.grad)
        if late:
            set_rates(pipe, n)
            pipe.renew_options()
        pipe.step()


@pytest.mark.parametrize("options", [{}, {"workers": 2}])
def test_they_are_those_of_the_micro_batch(options):
    pipes = [made(**options), made(**options)]
    for pipe, late in zip(pipes, (False, True), strict=True):
        train(pipe, range(12), late)
        pipe.wait()
    assert torch.equal(*map(everything, pipes))


@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_state_has_them(at):
    whole, first, second = made(), made(), made()
    train(whole, range(12), late=True)
    train(first, range(at), late=True)
    second.load_state_dict(first.state_dict())
    train(second, range(at, 12), late=True)
    assert torch.equal(everything(second), everything(whole))
