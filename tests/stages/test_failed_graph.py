"""The graph that is named is the one whose backward has failed, whichever way it failed."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from pipeback.stages.failed_graph import failed
from pipeback.stages.gradients import Gradients, differentiate

GRAPHS = 4


class Raises(torch.autograd.Function):
    """Its backward raises, or asks torch for what it cannot do."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("bad values")


def through_a_function(linear, x):
    return linear(Raises.apply(x))


def through_a_function_at_the_end(linear, x):
    return Raises.apply(linear(x))


def through_torch(linear, x):
    """`abs` in place of what the product has saved: torch itself raises."""
    y = linear(x).exp()
    y.detach().numpy()  # so that it has memory
    z = y * y
    with torch.no_grad():
        y.abs_()
    return z


def through_a_hook(linear, x):
    y = linear(x)

    def hook(grad):
        raise ValueError("bad values")

    y.register_hook(hook)
    return y.tanh()


WAYS = [through_a_function, through_a_function_at_the_end, through_torch, through_a_hook]


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("grows", [True, False])  # an embedding's input, and what is frozen upstream, has no gradient
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bad", range(GRAPHS))
def test_each_way_to_fail(way, bad, grows, threaded):
    if way is through_a_function and not grows:
        return  # it is no part of the graph
    linears = [nn.Linear(3, 3) for _ in range(GRAPHS)]
    leaves = [torch.randn(2, 3, requires_grad=grows) for _ in range(GRAPHS)]
    made = {}
    for n in (2, 0, 3, 1):  # not in the order in which they are given
        made[n] = way(linears[n], leaves[n]) if n == bad else linears[n](leaves[n]).tanh()
    roots = [get_gradient_edge(made[n]) for n in range(GRAPHS)]
    every = [Gradients(list(linear.parameters())) for linear in linears]
    for each in every:
        each.share(threaded)
    seeds = [torch.ones(2, 3)] * GRAPHS
    with pytest.raises((ValueError, RuntimeError)) as found:
        differentiate(roots, seeds, leaves, every)
    assert failed([[root] for root in roots], found.value) == bad
