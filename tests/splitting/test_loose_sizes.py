"""Sizes that depend on values, from stage to stage: every micro-batch is trained with its own."""

import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import softmax
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import pipeback

from .plain_training import Model, equal_in_every_runtime, equals_plain_training, inputs, pipeline


class Packed(nn.Module):
    """Sequences of several lengths through a recurrent layer; returns `give` of its padded output and the lengths."""

    def __init__(self, give, **options):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.rnn, self.head = nn.Embedding(9, 4), nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 4)
        self.give, self.options = give, options

    def forward(self, words, lengths):
        packed = pack_padded_sequence(self.words(words), lengths, batch_first=True, enforce_sorted=False)
        found, _ = self.rnn(packed)
        padded, lengths = pad_packed_sequence(found, batch_first=True, **self.options)
        return self.head(self.give(padded, lengths))


def texts(*lengths, width=6):
    generator = torch.Generator().manual_seed(0)
    return [(torch.randint(9, (len(own), width), generator=generator), torch.tensor(own)) for own in lengths]


def last(padded, lengths):
    return padded[torch.arange(len(lengths)), lengths - 1]


def weighted(padded, lengths):
    return (padded * softmax(padded.sum(-1, keepdim=True), 1)).sum(1)


@pytest.mark.parametrize("give", [last, weighted])
def test_packed_sequences(give):
    pipe = equals_plain_training(Packed(give), texts((6, 2, 3), (1, 4, 5), (2, 2, 2), (6, 6, 6)))
    assert pipe.stages == 3


def test_packed_sequences_that_are_padded_to_a_given_length():
    equals_plain_training(Packed(weighted, total_length=6), texts((6, 2, 3), (1, 4, 5), (2, 2, 2)))


def test_the_longest_of_packed_sequences_is_not_that_of_the_first_micro_batch():
    first, other = texts((6, 2, 3), (1, 4, 5))
    pipe = pipeline(Packed(lambda padded, lengths: padded.sum(1) / padded.shape[1]), first)
    pipe.push(first, torch.zeros(3, 4))
    with pytest.raises(pipeback.StageError, match=r"sizes gave \[3, 5, 4\], but \[3, 6, 4\] when the model was traced"):
        pipe.push(other, torch.zeros(3, 4))


class Selected(nn.Module):
    """Sends selected rows to the second layer, which is all that the second stage gets. scale: of the number of rows"""

    def __init__(self, scale=lambda count: 1):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.scale = nn.Linear(4, 4), nn.Linear(4, 4), scale

    def forward(self, x):
        h, count = self.a(x), len(x)
        return self.b(h[h[:, 0] > 0]).sum(0) * self.scale(count)


def test_selected_rows():
    pipe = equals_plain_training(Selected(), inputs(6))
    assert re.search(r"# \(\?, \?\) float32 in training", pipe.split.parts[1].module.__script__())


def test_selected_rows_of_pushes_of_several_sizes():
    batches = [x for samples in (5, 7, 9) for x in inputs(2, samples)]
    pipe = equals_plain_training(Selected(), batches)
    assert pipe.split.parts[1].module.__script__().count("def forward") == 1
    pipe = equals_plain_training(Selected(lambda count: count), [*batches, *batches])
    assert pipe.split.parts[1].module.__script__().count("def forward") == 3


def test_selected_rows_in_every_runtime():
    between = lambda m, x: torch.zeros_like(x).index_add(0, (x[:, 0] > 0).nonzero()[:, 0], m.inner(x[x[:, 0] > 0]))  # noqa: E731

    def make():
        model = Model(between)
        torch.manual_seed(1)
        model.inner = nn.Linear(4, 4)
        return model

    assert equals_plain_training(make(), inputs(6)).stages == 3
    equal_in_every_runtime(make, inputs(8))


class Router(nn.Module):
    """Sends each row to one of its experts, and leaves out those that get none."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 2), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        best, found = self.gate(x).argmax(-1), torch.zeros_like(x)
        for n, expert in enumerate(self.experts):
            rows = (best == n).nonzero()[:, 0]
            if len(rows):
                found = found.index_add(0, rows, expert(x[rows]))
        return found


class Counter(Router):
    """Sends rows in the order of their experts, by a list of how many each gets."""

    def forward(self, x):
        best = self.gate(x).argmax(-1)
        order, counts = best.argsort(stable=True), best.bincount(minlength=2).tolist()
        parts = [expert(rows) for expert, rows in zip(self.experts, x[order].split(counts), strict=True)]
        return torch.zeros_like(x).index_add(0, order, torch.cat(parts))


class Mixture(nn.Module):
    def __init__(self, count=2, kind=Router):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.routers = nn.ModuleList(kind() for _ in range(count))

    def forward(self, x):
        x = self.first(x)
        for router in self.routers:
            x = x + router(x).tanh()
        return self.last(x)


@pytest.mark.parametrize("kind", [Router, Counter])
def test_a_router_is_one_layer_and_its_cure_says_so(kind):
    with pytest.warns(UserWarning, match="er 'routers.0' goes by sizes or counts that its .* it is not cut") as said:
        pipe = equals_plain_training(Mixture(kind=kind), inputs(6))
    assert pipe.stages == 4
    (cure,) = re.findall(r"stages=(pipeback\.Splitting\(.*\])", str(said[0].message))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        equals_plain_training(Mixture(kind=kind), inputs(6), stages=eval(f'{cure[:19]}"layer", {cure[19:]})'))


def test_a_router_in_which_stages_begin_by_name_is_cut():
    names = ["first", "routers.0.gate", "last"]
    found = pipeline(Mixture(1), inputs()[0], stages=names)
    assert found.stages == 3 and found.split.parts[1].name.startswith("routers.0")
