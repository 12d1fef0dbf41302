"""What is kept of attention between F and B, and its softmax without the search for rows that see nothing."""

import math

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import pipeback
from pipeback.recipes.models.transformer import transformer
from pipeback.vectorized.stacks.stack import Stack
from pipeback.vectorized.tracing.graphs import direct, safe_softmax


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


@pytest.mark.parametrize("size, made", [(32, 0), (600, 1)], ids=["small", "too large to keep"])
def test_a_mask_is_made_once(size, made):
    def masked(x):
        seen = torch.ones(size, size, dtype=torch.bool).tril()
        return x + torch.where(seen, torch.scalar_tensor(0.0), torch.scalar_tensor(-1.0)), torch.rand(3)

    graph = make_fx(masked)(torch.randn(size, size))
    again = direct(graph.forward)
    nodes = [node.target for node in again.__self__.graph.nodes]
    assert nodes.count(torch.ops.aten.where.self) == made
    x = torch.randn(size, size)
    (first, drawn), (second, other) = again(x), again(x)
    assert torch.equal(first, graph(x)[0]) and torch.equal(first, second)
    assert not torch.equal(drawn, other)  # what is drawn is no constant


def test_what_adds_in_place_stays_without_users():
    def added(total, x):
        total.add_(x)
        return x + 1

    graph = make_fx(added)(torch.zeros(3), torch.ones(3))
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target is torch.ops.aten.add_.Tensor:
            node.op, node.target = "call_method", "add_"
    graph.recompile()
    total = torch.zeros(3)
    for _ in range(2):
        direct(graph.forward)(total, torch.ones(3))
    assert torch.equal(total, torch.full((3,), 2.0))
