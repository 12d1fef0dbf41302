"""What a forward writes into, in stages that are not the only ones to read it."""

import copy

import pytest
import torch
from torch import nn

import pipeback

from .plain_training import equals_plain_training, inputs, pipeline


class Codes(nn.Module):
    """Looks codes up that follow what it looks up; in training after the first layer, or always after the second."""

    def __init__(self, late=False):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.late = nn.Linear(4, 4), nn.Linear(4, 4), late
        self.register_buffer("codes", torch.randn(4, 4))

    def forward(self, x):
        z = self.a(x)
        best = (z @ self.codes.T).argmax(-1)
        if self.training:
            with torch.no_grad():
                self.codes[best] = self.codes[best] * 0.5 + z * 0.5
        found = self.b(z)
        if self.late:
            self.codes.data.mul_(0.5)
        return found + self.codes[best]


def test_a_later_stage_reads_a_buffer_that_an_earlier_one_changes():
    batches = inputs(4)
    pipe = equals_plain_training(Codes(), batches)
    assert pipe.stages == 2
    plain = copy.deepcopy(pipe.model).eval()
    assert torch.equal(pipe.evaluate(batches[0]), plain(batches[0]))
    assert torch.equal(pipe.model.codes, plain.codes)


def test_a_later_stage_changes_a_buffer_that_an_earlier_one_reads():
    with pytest.raises(
        ValueError, match="buffer 'codes' is changed by the forward, and stages 0 and 1 read it; cut so"
    ):
        pipeline(Codes(late=True), inputs()[0])
    equals_plain_training(Codes(late=True), inputs(), stages=pipeback.Splitting(leaves=[""]))


class Quantizer(nn.Module):
    """Frozen codes that follow their averages, which are written through their data."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Embedding(4, 4).requires_grad_(False)
        self.register_buffer("sums", torch.ones(4, 4))

    def forward(self, z):
        best = (z @ self.codes.weight.T).argmax(-1)
        found = self.codes(best)
        with torch.no_grad():
            self.sums.data.mul_(0.9).index_add_(0, best, z, alpha=0.1)
            self.codes.weight.data.copy_(self.sums)
        return z + (found - z).detach()


class Quantized(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.quantizer, self.b = nn.Linear(4, 4), Quantizer(), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(self.quantizer(self.a(x)))


def test_a_later_stage_writes_into_a_weight_that_an_earlier_one_reads():
    told = r"'quantizer\.codes\.weight' is written into by the forward in stage 1, and stage 0 reads it; cut so .*: "
    with pytest.raises(ValueError, match=told + r"stages=pipeback.Splitting\(leaves=\['quantizer'\]\)"):
        pipeline(Quantized(), inputs()[0])
    assert equals_plain_training(Quantized(), inputs(6), stages=pipeback.Splitting(leaves=["quantizer"])).stages == 3
    equals_plain_training(Quantized(), inputs(6), stages=["a", "b"])


class Cached(nn.Module):
    """Keeps a table, and the sizes that it is for."""

    def __init__(self):
        super().__init__()
        self.linear, self.sizes, self.table = nn.Linear(4, 4), None, None

    def forward(self, x):
        if self.sizes != (*x.shape,):
            self.sizes, self.table = (*x.shape,), torch.ones(x.shape).cumsum(0)
        return self.linear(x + self.table)


def test_a_table_and_its_size_are_put_back_together():
    batches = [x for samples in (5, 3, 7, 2, 5) for x in inputs(1, samples)]
    equals_plain_training(nn.Sequential(Cached(), nn.Linear(4, 4)), batches, stages="auto")
    equals_plain_training(Cached(), batches, stages=pipeback.Splitting(leaves=[""]))
