"""The plan of a pipeline whose loss is computed outside: what it predicts is what is counted."""

from itertools import product

import pytest
from torch.nn.functional import mse_loss

import pipeback
from pipeback.plan.forecast import fills, foresee
from pipeback.streaming.disk_store import DiskStore
from pipeback.streaming.store import HostStore
from tests.helpers.choice import mostly_rare
from tests.laws import as_one
from tests.laws.as_one import S, doubles, model
from tests.laws.cases import CASES, OPTIMIZERS

METHODS = ("gpipe", "gpipe-4", "one_f_one_b-3", "pipedream_2bw", "pb", "cerebras", "pipedream", "pipeoptim-xpipe")
WAYS = list(product((0, 1, 5), (1, 3, 8)))


def through(pipe, some):
    """Train on micro-batches, those of a flush at once."""
    xs, ys = zip(*some, strict=True)
    together = pipe.together(len(xs), expected=len(xs))
    for part in [range(len(xs))] if together else [[n] for n in range(len(xs))]:
        outputs = pipe.forward_many([xs[n] for n in part], expected=len(xs))
        for n, output in zip(part, outputs, strict=True):
            mse_loss(output, ys[n]).backward()
        pipe.backward_many([output.grad for output in outputs])
    pipe.step()


def through_ticks(pipe, some):
    as_one.through(pipe, some, [len(some)])


def agree(case, store, count, train=through, vectorize=False):
    pipe = pipeback.Pipeline(
        model(), loss=None, optimizer=OPTIMIZERS["momentum"], method=CASES[case](S), store=store, vectorize=vectorize
    )
    some, steps = doubles(400), 4
    plan = pipe.plan(some[0][0], pushes=steps, expected=count)

    def go(steps):
        for _ in range(steps):
            train(pipe, [some.pop() for _ in range(count)])
        pipe.wait()
        return pipe.traffic()

    before, after = go(fills(plan.facts, count)), go(steps)
    for name in ("weights_in", "fetches", "gradients_out", "sums_in"):
        assert round(steps * getattr(plan.push, name)) == getattr(after, name) - getattr(before, name), name
    assert (plan.push.peak_weights, plan.push.peak_stages) == (after.peak_bytes, after.peak_stages)


@pytest.mark.parametrize(
    ("case", "ahead", "count"),
    mostly_rare(
        ((case, *way) for case in METHODS for way in WAYS),
        *((case, *WAYS[n % len(WAYS)]) for n, case in enumerate(METHODS)),
    ),
)
def test_bytes_predicted_are_bytes_counted(case, ahead, count):
    agree(case, HostStore(prefetch=ahead), count)


def test_with_files(tmp_path):
    agree("pb", DiskStore(tmp_path, prefetch=1), 3)


@pytest.mark.parametrize(
    ("case", "ahead", "count"),
    mostly_rare(((case, *way) for case in METHODS[4:] for way in WAYS), ("pb", 5, 8), ("cerebras", 1, 3)),
)
def test_stages_as_one(case, ahead, count):
    agree(case, HostStore(prefetch=ahead), count, through_ticks, vectorize=True)


@pytest.mark.parametrize("case", ["pb", "cerebras", "pipedream"])
def test_waiting_does_not_depend_on_how_many_go_one_by_one(case):
    pipe = pipeback.Pipeline(
        model(), loss=None, optimizer=OPTIMIZERS["momentum"], method=CASES[case](S), store=HostStore(prefetch=1)
    )
    plan = pipe.plan(doubles(1)[0][0], expected=3)
    assert plan.push.share > 0
    for count in (1, 2, 8, 21):
        assert foresee(plan.facts, count).share == pytest.approx(plan.push.share, rel=1e-6)
