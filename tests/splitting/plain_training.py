"""A model with something between its layers, which a pipeline has to train as a loop does, to equal bits."""

import copy

import torch
from torch import nn

import pipeback


class Model(nn.Module):
    """Two layers, and something between them."""

    def __init__(self, between, first=None):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = first or nn.Linear(4, 4), nn.Linear(4, 4)
        self.between = between

    def forward(self, x, *more):
        return self.b(self.between(self, self.a(x), *more))


def pipeline(model, example, **options):
    return pipeback.Pipeline(
        model, loss=nn.functional.mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), example=example,
        **{"stages": "layer", "method": "sgd", **options},
    )  # fmt: skip


def equals_plain_training(model, batches, plain=None, **options):
    """The pipeline of `model`, trained like `plain`, or a copy, in a loop: to equal bits."""
    plain = copy.deepcopy(model) if plain is None else plain
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    pipe = pipeline(model, batches[0], **options)
    for x in batches:
        given = x if isinstance(x, tuple) else (x,)
        output = plain(*given)
        y = torch.zeros_like(output)
        loss = nn.functional.mse_loss(output, y)
        assert torch.equal(pipe.push(x, y), loss.detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for found, wanted in zip(pipe.model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found, wanted)
    return pipe


def equal_in_every_runtime(make, batches):
    """Models of `make`, in the caller's thread and in two workers."""
    found = []
    for workers in (None, 2):
        pipe = pipeline(make(), batches[0], method="pb", workers=workers)
        losses = [pipe.push(x, torch.zeros(5, 4)).item() for x in batches]
        found.append((losses, [p.detach().clone() for p in pipe.model.parameters()]))
        pipe.close()
    assert found[0][0] == found[1][0] and all(map(torch.equal, found[0][1], found[1][1]))


def inputs(count=3, samples=5):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(samples, 4, generator=generator) for _ in range(count)]
