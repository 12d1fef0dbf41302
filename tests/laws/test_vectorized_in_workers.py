"""Law: stages that run as one within each worker, and within each replica, are the event loop to rounding, for every
method; their states in flight go on as if nothing had been in between.
"""

import itertools
import threading

import pytest
import torch

from pipeback.pipeline import rehearsals
from pipeback.streaming.store import HostStore
from pipeback.vectorized.making.graph_maker import GraphMaker
from tests.helpers.choice import mostly_rare, rare
from tests.laws.as_one import S, doubles, model, pushed, same, share_equally, turns
from tests.laws.cases import CASES, STEADY, allowed, pipeline, weights
from tests.laws.cases import everything as tensors_of

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")
QUICK = ["cerebras", "pipedream", "spectrain", "gpipe-4"]


def trained(case, optimizer="momentum", **options):
    pipe = pipeline(model(), CASES[case](S), optimizer, micro_batch_size=3, **options)
    found = pushed(pipe)
    told = dict(pipe.vectorized)
    pipe.close()
    return found, told


@pytest.mark.parametrize(
    ("case", "workers"),
    mostly_rare([(case, workers) for case in STEADY for workers in (2, 3)], *((c, 2) for c in QUICK), ("pb", 3)),
)
def test_workers_equal_the_event_loop(case, workers):
    optimizer = "momentum" if allowed(case, "momentum") else "sgd"
    wanted, _ = trained(case, optimizer)
    found, told = trained(case, optimizer, vectorize=True, workers=workers)
    same(found, wanted)
    alone = turns(case) == 2 and workers == 3  # no worker has two stages that are alike and work at the same time
    assert any(words.startswith("as one") for words in told.values()) != alone


@pytest.mark.parametrize(
    ("case", "optimizer", "workers"),
    [
        ("pb", "adam", None), ("gpipe-4", "momentum", 2), rare("cerebras", "momentum", 2),
        rare("gpipe-4", "momentum", None), rare("pb", "adam", 2), rare("cerebras", "momentum", None),
    ],
)  # fmt: skip
def test_replicas_equal_the_event_loop(case, optimizer, workers):
    options = {"replicas": 2, "workers": workers}
    wanted, _ = trained(case, optimizer, **options)
    found, told = trained(case, optimizer, vectorize=True, **options)
    same(found, wanted)
    assert any(words.startswith("as one") for words in told.values())


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("case", [rare("pb"), rare("pipedream"), "spectrain"])
def test_a_state_in_flight_goes_on_in_as_many_workers(case, monkeypatch):
    """To equal bits; with another number of workers the stacks are others."""
    share_equally(monkeypatch)
    build = lambda workers: pipeline(model(), CASES[case](S), micro_batch_size=3, vectorize=True, workers=workers)  # noqa: E731
    pipe = build(2)
    pipe.push(*map(torch.cat, zip(*doubles(11), strict=True)))
    state = pipe.state_dict()
    again = build(2)
    again.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(pushed(again, (8, 3)), pushed(pipe, (8, 3)), strict=True))
    assert torch.equal(tensors_of(again), tensors_of(pipe))
    other = build(3)
    before = weights(other)
    with pytest.raises(ValueError, match="saved with 2 workers or ranks, and this pipeline has 3 workers.*workers=2"):
        other.load_state_dict(state)
    assert torch.equal(weights(other), before)
    drained = build(2)
    drained.load_state_dict(state)
    drained.drain()
    other.load_state_dict(drained.state_dict())
    pushed(other)
    for each in (pipe, again, other, drained):
        each.close()


def hooked():
    """The last stage runs by itself, since it is listened to."""
    found = model()
    found[-1].register_forward_hook(lambda *_: None)
    return found


@pytest.mark.parametrize("case", ["pipedream-vertical", "spectrain-v2"])
@pytest.mark.parametrize("build", [model, hooked])
def test_single_micro_batches_after_a_state(case, build):
    """A worker counts what the first stage has done in ticks of which it has a part only, or none."""

    def losses(**options):
        pipe = pipeline(build(), CASES[case](S), "momentum", micro_batch_size=3, **options)
        xs, ys = map(torch.cat, zip(*doubles(50), strict=True))
        found, entered, at = [], [], 0
        for count in (18, 1, 1, 9, 12, 1, 8):
            found.append(pipe.push(xs[at : at + 3 * count], ys[at : at + 3 * count]))
            at += 3 * count
            pipe.state_dict()
            entered.append({loop.worker.entered for loop in pipe._engine.loops})
        pipe.drain()
        after = weights(pipe)
        pipe.close()
        return entered, (torch.stack(found), after)

    entered, found = losses(vectorize=True, workers=2)
    wanted_entered, wanted = losses()
    assert entered == wanted_entered
    same(found, wanted)


@pytest.mark.parametrize(
    "options",
    [rare({"workers": 2}), {"replicas": 2}, {"workers": 2, "store": HostStore(prefetch=5)}],
    ids=["workers", "replicas", "store"],
)
def test_graphs_are_made_while_the_caller_waits(options, monkeypatch):
    """torch borrows the default random generator for it, from which the caller may draw while threads train."""
    learn, threads = GraphMaker.learn, []

    def noted(maker, *given):
        threads.append(threading.current_thread())
        return learn(maker, *given)

    monkeypatch.setattr(GraphMaker, "learn", noted)
    built = model()
    pipe = pipeline(built, CASES["cerebras"](S), micro_batch_size=3, vectorize=True, **options)
    xs, ys = map(torch.cat, zip(*doubles(10), strict=True))
    made = []
    for n, samples in enumerate((2, 24, 9, 22, 24, 10)):
        if n == 4:
            pipe.wait()
            for norm in (part[1] for part in built[1:-1]):
                norm.eps = 0.1
        pipe.push(xs[:samples], ys[:samples])
        pipe.wait()
        made.append(len(threads))
    pipe.close()
    assert len({*made}) > 4, (made, "other micro-batches have made no graphs")
    assert {*threads} == {threading.main_thread()}


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    "options", [rare({}), rare({"replicas": 2}), {"store": HostStore(prefetch=5)}], ids=["plain", "replicas", "store"]
)
def test_stages_stay_with_their_workers(options, monkeypatch):
    """Also where they are timed anew, as after a state was loaded: what is in flight goes on again and again."""
    measured = rehearsals.rehearse
    times = itertools.cycle([[1.0] * (S - 1) + [9.0], [9.0] + [1.0] * (S - 1)])
    monkeypatch.setattr(rehearsals, "rehearse", lambda *given, **named: (next(times), measured(*given, **named)[1]))
    xs, ys = map(torch.cat, zip(*doubles(8), strict=True))
    found = []
    for loads in (0, 3):
        build = lambda: pipeline(  # noqa: E731
            model(), CASES["cerebras"](S), micro_batch_size=3, vectorize=True, workers=2, **options
        )
        pipe = build()
        for n in range(4):
            pipe.push(xs, ys)
            if n < loads:
                state, owner = pipe.state_dict(), pipe.owner
                if n % 2:
                    pipe.close()
                    pipe = build()
                pipe.load_state_dict(state)
                pipe.plan(xs, ys)
                assert pipe.owner == owner
        pipe.drain()
        found.append(weights(pipe))
        pipe.close()
    assert torch.equal(*found)
