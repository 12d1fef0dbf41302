"""What somebody writes into weights and buffers while micro-batches are in flight: these go backward on it."""

import pytest
import torch
from torch import nn

from pipeback.tensors.weight_list import copy
from tests.helpers.choice import diagonal
from tests.helpers.gated import Gated
from tests.laws.cases import data, everything, network, pipeline


def norms(dtype=torch.float64):
    """Weights, frozen ones, and buffers that F changes."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(4)]
    for block in blocks:
        block[3].requires_grad_(False)
    return nn.Sequential(*blocks).to(dtype)


def through_data(pipe, model, factor):
    """Written where nobody counts: what the library's own updates do."""
    for t in (*model.parameters(), *model.buffers()):
        t.data.mul_(factor) if t.is_floating_point() else None


def loaded(pipe, model, factor):
    state = {k: v * factor if v.is_floating_point() else v for k, v in model.state_dict().items()}
    model.load_state_dict(state)


def in_place(pipe, model, factor):
    with torch.no_grad():
        for t in (*model.parameters(), *model.buffers()):
            t.mul_(factor) if t.is_floating_point() else None


def trained(write, model, then="push", **options):
    model = model()
    pipe = pipeline(model, "pb", **options)
    batches = data(22, samples=20, dtype=next(model.parameters()).dtype)
    for x, y in batches[:11]:
        pipe.push(x, y)
    for _ in range(2):  # twice: nothing is left of the first time
        with pipe.shown(changes=True):
            write(pipe, model, 1.25)
        if then == "drain":
            pipe.drain()
        for x, y in batches[11:]:
            pipe.push(x, y)
    found = everything(pipe)
    pipe.close()
    return found


CASES = [
    (network, {}), (norms, {}), (norms, {"workers": 2}), (network, {"activations": "host"}),
    (norms, {"activations": "recompute"}), (network, {"store": "host"}), (network, {"vectorize": True}),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*takes its statistics")
@pytest.mark.parametrize(("case", "then"), diagonal(CASES, ["push", "drain"]))
def test_in_flight(case, then):
    model, options = case
    wanted = trained(through_data, model, then, **options)
    assert torch.equal(trained(loaded, model, then, **options), wanted)
    assert torch.equal(trained(in_place, model, then, **options), wanted)
    assert not torch.equal(trained(lambda *_: None, model, then, **options), wanted)


@pytest.mark.parametrize("then", ["push", "drain"])
def test_masters_take_it_up(then):
    def half():
        return network(dtype=torch.bfloat16)

    pipes = [pipeline(half(), "pb", masters=True) for _ in range(2)]
    for pipe in pipes:
        for x, y in data(11, dtype=torch.bfloat16):
            pipe.push(x, y)
        pipe.wait()
    for _ in range(2):
        loaded(pipes[0], pipes[0].model, 2.0)
        with torch.no_grad():
            for stage in pipes[1]._engine.stages:
                copy(stage.weights, [w.to(torch.bfloat16).float() * 2.0 for w in stage.weights])
                stage.masters.round()
        for pipe in pipes:
            pipe.drain() if then == "drain" else None
            for x, y in data(11, dtype=torch.bfloat16):
                pipe.push(x, y)
        assert torch.equal(*map(everything, pipes))


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"store": "host"}, {"activations": "host"}], ids=str)
def test_into_a_buffer_that_was_replaced(options):
    """As into the buffer itself, where the new one was written into it."""
    found = []
    for replaced in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(*(Gated() for _ in range(3))).double()
        pipe = pipeline(model, "pb", **options)
        for n, (x, y) in enumerate(data(14, dtype=torch.float64)):
            if n == 4:
                pipe.drain()
                model[1].gate = model[1].gate * 0.5 if replaced else model[1].gate.mul_(0.5)
            if n == 8:
                pipe.wait()
                model[1].gate.mul_(1.5)
            pipe.push(x, y)
        found.append(everything(pipe))
        pipe.close()
    assert torch.equal(*found)
