"""What is kept of attention between F and B, and its softmax without the search for rows that see nothing."""

import math

import pytest
import torch
from torch import nn

import pipeback
from pipeback.recipes.models.transformer import transformer
from pipeback.vectorized.stacks.stack import Stack
from pipeback.vectorized.tracing.graphs import safe_softmax


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dim", [-1, 0, 1])
def test_the_softmax_has_the_bits_of_torchs(dtype, dim):
    """Also where all of a row is −∞, some of it, +∞ or NaN, and where there is no entry at all."""
    x = torch.randn(4, 5, 6, dtype=dtype)
    some = [x, torch.randn(3, 0, 2, dtype=dtype)]
    for value in (-math.inf, math.inf, math.nan):
        for where in ((slice(None), 2, 3), (1, slice(None), 0), (2, 3, slice(None)), (0, 0, 0), (slice(None),) * 3):
            other = x.clone()
            other[where] = value
            some.append(other)
    for each in some:
        ours, theirs = safe_softmax(each, dim), torch.ops.aten._safe_softmax.default(each, dim)
        assert torch.equal(ours.nan_to_num(nan=7), theirs.nan_to_num(nan=7)) and ours.dtype == theirs.dtype
    assert safe_softmax(x.half(), dim, torch.float32).dtype == torch.float32


def test_nothing_is_kept_twice_for_the_backward(monkeypatch):
    """The weights of attention are used twice there, once for the values and once for the softmax."""
    made = []
    hold = Stack._hold
    monkeypatch.setattr(Stack, "_hold", lambda stack, waiting: (made.append(waiting), hold(stack, waiting)))
    model = transformer(vocabulary=7, context=6, width=8, depth=2, heads=2, sublayers=True)
    pipe = pipeback.Pipeline(
        nn.Sequential(*model), loss=lambda out, y: nn.functional.cross_entropy(out.flatten(0, 1), y.flatten()),
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3), method="pb", micro_batch_size=3, vectorize=True,
    )  # fmt: skip
    pipe.push(torch.randint(0, 7, (3, 6)), torch.randint(0, 7, (3, 6)))
    (waiting,) = (one for one in made if one.rows == 2 and any(shape[-2:] == (6, 6) for shape in one.shapes))
    assert sum(math.prod(shape) == 2 * 3 * 2 * 6 * 6 for shape in waiting.shapes) == 1
