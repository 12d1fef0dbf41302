"""Hooks on weights are those of every replica, be they registered before the pipeline is built or between pushes."""

import pytest
import torch
from torch import nn

from pipeback.tensors import meta
from tests.helpers.choice import diagonal
from tests.laws.cases import data, network, pipeline, weights


class Halving(nn.Linear):
    """Has a hook that is a method of its own."""

    def __init__(self):
        super().__init__(6, 6)
        self.share = 0.5
        self.weight.register_hook(self.half)

    def half(self, gradient):
        return gradient * self.share


def halve(p):
    p.grad.mul_(0.5)


def hooks(model):
    """Their order counts."""
    weight = model[1][0].weight
    found = [weight.register_hook(lambda g: g * 0.5), weight.register_hook(lambda g: g + 0.01)]
    return [*found, model[2][0].weight.register_post_accumulate_grad_hook(halve)]


def changes(model, n, there, when):
    if n == when:
        there += hooks(model)
    if n == 9 and there:
        there.pop(0).remove()
    if n == 10 and there:
        there.pop().remove()


@pytest.mark.parametrize(("run", "when"), diagonal([{}, {"workers": 2}, {"store": "host"}], [None, 0, 6]), ids=str)
def test_hooks_on_weights_are_those_of_every_replica(run, when):
    """Two halves that are the same batch: what one pipeline does of it. when: None: before it is built."""
    found = []
    for replicas in (None, 2):
        model = network(4).double()
        model[3] = Halving().double()
        there = hooks(model) if when is None else []
        pipe = pipeline(model, "gpipe", replicas=replicas, **(run if replicas else {}))
        for n, (x, y) in enumerate(data(12, dtype=torch.float64)):
            pipe.wait()
            changes(model, n, there, when)
            pipe.push(*((x, y) if replicas is None else (torch.cat([x, x]), torch.cat([y, y]))))
        pipe.drain()
        if replicas:
            own, twins = (stages[3].module for stages in pipe._engine.holding.everywhere)
            assert twins is not own
        found.append(weights(pipe))
        pipe.close()
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)


def test_a_hook_that_is_a_method_of_a_module_is_that_of_its_copy():
    seen = []

    class Names(nn.Linear):
        def hear(self, gradient):
            seen.append(self)

    model = nn.Sequential(Names(6, 6), nn.Linear(6, 6)).double()
    model[0].weight.register_hook(model[0].hear)
    pipe = pipeline(model, "gpipe", replicas=2)
    pipe.push(*data(1, samples=4, dtype=torch.float64)[0])
    pipe.drain()
    assert len({id(module) for module in seen}) == 2 and model[0] in seen


@pytest.mark.parametrize("after", [False, True])
def test_weights_that_were_away_have_their_hooks(after):
    p = nn.Parameter(torch.ones(2))
    handle = p.register_post_accumulate_grad_hook(halve) if after else p.register_hook(lambda g: g * 0.5)
    for device in ("meta", "cpu"):
        meta.move([p], device)
    for wanted in (0.5, 1.0):
        p.grad = None
        p.sum().backward()
        assert p.grad.tolist() == [wanted, wanted]
        handle.remove()
