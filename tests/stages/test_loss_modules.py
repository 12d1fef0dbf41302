"""A loss that is a module with buffers, which its forward changes, as the centre of DINO."""

import pytest
import torch
from torch import nn

import pipeback
from tests.laws.cases import OPTIMIZERS, data, network

STAGES = 5


class Centred(nn.Module):
    """Reads its buffers, replaces one and changes the other in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(6))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output, target):
        loss = (output - self.centre - target).square().mean() * (1 + self.calls / 100)
        self.centre = 0.9 * self.centre + 0.1 * output.detach().mean(0)
        self.calls += 1
        return loss


def build(loss, method, **options):
    torch.manual_seed(7)
    return pipeback.Pipeline(network(STAGES), loss=loss, optimizer=OPTIMIZERS["momentum"], method=method, **options)


def pushed(pipe, batches):
    return torch.stack([pipe.push(x, y).clone() for x, y in batches])


@pytest.mark.parametrize(
    "options",
    [{}, {"workers": 2}, {"store": "host"}, {"activations": "host"}, {"activations": "recompute"}, {"vectorize": True}],
    ids=str,
)
def test_its_buffers_change_once_per_micro_batch(options):
    batches, plain, judge = data(6), network(STAGES), Centred()
    optimizer = OPTIMIZERS["momentum"](plain.parameters())
    wanted = []
    for x, y in batches:
        wanted.append(judge(plain(x), y))
        optimizer.zero_grad()
        wanted[-1].backward()
        optimizer.step()
    loss = Centred()
    pipe = build(loss, "sgd", **options)
    found = pushed(pipe, batches)
    pipe.close()
    torch.testing.assert_close(found, torch.stack(wanted).detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(loss.centre, judge.centre, rtol=1e-5, atol=1e-6)
    assert loss.calls == judge.calls == len(batches)


@pytest.mark.parametrize("activations", ["device", "recompute"])
def test_a_state_in_flight_leaves_them_alone(activations):
    """Graphs in flight are built anew, or repeated, with the buffers of their forwards."""
    batches = data(12)
    loss, whole = Centred(), Centred()
    wanted = pushed(build(whole, "pipedream"), batches)
    before, after = (build(loss, "pipedream", activations=activations) for _ in range(2))
    found = pushed(before, batches[:7])
    state = before.state_dict()
    after.load_state_dict(state)
    assert torch.equal(torch.cat([found, pushed(after, batches[7:])]), wanted)
    assert torch.equal(loss.centre, whole.centre) and loss.calls == len(batches)
