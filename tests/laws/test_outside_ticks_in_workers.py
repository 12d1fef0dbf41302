"""Law: with the loss computed outside and stages that run as one in several threads, every call leaves the weights,
losses and states of the event loop, to rounding, for every method.
"""

from itertools import product
from threading import enumerate as threads

import pytest
import torch
from torch import nn

from pipeback import StageError
from tests.helpers.choice import mostly_rare
from tests.laws.as_one import S, model, same, turns
from tests.laws.cases import CASES, STEADY
from tests.laws.test_outside_ticks import build, cut, masters_are_those_of_push, trained

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")
APART = [case for case in STEADY if CASES[case](S).chunks == 1]  # no worker has several parts of the stages
QUICK = [("cerebras", 2), ("pipedream", 3), ("spectrain", 2), ("gpipe-4", 2), ("one_f_one_b-3", 2), ("pb-slack1", 3)]
SIZES = 8, 3, 1, 8, 5, 2, 1, 1


@pytest.fixture
def halves(monkeypatch):
    """Stages are shared out by their number, and not by what each of them takes."""
    for place in ("distributed.held_stages", "pipeline.stacking"):
        monkeypatch.setattr(f"pipeback.{place}.balance", lambda seconds, workers: [s * workers // S for s in range(S)])


@pytest.mark.parametrize(("case", "workers"), mostly_rare(product(APART, (2, 3)), *QUICK))
def test_judged_where_they_leave(case, workers):
    found, before = [], threads()
    for options in ({"vectorize": True, "workers": workers}, {"vectorize": False}):
        losses, pipe = [], build(case, **options)
        after = [trained(pipe, some, losses) for some in cut(SIZES)]
        told = " ".join(pipe.vectorized.values())
        pipe.drain()
        found.append((*after, torch.stack(losses), *pipe.model.parameters()))
        assert not options["vectorize"] or "as " in told
        pipe.close()
    same(*found)
    assert not [thread for thread in threads() if thread.name == "pipeback" and thread not in before]


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("case", mostly_rare((case for case in APART if turns(case)), "cerebras"))
def test_masters(case):
    masters_are_those_of_push(case, workers=2)


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("case", mostly_rare(APART, "pb", "gpipe-4"))
def test_a_state_in_flight_goes_on(case):
    some = cut((5, 5, 5, 4, 3))
    wanted, before, after = build(case, False), *(build(case, True, workers=2) for _ in range(2))
    for batch in some[:3]:
        trained(wanted, batch)
        trained(before, batch)
    after.load_state_dict(before.state_dict())
    for batch in some[3:]:
        found = [trained(pipe, batch) for pipe in (after, before, wanted)]
        same(found[:1], found[2:])
        same(found[1:2], found[2:])
    for pipe in (before, after):
        pipe.close()


class Trips(nn.Module):
    """Raises an error at its fifth micro-batch, when all others have begun."""

    def __init__(self):
        super().__init__()
        self.calls = torch.zeros((), dtype=torch.long)

    def forward(self, x):
        self.calls += 1
        if self.training and self.calls > 8:
            raise ValueError("tripped")
        return x


def test_an_error_of_a_stage_reaches_the_caller():
    net = model()
    net.insert(2, Trips())
    pipe = build("pb", True, net, workers=2)
    with pytest.raises(StageError, match="stage 2.*tripped"):
        for some in cut():
            trained(pipe, some)
    with pytest.raises(RuntimeError, match="closed"):
        pipe.wait()
    pipe.close()


@pytest.mark.parametrize("at", [0, 3])
def test_an_error_of_the_loss_ends_all(at):
    before = threads()
    pipe = build("pb", True, workers=2)
    xs = [x for x, _ in cut()[0]]

    def judge(n, output):
        if n == at:
            raise KeyError("no such label")
        return torch.ones_like(output)

    with pytest.raises(KeyError, match="no such label"):
        pipe.forward_many(xs, judge=judge)
    with pytest.raises(RuntimeError, match="closed"):
        pipe.forward(xs[0])
    pipe.close()
    assert not [thread for thread in threads() if thread.name == "pipeback" and thread not in before]


def test_what_cannot_be_dropped():
    """Others have begun behind it."""
    pipe = build("pb", True, workers=2)
    some = cut()[0]
    with pytest.raises(ValueError, match="micro-batch 0: the loss depends on no output.*vectorize=False"):
        pipe.forward_many([x for x, _ in some], judge=lambda n, output: None)
    pipe.close()
    pipe = build("pb", True, workers=2)
    pipe.forward(some[0][0])
    with pytest.raises(RuntimeError, match="forget, or a gradient of None.*gradient of zeros.*vectorize=False"):
        pipe.forget()
    pipe.close()
