"""Tensors in lists and dictionaries that modules hold, and beside their forward, which a forward may compute with."""

import numpy
import pytest
import torch
from torch import nn

import pipeback

from .plain_training import Model, equals_plain_training, inputs, pipeline

BESIDE = torch.linspace(0, 1, 4)


class Grids(nn.Module):
    """Keeps a tensor for the last size in a list, which the first forward of that size makes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.grids = nn.Linear(4, 4), nn.Linear(4, 4), [torch.empty(0)]
        self.scales = {"one": torch.full((4,), 0.5), "more": (torch.ones(4), 3)}

    def forward(self, x):
        x = self.a(x) * self.scales["one"] * self.scales["more"][0] + BESIDE
        if len(self.grids[0]) != len(x):
            self.grids[0] = torch.arange(len(x)).unsqueeze(1) * 0.1
        return self.b(x + self.grids[0])


def test_tensors_in_lists_and_dictionaries():
    batches = [x for samples in (5, 7, 5) for x in inputs(2, samples)]
    pipe = equals_plain_training(Grids(), batches, Grids())
    assert pipe.stages == 2
    wanted = pipe.model.eval()(batches[0])
    assert torch.equal(pipe.evaluate(batches[0]), wanted)


def last(m, x):
    m.memory[0], before = x.detach().mean(0), m.memory[0]
    return x + before


def test_a_tensor_in_a_list_that_the_forward_replaces():
    models = [Model(last), Model(last), Model(last)]
    for model in models:
        model.memory = [torch.zeros(4)]
    with pytest.raises(
        ValueError, match=r"replaces a tensor in a list or dictionary .*or keep the whole model one stage"
    ):
        pipeline(models[0], inputs()[0])


def test_what_numpy_makes_in_a_forward_is_refused():
    model = Model(lambda m, x: x + torch.from_numpy(numpy.ones(4, numpy.float32)))
    with pytest.raises(ValueError, match="that no torch function or module has made from its input"):
        pipeline(model, inputs()[0])
    equals_plain_training(model, inputs(), stages=pipeback.Splitting(leaves=[""]))
