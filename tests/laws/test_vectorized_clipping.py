"""Law: where each stage's gradient is clipped, whole ticks are the event loop to rounding."""

from functools import partial

import pytest
import torch
from torch.nn.functional import mse_loss

import pipeback
from tests.helpers.choice import mostly_rare, rare
from tests.laws.as_one import FLUSH, GROUPED, LEAP, TURNED, doubles, pipelines, pushed, same, unlike
from tests.laws.cases import OPTIMIZERS, allowed, everything, weights

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")
BOTH = pipeback.Clipping(0.02, value=0.004)
EVERY = [*LEAP, *TURNED, *GROUPED, *FLUSH]


@pytest.mark.parametrize(
    "case",
    mostly_rare(
        EVERY, "cerebras", "pipemare-t3", "msnag", "pipedream_2bw", "pipedream-vertical", "gpipe-4",
    ),
)  # fmt: skip
@pytest.mark.parametrize("clip", mostly_rare([0.02, pipeback.Clipping(value=0.003), BOTH], BOTH), ids=str)
def test_every_method(case, clip, leapt):
    optimizer = "adamw" if case in TURNED else "momentum"
    one, other = (pushed(pipe) for pipe in pipelines(case, optimizer, clip_norm=clip))
    free = pushed(next(pipelines(case, optimizer)))
    same(other[0], one[0]), same(other[1], one[1]), same(other[2], one[2])
    assert sum(leapt) > 20 or case in (*FLUSH, *GROUPED)
    assert not torch.allclose(free[2][0], one[2][0], rtol=1e-3), "nothing was clipped"


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize("case", mostly_rare(["pb", "cerebras", "lwp-weight"], "pb", "cerebras"))
def test_every_optimizer(case, optimizer, leapt):
    if allowed(case, optimizer):
        one, other = (pushed(pipe) for pipe in pipelines(case, optimizer, clip_norm=BOTH))
        for found, wanted in zip(other, one, strict=True):
            same(found, wanted)


@pytest.mark.parametrize("case", [rare("pb"), "cerebras", "pipedream"])
def test_stages_that_are_not_alike(case, leapt):
    """Two stacks, and stages outside of them."""
    one, other = (pushed(pipe) for pipe in pipelines(case, build=unlike, clip_norm=BOTH))
    for found, wanted in zip(other, one, strict=True):
        same(found, wanted)
    assert sum(leapt) > 20


@pytest.mark.parametrize("case", [rare("pb"), "cerebras", "lwp-weight"])
def test_bounds_that_change_between_pushes(case, leapt):
    """Whole ticks go on."""
    xs, ys = map(torch.cat, zip(*doubles(30), strict=True))
    found = []
    for pipe in pipelines(case):
        for norm, value in ((None, None), (0.02, None), (0.03, 0.01), (None, 0.005), (None, None)):
            before = sum(leapt)
            pipe.clip(norm=norm, value=value)
            float(pipe.push(xs, ys))
            assert (sum(leapt) > before) == bool(found)
        pipe.drain()
        found.append(pipe.model.state_dict().values())
    same(*found)


@pytest.mark.parametrize("case", [rare("pb"), "cerebras"])
def test_resumed_in_flight(case, leapt):
    """To equal bits, and from the event loop."""
    xs, ys = map(torch.cat, zip(*doubles(30), strict=True))
    loop, one = pipelines(case, clip_norm=BOTH)
    for pipe in (loop, one):
        pipe.push(xs, ys).double()
    _, again = pipelines(case, clip_norm=BOTH)
    again.load_state_dict(one.state_dict())
    _, other = pipelines(case, clip_norm=BOTH)
    other.load_state_dict(loop.state_dict())
    for pipe in (loop, one, again, other):
        pipe.push(xs, ys).double()
    assert torch.equal(everything(one), everything(again))
    same([weights(other)], [weights(loop)])
    assert sum(leapt) > 60


@pytest.mark.parametrize("workers", [2])
@pytest.mark.parametrize("case", ["pb", "cerebras"])
def test_in_workers(case, workers, leapt):
    one, other = (pushed(pipe) for pipe in pipelines(case, clip_norm=BOTH, workers=workers))
    for found, wanted in zip(other, one, strict=True):
        same(found, wanted)
    assert sum(leapt) > 20


def test_a_gradient_of_one_stage_bounds_no_other():
    """A stage whose gradient is large alone is clipped."""
    xs, ys = map(torch.cat, zip(*doubles(40), strict=True))
    found = []
    for pipe in pipelines("pb"):
        with torch.no_grad():
            for p in pipe.model[4].parameters():
                p.mul_(30)  # so that stages before it have large gradients
        pipe.clip(norm=0.05)
        pipe.push(xs, ys).double()
        pipe.drain()
        found.append(pipe.model.state_dict().values())
    same(*found)


@pytest.mark.parametrize(
    "clip", [rare(0.2), rare(pipeback.Clipping(value=0.1)), pipeback.Clipping(0.3, value=0.05)], ids=str
)
def test_a_watch_counts_what_is_clipped(clip, leapt):
    """Of every stage, the last one included, whether a tick does all or some of them."""
    shares = []
    for pipe in pipelines("pb", clip_norm=clip):
        xs, ys = map(torch.cat, zip(*doubles(60), strict=True))
        watch = pipe.watch()
        for x, y in zip(xs.split(30), ys.split(30), strict=True):
            pipe.push(x, y).double()
        shares.append(watch.clip_share)
    assert shares[1] == shares[0] and sum(0 < share < 1 for share in shares[0]) > 3, shares
    assert sum(leapt) > 20


def test_a_compiled_tick_clips_nothing():
    """So `clip_norm` keeps ticks from being compiled, and says so."""
    pipe = pipeback.Pipeline(
        next(pipelines("pb")).model, loss=mse_loss, optimizer=partial(torch.optim.SGD, lr=0.01), method="pb",
        micro_batch_size=3, vectorize="auto", compile={"backend": "aot_eager"}, clip_norm=0.1,
    )  # fmt: skip
    pipe.push(*map(torch.cat, zip(*doubles(20), strict=True)))
    assert "no compiled tick does" in list(pipe.vectorized.values())[-1]
