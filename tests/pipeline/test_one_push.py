"""Micro-batches of one push whose losses are computed outside: as without that, but looked at once."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipeback
from tests.laws.cases import CASES, EACH, OPTIMIZERS, data, everything, suited
from tests.pipeline.test_outside_loss import STAGES, outside, train


@pytest.mark.parametrize("case", EACH)
def test_it_changes_nothing(case):
    batches = data(18)
    plain, other = outside(case, suited(case)), outside(case, suited(case))
    expected = train(plain, batches, step=False)
    losses = train(other, batches[:3], step=False)
    for first in (3, 8, 13):
        with other.one_push():
            losses += train(other, batches[first : first + 4], step=False)
        losses += train(other, batches[first + 4 : first + 5], step=False)
    plain.step(), other.step()
    assert torch.equal(torch.stack(expected), torch.stack(losses))
    assert [*plain.ledger] == [*other.ledger]
    assert torch.equal(everything(plain), everything(other))


@pytest.mark.parametrize("given", [{"workers": 2}, {"vectorize": True}])
def test_workers_and_stages_as_one_do_the_same(given):
    batches = data(10)
    plain, other = outside("cerebras", **given), outside("cerebras", **given)
    expected = train(plain, batches)
    with other.one_push():
        losses = train(other, batches)
    assert torch.equal(torch.stack(expected), torch.stack(losses))
    assert torch.equal(everything(plain), everything(other))


def test_gradients_are_shown_after_it():
    pipe, batches = outside("pb"), data(4)
    last = pipe.split.parts[-1].module
    train(pipe, batches[:1], step=False)
    assert all(p.grad is not None for p in last.parameters())
    with pipe.one_push():
        train(pipe, batches[1:3], step=False)
        assert all(p.grad is None for p in last.parameters())
    train(pipe, batches[3:], step=False)
    assert all(p.grad is not None for p in last.parameters())


def test_optimizers_are_looked_at_before_its_first():
    batches = data(12)
    plain, other = outside("pb"), outside("pb")
    for pipe in (plain, other):
        train(pipe, batches[:2])
        for optimizer in pipe.optimizers:
            optimizer.param_groups[0]["lr"] *= 0.5
    train(plain, batches[2:7])
    with other.one_push():
        train(other, batches[2:4])
        for optimizer in other.optimizers:
            optimizer.param_groups[0]["lr"] *= 0.5  # of the next push
        train(other, batches[4:7])
    for optimizer in plain.optimizers:
        optimizer.param_groups[0]["lr"] *= 0.5
    assert torch.equal(torch.stack(train(plain, batches[7:])), torch.stack(train(other, batches[7:])))
    assert torch.equal(everything(plain), everything(other))


def test_what_is_written_into_weights_after_it_is_taken_over():
    batches = data(12)
    plain, other = outside("pb"), outside("pb")
    train(plain, batches[:6])
    train(other, batches[:1])
    with other.one_push():
        train(other, batches[1:6])
    for pipe in (plain, other):
        with torch.no_grad():
            for p in pipe.split.parts[2].module.parameters():
                p.mul_(0.5)
    assert torch.equal(torch.stack(train(plain, batches[6:])), torch.stack(train(other, batches[6:])))
    assert torch.equal(everything(plain), everything(other))


def test_buffers_that_a_forward_writes():
    def build():
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()) for _ in range(STAGES)]
        method = CASES["pb"](STAGES)
        return pipeback.Pipeline([*layers], loss=None, optimizer=OPTIMIZERS["momentum"], method=method)

    torch.manual_seed(1)
    batches = [(torch.randn(4, 6), torch.randn(4, 6)) for _ in range(12)]
    plain, other = build(), build()
    expected, losses = train(plain, batches), train(other, batches[:2])
    with other.one_push():
        losses += train(other, batches[2:9])
    losses += train(other, batches[9:])
    assert torch.equal(torch.stack(expected), torch.stack(losses))
    assert all(
        torch.equal(a, b) for s in range(STAGES)
        for a, b in zip(plain.split.parts[s].module.buffers(), other.split.parts[s].module.buffers(), strict=True)
    )  # fmt: skip


def test_another_form_in_it_is_rehearsed():
    pipe = outside("pb")
    x, y = data(1)[0]
    with pipe.one_push():
        train(pipe, [(x, y), (x, y)])
        train(pipe, [(x[:1], y[:1])])
        with pytest.raises(ValueError, match="stage 0"):
            pipe.forward(torch.randn(2, 99, dtype=x.dtype))
        train(pipe, [(x, y)])


def test_an_error_in_it_leaves_the_pipeline_as_it_is_afterwards():
    batches = data(8)
    plain, other = outside("pb"), outside("pb")
    train(plain, batches[:4])
    with pytest.raises(ZeroDivisionError), other.one_push():
        train(other, batches[:4])
        raise ZeroDivisionError
    assert torch.equal(mse_loss(plain.forward(batches[4][0]), batches[4][1]), mse_loss(
        other.forward(batches[4][0]), batches[4][1]
    ))  # fmt: skip
    other.close()
    with pytest.raises(RuntimeError, match="close"), other.one_push():
        train(other, batches[4:])


@pytest.mark.parametrize("options", [{}, {"store": "host"}])
def test_what_is_written_within_shown_is_taken_over(options):
    batches = data(12)
    plain, other = outside("pb", **options), outside("pb", **options)

    def halved(pipe):
        with pipe.shown(changes=True), torch.no_grad():
            for p in pipe.split.parts[1].module.parameters():
                p.mul_(0.5)

    for pipe, around in ((plain, nullcontext), (other, other.one_push)):
        train(pipe, batches[:2])
        with around():
            for first in (2, 5):
                train(pipe, batches[first : first + 3], step=False)
                halved(pipe)
            train(pipe, batches[8:10], step=False)
        train(pipe, batches[10:])
        pipe.drain()
    assert torch.equal(everything(plain), everything(other))
