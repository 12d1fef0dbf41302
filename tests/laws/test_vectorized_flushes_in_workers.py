"""Law: flushes that each worker does as a whole, a part of the micro-batches after the other, are the event loop to
rounding.
"""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipeback
from pipeback.vectorized.stacks.stack import Stack
from tests.helpers.choice import mostly_rare, rare
from tests.laws.as_one import Doubled, Pair, S, Summed, block, doubles, model, pushed, same
from tests.laws.cases import CASES, OPTIMIZERS, everything, pipeline, weights

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")
SIZES = (9, 1, 23, 8, 4)


def both(case, workers, build=model, sizes=SIZES, vectorize=True, **options):
    """What the event loop finds, and what the workers do; and the pipeline of these, closed."""
    found = []
    for more in ({}, {"vectorize": vectorize, "workers": workers}):
        torch.manual_seed(0)  # random streams begin with it
        pipe = pipeline(build(), CASES[case](S), micro_batch_size=3, **options, **more)
        found.append([*pushed(pipe, sizes), everything(pipe)])
        pipe.close()
    return *found, pipe


@pytest.mark.parametrize(
    ("case", "workers", "options"),
    [
        ("gpipe", 2, {}),
        ("gpipe-4", 3, {}),
        ("gpipe-4", 2, {"clip_norm": 0.02}),
        rare("gpipe", 3, {"activations": "recompute"}),
        rare("gpipe", 2, {"optimizer": "adamw", "clip_norm": pipeback.Clipping(value=0.01)}),
    ],
    ids=str,
)
def test_workers_equal_the_event_loop(case, workers, options, flushed):
    """Every worker does its part of a flush that is there as a whole; what is spread over pushes goes tick by tick."""
    wanted, found, pipe = both(case, workers, **options)
    same(found, wanted)
    assert sum(flushed) > 20 * workers and sum(flushed) % workers == 0
    assert all("in whole flushes" in told for told in pipe.vectorized.values())


def mixed():
    """Stages that run one micro-batch after the other, at either end of a worker and within, and stages of pairs."""
    noisy = lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2))  # noqa: E731
    return nn.Sequential(block(), Doubled(), Pair(), Summed(), noisy(), block(), noisy(), nn.Linear(6, 6)).double()


@pytest.mark.parametrize("cut", mostly_rare(range(1, 8), 2, 5))
def test_stages_of_all_kinds_at_the_cut(cut, flushed, monkeypatch):
    """Outputs and gradients that leave a worker are messages of each micro-batch, whoever has computed them."""
    for place in ("distributed.held_stages", "pipeline.stacking"):
        monkeypatch.setattr(
            f"pipeback.{place}.balance", lambda seconds, workers: [int(workers > 1 and s >= cut) for s in range(8)]
        )
    monkeypatch.setattr(Stack, "flush_gain", lambda stack, count: 9.0)
    wanted, found, pipe = both("gpipe", 2, mixed, vectorize="auto")
    same(found, wanted)
    assert pipe.owner == [int(s >= cut) for s in range(8)] and sum(flushed) > 40


def test_micro_batches_of_several_forms(flushed):
    """The last of a push is short: its part runs one micro-batch after the other."""
    found = []
    for more in ({}, {"vectorize": True, "workers": 2}):
        pipe = pipeline(model(), "gpipe", micro_batch_size=4, **more)
        found.append(pushed(pipe))
        pipe.close()
    same(*reversed(found))
    assert sum(flushed) > 40


def test_a_state_after_part_of_a_flush_goes_on(flushed):
    """Saved in flight by either, and loaded by the other."""
    x, y = (torch.cat(some) for some in zip(*doubles(24), strict=True))
    whole = pipeline(model(), CASES["gpipe-4"](S), micro_batch_size=3)
    one, other = (
        pipeline(model(), CASES["gpipe-4"](S), micro_batch_size=3, vectorize=True, workers=2) for _ in range(2)
    )
    for pipe in (whole, one):
        pipe.push(x[: 3 * 10], y[: 3 * 10])
    other.load_state_dict(one.state_dict())
    for pipe in (whole, one, other):
        pipe.push(x[3 * 10 :], y[3 * 10 :])
        pipe.drain()
    same([weights(one), weights(other)], [weights(whole)] * 2)
    for pipe in (one, other):
        pipe.close()
    assert sum(flushed) >= 2 * (8 + 2 * 12)


class Fragile(nn.Module):
    """Fails when asked to; it draws random numbers, and so runs one micro-batch after the other."""

    def __init__(self):
        super().__init__()
        self.inner, self.broken = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.1)), False

    def forward(self, x):
        if self.broken:
            raise ArithmeticError("broken")
        return self.inner(x)


@pytest.mark.parametrize("at", [1, 5])
def test_a_failure_within_a_flush_names_the_stage(at):
    net = nn.Sequential(*(Fragile() if s == at else block() for s in range(6)), nn.Linear(6, 6)).double()
    pipe = pipeback.Pipeline(
        net, loss=mse_loss, optimizer=OPTIMIZERS["momentum"], method="gpipe", micro_batch_size=3, vectorize=True,
        workers=2,
    )  # fmt: skip
    x, y = (torch.cat(some) for some in zip(*doubles(8), strict=True))
    float(pipe.push(x, y))
    net[at].broken = True
    with pytest.raises(pipeback.StageError, match=f"stage {at} .*the forward failed: broken"):
        float(pipe.push(x, y))
    pipe.close()
