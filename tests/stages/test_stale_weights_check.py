"""Functions of the weights that a graph saves: found by how they were made, whatever their numbers, and whenever."""

import pytest
import torch
from torch import nn

import pipeback
from pipeback import methods
from pipeback.stages.recomputed_functions import Afresh
from pipeback.stages.stage import Stage
from tests.laws.cases import everything

REFUSED = r"stage {0} \({0}\): its graph saves a function of the weights"


def pipeline(model, method="pb", **options):
    sgd = lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9)  # noqa: E731
    return pipeback.Pipeline(model, loss=nn.functional.mse_loss, optimizer=sgd, method=method, **options)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_numbers_that_are_equal_by_accident(width):
    """Few numbers, of which ReLU makes zeros: some are the same for another input, and change with the weights."""
    for seed in range(12):
        torch.manual_seed(seed)
        model = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(4)]
        pipeline(model).push(torch.randn(1, width), torch.randn(1, width))


def test_shapes_of_weights_masks_and_constants_are_none():
    class Likes(nn.Linear):
        def forward(self, x):
            ones = torch.ones_like(self.weight) * 2
            noise = nn.functional.dropout(self.bias, 0.5)
            return nn.functional.linear(x, self.weight) * ones[0] + noise

    torch.manual_seed(0)
    pipe = pipeline([Likes(6, 6), Likes(6, 6), nn.Linear(6, 6)])
    assert torch.isfinite(pipe.push(torch.randn(4, 6), torch.randn(4, 6)))


class Halved(nn.Linear):
    """A product of the weights, for long inputs alone."""

    def forward(self, x):
        weight = self.weight @ self.weight if x.shape[1] > 4 else self.weight
        return nn.functional.linear(x, weight, self.bias)


@pytest.mark.parametrize("workers", [None, 2])
def test_a_function_that_comes_with_another_shape(workers):
    torch.manual_seed(0)
    pipe = pipeline([nn.Linear(6, 6), Halved(6, 6), nn.Linear(6, 6)], workers=workers)
    for length in (3, 4, 2, 3):
        pipe.push(torch.randn(2, length, 6), torch.randn(2, length, 6))
    before = everything(pipe)
    with pytest.raises(ValueError, match=REFUSED.format(1)):
        pipe.push(torch.randn(2, 5, 6), torch.randn(2, 5, 6))
    assert torch.equal(everything(pipe), before)
    assert torch.isfinite(pipe.push(torch.randn(2, 3, 6), torch.randn(2, 3, 6)))
    pipe.close()


def test_autocast_that_begins_after_the_first_micro_batch():
    """It is noticed, and trains as if it had been there when training began."""
    found, batches = [], [(torch.randn(4, 6), torch.randn(4, 6)) for _ in range(8)]
    for before in (True, False):
        torch.manual_seed(0)
        pipe = pipeline([nn.Linear(6, 6) for _ in range(3)])
        if before:
            pipe.plan(*batches[0])  # rehearses
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for x, y in batches:
                pipe.push(x, y)
        found.append(everything(pipe))
    assert torch.equal(*found)


@pytest.mark.parametrize(("cast", "told"), [(False, False), (True, False), (True, True)])
def test_b_has_the_weights_in_force(cast, told):
    """What was doubled between F and B counts twice. told: the graph tells what was cast."""
    found = []
    for factor in (1, 2):
        torch.manual_seed(0)
        module = nn.Linear(6, 6) if cast else Scaled()
        stage = Stage(1, 2, module, "a", methods.create("pb"), lambda p: torch.optim.SGD(p, lr=0.1))
        stage.call = Afresh(stage, module)
        stage.call.casts = told
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
            for mb in range(2):  # torch keeps the first one's casts for the second
                stage.forward(mb, torch.ones(4, 6))
        for p in stage.params:
            p.data.mul_(factor)
        found.append(torch.stack([stage.backward(mb, torch.full((4, 6), 0.5)) for mb in range(2)]))
    assert torch.equal(found[0] * 2, found[1])


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self, x):
        return x * (self.weight * 3)


@pytest.mark.parametrize("tokens", [(1,), (4,), (3, 1)], ids=str)
def test_integers_as_input(tokens):
    """Of which no others can be made up that a model surely takes."""
    torch.manual_seed(0)
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
    pipe = pipeline([nn.Sequential(nn.Embedding(5, 6), normed), nn.Linear(6, 6)])
    with pytest.raises(ValueError, match=REFUSED.format(0)):
        pipe.push(torch.full(tokens, 3), torch.randn(*tokens, 6))


def test_the_cures():
    """What the message advises works as typed."""
    x, y = torch.randn(2, 5, 6), torch.randn(2, 5, 6)
    model = lambda: [nn.Linear(6, 6), Halved(6, 6), nn.Linear(6, 6)]  # noqa: E731
    pipeline(model(), "pipedream").push(x, y)
    with pytest.warns(UserWarning, match=REFUSED.format(1)):
        pipeline(model(), debug=pipeback.Debug(weight_functions="warn")).push(x, y)
