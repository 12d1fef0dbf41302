"""Layers that draw from a torch.Generator of their own: every micro-batch draws once, whatever is done again."""

import pytest
import torch
from torch import nn

import pipeback
from tests.laws.cases import OPTIMIZERS, data
from tests.stages.keeping import KINDS


class Noise(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.linear, self.own = nn.Linear(6, 6), torch.Generator().manual_seed(seed)

    def forward(self, x):
        return torch.tanh(self.linear(x)) * torch.rand(x.shape, generator=self.own)


class Blurred(nn.Module):
    """A loss that draws."""

    def __init__(self):
        super().__init__()
        self.own = torch.Generator().manual_seed(5)

    def forward(self, output, target):
        return nn.functional.mse_loss(output * torch.rand(output.shape, generator=self.own), target)


def build(method, **options):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(Noise(3), Noise(4)), Noise(5), nn.Linear(6, 6))
    return pipeback.Pipeline(model, loss=Blurred(), optimizer=OPTIMIZERS["momentum"], method=method, **options)


def pushed(pipe, batches):
    return torch.stack([pipe.push(x, y).clone() for x, y in batches])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [None, 2])
def test_a_repeat_draws_what_its_forward_has_drawn(kind, workers):
    pipe = build("sgd", activations=kind, workers=workers)
    plain, loss, wanted = build("sgd").model, Blurred(), []
    optimizer = OPTIMIZERS["momentum"](plain.parameters())
    for x, y in data(8):
        wanted.append(loss(plain(x), y))
        optimizer.zero_grad()
        wanted[-1].backward()
        optimizer.step()
    torch.testing.assert_close(pushed(pipe, data(8)), torch.stack(wanted).detach(), rtol=1e-6, atol=1e-7)
    pipe.close()


def test_a_state_in_flight_has_what_was_drawn():
    """The generators themselves are the user's, who goes on with them."""
    batches = data(12)
    wanted = pushed(build("pipedream"), batches)
    before, after = (build("pipedream", activations="recompute") for _ in range(2))
    found = pushed(before, batches[:7])
    after.load_state_dict(before.state_dict())
    for mine, other in zip(after.model.modules(), before.model.modules(), strict=True):
        if isinstance(mine, Noise):
            mine.own.set_state(other.own.get_state())
    after_loss, before_loss = (pipe._engine.stages[-1].loss for pipe in (after, before))
    after_loss.own.set_state(before_loss.own.get_state())
    assert torch.equal(torch.cat([found, pushed(after, batches[7:])]), wanted)


def test_leaves_of_a_model_that_is_traced():
    found = []
    for kind in ("device", "recompute"):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(6, 6), Noise(3), Noise(4))
        pipe = pipeback.Pipeline(
            model, loss=nn.functional.mse_loss, optimizer=OPTIMIZERS["momentum"], method="pipedream", activations=kind,
            example=data(1)[0][0], stages=pipeback.Splitting("layer", leaves=["1", "2"]),
        )  # fmt: skip
        found.append(pushed(pipe, data(8)))
    assert torch.equal(*found)
