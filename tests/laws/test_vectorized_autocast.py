"""Law: under autocast, stages that run as one train bit for bit what they train with autocast entered inside their
modules and their loss, whenever their operations are done; and what the event loop trains, to the rounding of bfloat16.
"""

from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipeback
from pipeback.vectorized.making import closeness
from pipeback.vectorized.making.shared_graphs import SharedLosses
from pipeback.vectorized.ticks.steady import Steady
from tests.helpers.choice import mostly_rare, rare
from tests.laws.as_one import S, block, doubles, same, share_equally, through
from tests.laws.cases import CASES, OPTIMIZERS, STEADY, allowed, everything, weights

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")
ROUNDED = 1.6e-2


def casts(on=True):
    return torch.autocast("cpu", torch.bfloat16) if on else nullcontext()


class Own(nn.Module):
    """A layer that enters autocast itself, where it is told to."""

    def __init__(self, layer, inside):
        super().__init__()
        self.layer, self.inside = layer, inside

    def forward(self, x):
        with casts(self.inside):
            return self.layer(x)


class Single(nn.Module):
    """Hands on what it is given in float32, so that stages see nothing of autocast."""

    def forward(self, x):
        return x.float()


class OwnLoss(nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, y, target):
        with casts(self.inside):
            return mse_loss(y, target)


def build(case, vectorize=True, inside=False, ends=nn.Identity, **options):
    torch.manual_seed(0)
    inner = [nn.Linear(6, 6), *[block() for _ in range(S - 2)]]
    layers = [*[nn.Sequential(layer, ends()) for layer in inner], nn.Linear(6, 6, bias=False)]
    name = next(name for name in ("momentum", "sgd", "adamw") if allowed(case, name))
    return pipeback.Pipeline(
        nn.Sequential(*[Own(layer, inside) for layer in layers]), method=CASES[case](S), vectorize=vectorize,
        **{"loss": OwnLoss(inside), "optimizer": OPTIMIZERS[name], **options},
    )  # fmt: skip


def batches(count=30):
    return [(x.float(), y.float()) for x, y in doubles(count)]


def trained(pipe, around=False, count=30, read=5):
    """Losses, weights in flight and drained; some losses are read, outside of autocast, before others are known."""
    losses = []
    for n, (x, y) in enumerate(batches(count)):
        with casts(around):
            losses.append(pipe.push(x, y))
        if n % read == 3:
            float(losses[n // 2])
    flying = weights(pipe)
    pipe.drain()
    return [torch.stack([loss.float() for loss in losses]), flying, weights(pipe)]


def as_one(pipe):
    return any(told.startswith("as one") for told in pipe.vectorized.values())


@pytest.mark.parametrize("case", mostly_rare(STEADY, "pb", "gpipe-4"))
def test_autocast_around_pushes(case):
    pipe, inside = build(case), build(case, inside=True)
    found = trained(pipe, around=True)
    assert as_one(pipe) and all(map(torch.equal, found, trained(inside)))


@pytest.mark.parametrize("case", mostly_rare(STEADY, "cerebras"))
def test_the_event_loop_rounds_likewise(case):
    """With a loss of torch's own, which is part of a graph."""
    pipe = build(case, loss=mse_loss)
    found, wanted, plain = trained(pipe, True), *(trained(build(case, False), around) for around in (True, False))
    assert as_one(pipe) and not torch.equal(wanted[2], plain[2])  # autocast matters
    far, rounding = ((a[0][:6] - wanted[0][:6]).abs().max() for a in (found, plain))
    assert far <= 3 * rounding  # as one, other numbers round


@pytest.mark.parametrize(("case", "sizes"), mostly_rare(
    product(STEADY, [(8, 3, 1, 8, 5, 2), (12, 15)]), ("pb", (12, 15)), ("pipedream", (8, 3, 1, 8, 5, 2)),
    ("gpipe-4", (12, 15)),
))  # fmt: skip
def test_a_loss_that_is_computed_outside(case, sizes):
    def run(around, **options):
        pipe = build(case, loss=None, **options)
        with casts(around):
            losses = through(pipe, batches(27), sizes)
        pipe.drain()
        return pipe, losses, weights(pipe)

    pipe, *found = run(True)
    assert as_one(pipe) and all(map(torch.equal, found, run(False, inside=True)[1:]))


def test_a_loss_outside_is_computed_under_the_callers_autocast():
    kinds = set()

    def judge(n, output):
        kinds.add((output.dtype, (output @ output.T).dtype))
        return torch.ones_like(output)

    pipe = build("pb", loss=None)
    xs = [x for x, _ in batches(9)]
    with casts():
        (output,) = pipe.forward_many(xs, expected=9, judge=judge)
    pipe.backward(torch.ones_like(output))
    assert as_one(pipe) and kinds == {(torch.bfloat16, torch.bfloat16)}


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("case", ["pb", rare("cerebras"), rare("pipedream"), rare("gpipe-4")])
def test_in_workers(case, monkeypatch):
    share_equally(monkeypatch)
    found = trained(build(case, workers=2), around=True)
    assert all(map(torch.equal, found, trained(build(case, workers=2, inside=True))))


@pytest.mark.parametrize(("case", "ends"), mostly_rare(
    product(STEADY, [nn.Identity, Single]), ("pb", Single), ("pipemare-t3", nn.Identity),
))  # fmt: skip
def test_autocast_that_comes_and_goes(case, ends):
    """Each micro-batch keeps that of its own push, forward and backward; the last stage's graph, too."""
    xs, ys = map(torch.cat, zip(*batches(48), strict=True))
    found = []
    for vectorize in (True, False):
        pipe, losses = build(case, vectorize, ends=ends, loss=mse_loss, micro_batch_size=3), []
        for n, (x, y) in enumerate(zip(xs.split(36), ys.split(36), strict=True)):
            with casts(n % 2):
                losses.append(pipe.push(x, y))
        pipe.drain()
        found.append([torch.stack([loss.float() for loss in losses])])
        assert not vectorize or as_one(pipe)
    same(*found, within=ROUNDED)


@pytest.mark.parametrize(("case", "kind", "name"), [
    ("pb", Steady, "_as_graph"), ("gpipe-4", SharedLosses, "_traced"),
])  # fmt: skip
def test_the_last_stage_has_a_graph_for_every_autocast(case, kind, name, monkeypatch):
    """Also where what it is given is of the same type."""
    made, original = [], getattr(kind, name)

    def noted(self, *args):
        stage = self.last if kind is Steady else self._stage
        made.append(stage.learnt.casts)
        return original(self, *args)

    monkeypatch.setattr(kind, name, noted)
    pipe = build(case, ends=Single, loss=mse_loss, micro_batch_size=3)
    xs, ys = map(torch.cat, zip(*batches(80), strict=True))
    for n, (x, y) in enumerate(zip(xs.split(120), ys.split(120), strict=True)):
        with casts(n % 2):
            pipe.push(x, y)
    assert dict.fromkeys(made) == dict.fromkeys([(), (("cpu", torch.bfloat16),)])


def test_only_what_was_pushed_under_autocast_rounds(monkeypatch):
    """Without delay nothing is in flight, so the pushes before the first autocast are those of float32."""
    plain, mixed = (build("sgd", vectorize="auto", micro_batch_size=1) for _ in range(2))
    for n, (x, y) in enumerate(batches(8)):
        wanted = plain.push(x, y)
        with casts(n == 6):
            found = mixed.push(x, y)
        assert torch.equal(found, wanted) == (n < 6)


@pytest.mark.parametrize("case", mostly_rare(STEADY, "pb"))
def test_resumed_in_flight(case):
    one = build(case)
    for x, y in batches(11):
        with casts():
            one.push(x, y)
    state, other = one.state_dict(), build(case)
    for x, y in batches(2):
        other.push(x, y)
    other.load_state_dict(state)
    for pipe in (one, other):
        for x, y in batches(30)[11:]:
            with casts():
                pipe.push(x, y)
        pipe.drain()
    assert as_one(other) and torch.equal(everything(one), everything(other))


def test_a_state_under_autocast_drains_as_it_began():
    """Micro-batches in flight keep their casts in a state, where no push says so."""
    one = build("pb")
    for x, y in batches(11):
        with casts():
            one.push(x, y)
    other = build("pb")
    with casts():
        other.load_state_dict(one.state_dict())
    one.drain()
    other.drain()
    assert torch.equal(weights(one), weights(other))


def test_ticks_are_whole(leapt):
    """Graphs hand on tensors of the types that the stages do, so that all stages fit into a tick."""
    pipe = build("pb", loss=mse_loss, micro_batch_size=3)
    with casts():
        pipe.push(*map(torch.cat, zip(*batches(40), strict=True)))
    pipe.drain()
    assert sum(leapt) > 25


def kinked(stages=20):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU()) for _ in range(stages)])


def test_units_that_rounding_turns_off_keep_no_stage_apart():
    """In bfloat16, a stage of one sample whose ReLU is off where it is on in the graph has quite other gradients."""
    pipe = pipeback.Pipeline(kinked(), loss=mse_loss, optimizer=OPTIMIZERS["momentum"], method="pb", vectorize=True)
    with casts():
        pipe.push(torch.randn(1, 64), torch.randn(1, 64))
    assert [words.split(",")[0] for words in pipe.vectorized.values()] == ["as a graph", "as one"]


def test_what_is_further_from_float64_than_the_stage_is_refused():
    stage = build("pb", vectorize=False)._engine.stages[1]
    x, g = torch.randn(3, 6), torch.randn(3, 6)
    exact = closeness.exactly(stage, [x], [g], False)
    assert {t.dtype for t in exact} == {torch.float64}
    rounded = [t + 0.1 * t.norm() * torch.sign(t) for t in exact]  # a stage that rounding has moved far away

    def alike(times, exactly=lambda: exact):
        found = [e + times * (t - e) for e, t in zip(exact, rounded, strict=True)]
        return closeness.all_alike(found, rounded, True, exactly)

    assert alike(1.0) and alike(0.0) and alike(-1.0)
    assert not alike(-1.0, lambda: None) and not alike(0.0, lambda: None) and not alike(-3.0) and not alike(4.0)
