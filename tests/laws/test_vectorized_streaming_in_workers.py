"""Law: stages that run as one within each worker, and within each replica, while their weights come from a store, are
the event loop with the same store, to rounding.
"""

import pytest
import torch

import pipeback
from pipeback.streaming.store import HostStore
from tests.helpers.choice import mostly_rare
from tests.laws.as_one import S, doubles, model, planned_and_counted, pushed, same, share_equally, through, turns
from tests.laws.cases import CASES, OPTIMIZERS, allowed, pipeline, weights
from tests.laws.test_vectorized_streaming import STREAMED

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")
APART = [case for case in STREAMED if CASES[case](S).chunks == 1]  # no worker has several parts of the stages
AHEAD = (5, 3, 9, 1)  # stages that a worker fetches ahead


def momentum(case):
    return "momentum" if allowed(case, "momentum") else "sgd"


def pipe_of(case, ahead, **options):
    store = HostStore(prefetch=ahead)
    return pipeline(model(), CASES[case](S), momentum(case), micro_batch_size=3, store=store, **options)


def agree(case, ahead, *, as_one=True, **options):
    wanted = pipe_of(case, ahead, **options)
    found = pipe_of(case, ahead, vectorize=True, **options)
    same(pushed(found), pushed(wanted))
    assert any(told.startswith("as one") for told in found.vectorized.values()) == as_one
    assert found.traffic().peak_stages <= ahead + 1
    found.close()
    wanted.close()


@pytest.mark.parametrize(
    ("case", "workers", "ahead"),
    mostly_rare(
        [(case, workers, AHEAD[(n + workers) % 4]) for n, case in enumerate(APART) for workers in (2, 3)],
        *((c, 2, AHEAD[(APART.index(c) + 2) % 4]) for c in ("pipedream", "cerebras")),
        ("ef", 3, AHEAD[(APART.index("ef") + 3) % 4]),
    ),
)
def test_workers_equal_the_event_loop(case, workers, ahead, monkeypatch):
    """With room for a single stage, each runs by itself."""
    share_equally(monkeypatch)
    alone = turns(case) == 2 and workers == 3  # no worker has two stages that are alike and work at the same time
    agree(case, ahead, workers=workers, as_one=ahead > 2 and not alone)


@pytest.mark.parametrize(
    ("case", "workers"),
    mostly_rare([(c, w) for c in ("pb", "cerebras", "pipedream") for w in (None, 2)], ("cerebras", 2)),
)
def test_replicas_equal_the_event_loop(case, workers):
    agree(case, 5, replicas=2, workers=workers)


@pytest.mark.parametrize("case", mostly_rare(APART, "cerebras"))
def test_the_loss_is_computed_outside(case):
    found = []
    for vectorize in (True, False):
        pipe = pipeback.Pipeline(
            model(), loss=None, optimizer=OPTIMIZERS[momentum(case)], method=CASES[case](S), workers=2,
            store=HostStore(prefetch=5), vectorize=vectorize,
        )  # fmt: skip
        losses = through(pipe, doubles(27))
        told = list(pipe.vectorized.values())
        pipe.drain()
        found.append([losses, weights(pipe)])
        pipe.close()
        assert any(words.startswith("as one") for words in told) == vectorize
    same(*found)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("case", mostly_rare(("pb", "pipedream", "spectrain", "msnag-stash"), "pipedream"))
def test_a_state_in_flight_goes_on(case, monkeypatch):
    """To equal bits in as many workers, with a store; and without one to rounding."""
    share_equally(monkeypatch)
    pipe, again = (pipe_of(case, 5, vectorize=True, workers=2) for _ in range(2))
    resident = pipeline(model(), CASES[case](S), momentum(case), micro_batch_size=3, vectorize=True, workers=2)
    pipe.push(*map(torch.cat, zip(*doubles(11), strict=True)))
    state = pipe.state_dict()
    again.load_state_dict(state)
    resident.load_state_dict(state)
    wanted, *others = (pushed(each, (8, 3)) for each in (pipe, again, resident))
    assert all(torch.equal(a, b) for a, b in zip(wanted, others[0], strict=True))
    same(others[1], wanted)
    for each in (pipe, again, resident):
        each.close()


@pytest.mark.parametrize(
    ("case", "count"), mostly_rare([(c, n) for c in ("pb", "cerebras") for n in (1, 4)], ("cerebras", 4))
)
def test_bytes_predicted_are_bytes_counted(case, count, monkeypatch):
    """A worker that waits for the next push ends its tick, and brings the stages of a stack once more for the rest."""
    share_equally(monkeypatch)
    pipe = pipe_of(case, 3, vectorize=True, workers=2)
    planned, found, whole = planned_and_counted(pipe, count)
    assert round(5 * planned.gradients_out) == found.gradients_out and round(5 * planned.sums_in) == found.sums_in
    assert 0 <= found.fetches - round(5 * planned.fetches) <= 5 * S
    assert 0 <= found.weights_in - round(5 * planned.weights_in) <= 5 * pipe.memory().weights
    assert planned.peak_stages == whole.peak_stages
    pipe.close()
