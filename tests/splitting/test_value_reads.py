"""Numbers that a forward's Python takes from weights and buffers: stages do not repeat one that changes."""

import copy

import pytest
import torch
from torch import nn

import pipeback

from .plain_training import Model, equals_plain_training, inputs, pipeline


class Queue(nn.Module):
    """Writes into its memory at a place that moves on with every forward, as the queue of MoCo does."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("memory", torch.zeros(8, 4))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        x = self.linear(x) + self.memory.mean(0)
        with torch.no_grad():
            at = int(self.pointer)
            self.memory[at : at + 2] = x[:2]
            self.pointer[0] = (at + 2) % 8
        return x


class Counted(Queue):
    """Decides by a number that it computes from a buffer that it advances."""

    def forward(self, x):
        self.pointer += 1
        return self.linear(x * 2 if self.pointer % 2 == 0 else x)


def scaled(m, x):
    return x * m.temperature.exp().item()


def tempered(m, x):
    return x * m.temperature.tolist()


def normed(m, x):
    return x / x.norm().item()


@pytest.mark.parametrize("kind", [Queue, Counted])
def test_a_number_that_the_forward_changes_is_not_repeated(kind):
    first = kind()
    model = Model(lambda m, x: x, first)
    wanted = r"'a'\.forward gives Python the value of 'a\.pointer', which it changes, so that .*leaves=\['a'\]\)"
    with pytest.raises(ValueError, match=wanted):
        pipeline(copy.deepcopy(model), inputs()[0])
    equals_plain_training(model, inputs(6), stages=pipeback.Splitting("layer", leaves=["a"]))


@pytest.mark.parametrize("between", [scaled, tempered, normed])
def test_a_number_that_weights_compute_is_not_repeated(between):
    model = Model(between)
    model.temperature = nn.Parameter(torch.tensor(0.5))
    with pytest.raises(ValueError, match="gives Python the value of a number that weights compute so that it is"):
        pipeline(copy.deepcopy(model), inputs()[0])
    equals_plain_training(model, inputs(), stages=pipeback.Splitting(leaves=[""]))


def test_a_number_that_stays_is_checked_for_every_micro_batch():
    model = Model(lambda m, x: x.roll(int(m.shift), 1))
    model.register_buffer("shift", torch.tensor(1))
    pipe = equals_plain_training(model, inputs())
    pipe.model.shift += 1
    with pytest.raises(pipeback.StageError, match=r"takes another branch for this micro-batch: .*gave 2, but 1"):
        pipe.push(inputs()[0], torch.zeros(5, 4))
