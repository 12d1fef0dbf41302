"""Law: short pushes, whose losses are read at once, are the event loop to rounding, and leave the pipeline full."""

import pytest
import torch

from tests.helpers.choice import mostly_rare, rare
from tests.laws.as_one import LEAP, S, doubles, pipelines, same, unlike
from tests.laws.cases import everything, weights

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")
SIZES = (9, 1, 5, 23, 2, 15, 1, 1, 30)
EVERY = sorted(LEAP)


def read(pipe, sizes=SIZES, reads=lambda n: True, before=lambda n: None):
    """The losses, read at once after the pushes that `reads` names, and the weights at the end."""
    xs, ys = map(torch.cat, zip(*doubles(sum(sizes)), strict=True))
    losses = []
    for n, (x, y) in enumerate(zip(*(v.split([3 * size for size in sizes]) for v in (xs, ys)), strict=True)):
        before(n)
        losses.append(pipe.push(x, y))
        if reads(n):
            losses[-1] = losses[-1].double() + 0
    pipe.drain()
    return torch.stack([loss.double() for loss in losses]), weights(pipe)


READ = [(case, build) for case in EVERY for build in (None, unlike)]
USUAL = (("pb", None), ("cerebras", unlike), ("pipedream", None), ("spectrain", None), ("pipemare-t3", unlike))


@pytest.mark.parametrize(("case", "build"), mostly_rare(READ, *USUAL))
def test_losses_that_are_read_at_once(case, build, leapt):
    one, other = pipelines(case, **({} if build is None else {"build": build}))
    same(read(other), read(one))
    varies = case in ("pipemare", "pipemare-t1")  # whose rates are annealed: each tick of all has its own
    assert sum(leapt) > 60 and (leapt.some > 30 or varies)


@pytest.mark.parametrize("case", ["pb", "spectrain"])
def test_losses_that_are_read_now_and_then(case, leapt):
    """Where rates change, too, and the state of an optimizer is replaced or cleared."""
    found = []
    for pipe in pipelines(case):

        def change(n, pipe=pipe):
            for s, optimizer in enumerate(pipe.optimizers):
                optimizer.param_groups[0]["lr"] *= 0.9 + 0.01 * s
            if n == 3:
                pipe.optimizers[2].load_state_dict(pipe.optimizers[2].state_dict())
            if n == 5:
                pipe.wait()
                pipe.optimizers[1].state.clear()

        found.append(read(pipe, reads=lambda n: n % 3 == 1, before=change))
    same(*reversed(found))
    assert leapt.some > 10


@pytest.mark.parametrize(
    ("case", "optimizer"), [rare("cerebras", "momentum"), ("pipedream", "momentum"), ("pb", "adamw")]
)
def test_resumed_after_a_loss_was_read(case, optimizer, leapt):
    _, one = pipelines(case, optimizer)
    read(one, (30,))
    xs, ys = map(torch.cat, zip(*doubles(20), strict=True))
    one.push(xs, ys).double()
    float(one.push(xs[:12], ys[:12]))
    _, other = pipelines(case, optimizer)
    other.load_state_dict(one.state_dict())
    for pipe in (one, other):
        float(pipe.push(xs, ys))
    assert torch.equal(everything(one), everything(other)) and leapt.some > 20


def test_a_loss_that_was_read_leaves_the_pipeline_full(leapt):
    """Only what the loss needs is done: all forwards, and what comes before them."""
    _, pipe = pipelines("pb")
    xs, ys = map(torch.cat, zip(*doubles(30), strict=True))
    for _ in range(3):
        float(pipe.push(xs, ys))
        order = pipe._engine.loops[0].order
        assert order.forwards == [order.arrived] * S
        assert [f - b for f, b in zip(order.forwards, order.backwards, strict=True)] == pipe.delays
    before = sum(leapt)
    pipe.push(xs, ys)
    assert sum(leapt) - before == 30 and leapt.some > 3 * (S - 1)  # every tick, also those of some stages


def test_the_ledger_of_short_pushes(leapt):
    """Who reads it sees the same records in the same order of ticks."""
    one, other = pipelines("pipedream")
    for pipe in (one, other):
        read(pipe)
    assert leapt.some and sorted(one.ledger) == sorted(other.ledger)
    seen = [r for r in other.ledger if r.stage == 2 and r.kind == "F"]
    assert [r.mb for r in seen] == sorted(r.mb for r in seen)


def test_options_of_a_run_are_forgotten(leapt):
    """Long or short, pushes leave nothing behind that grows."""
    _, pipe = pipelines("pb")
    xs, ys = map(torch.cat, zip(*doubles(40), strict=True))
    for _ in range(12):
        float(pipe.push(xs, ys))
        for optimizer in pipe.optimizers:
            optimizer.param_groups[0]["lr"] *= 0.99
    worker = pipe._engine.loops[0].worker
    run = worker.executor._steady._run
    assert run is not None and len(run.options.known) < 2 * S + 40
    pipe.wait()
    assert worker.executor._steady._run is None and len(worker.options) < 2 * S


def test_hooks_between_pushes_are_heard(leapt):
    """A hook on an optimizer's step, or on the last stage, ends what is done without it."""
    _, pipe = pipelines("pb")
    xs, ys = map(torch.cat, zip(*doubles(30), strict=True))
    float(pipe.push(xs, ys))
    heard = []
    handle = pipe.optimizers[2].register_step_post_hook(lambda *_: heard.append(2))
    float(pipe.push(xs, ys))
    assert len(heard) >= 30 - 2
    handle.remove()
    pipe._engine.stages[-1].module.register_forward_hook(lambda *_: heard.append("head"))
    float(pipe.push(xs, ys))
    assert heard.count("head") == 30
