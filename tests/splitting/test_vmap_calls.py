"""Functions under torch.vmap in a followed model: what they hold belongs to the micro-batch, or to the model."""

from functools import partial

import pytest
import torch
from torch import nn

import pipeback
from tests.splitting.plain_training import Model, equal_in_every_runtime, equals_plain_training, inputs, pipeline


def closes(model, h, lengths):
    """A mask that closes over a tensor of the micro-batch, through another function and a partial."""
    causal = lambda i, j: j <= i  # noqa: E731
    short = lambda most, i, j: j < most  # noqa: E731

    def both(functions, i, j):
        found = functions[0](i, j)
        for function in functions[1:]:
            found = found & function(i, j)
        return found

    seen, n = partial(both, (causal, partial(short, lengths[0]))), torch.arange(len(h))
    mask = torch.vmap(torch.vmap(seen, in_dims=(None, 0)), in_dims=(0, None))(n, n)
    return mask.to(h.dtype) @ h


def weighs(model, h, lengths):
    """A function that holds a weight, whose gradient is wanted, and gets another by keyword."""
    weight = model.weight
    return torch.vmap(lambda row, *, by: row * weight.tanh() * by)(h, by=lengths[0])


class Weighted(Model):
    def __init__(self, between):
        super().__init__(between)
        self.weight = nn.Parameter(torch.ones(4))


@pytest.mark.parametrize("between", [closes, weighs])
def test_each_micro_batch_has_its_own(between):
    batches = [(x, torch.tensor([n])) for x, n in zip(inputs(4), (5, 2, 3, 1), strict=True)]
    equals_plain_training(Weighted(between), batches)


@pytest.mark.parametrize("form", ["method", "itself"])
def test_a_module_is_refused_with_a_cure_that_works(form):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return torch.vmap(self.layer if form == "itself" else self.layer.forward)(x)

    model = Model(lambda model, h: model.inner(h))
    model.inner = Inner()
    batches = inputs()
    with pytest.raises(
        ValueError,
        match=r"torch.vmap holds Linear, .*; keep it whole: stages=pipeback.Splitting\(leaves=\['inner'\]",
    ):
        pipeline(model, batches[0])
    equals_plain_training(model, batches, stages=pipeback.Splitting(leaves=["inner"]))


def test_what_cannot_be_taken_apart_is_refused():
    class Cache:
        def __init__(self, tensor):
            self.tensor = tensor

    def holds(model, h):
        cache = Cache(h)
        return torch.vmap(lambda row: row + cache.tensor[0])(h)

    with pytest.raises(ValueError, match="torch.vmap holds Cache, whose tensors would stay those of one micro-batch"):
        pipeline(Model(holds), inputs()[0])

    def itself(model, h):
        def down(row, n=2):
            return row if n == 0 else down(row, n - 1)

        return torch.vmap(down)(h)

    with pytest.raises(ValueError, match="calls itself"):
        pipeline(Model(itself), inputs()[0])


def test_runtimes():
    batches = [(x, torch.tensor([n])) for x, n in zip(inputs(3), (5, 2, 3), strict=True)]
    equal_in_every_runtime(lambda: Weighted(closes), batches)


def by_length(model, h):
    """A function that holds how long the micro-batch is, as a number."""
    factor = float(len(h))
    return torch.vmap(lambda row: row * factor)(h)


def by_kind(model, h):
    """One of two functions of one name."""
    if len(h) > 3:
        scaled = lambda row: row * 2.0  # noqa: E731
    else:
        scaled = lambda row: row + 1.0  # noqa: E731
    return torch.vmap(scaled)(h)


def by_option(model, h):
    """One function, along another dimension."""
    return torch.vmap(lambda row: row.cumsum(0), in_dims=len(h) % 2, out_dims=len(h) % 2)(h)


@pytest.mark.parametrize("between", [by_length, by_kind, by_option])
def test_two_functions_of_one_name_are_told_apart(between):
    x = torch.randn(6, 4)
    equals_plain_training(Model(between), [(x,), (x[:3],), (x[:4],), (x,)])
