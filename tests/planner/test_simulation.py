"""The simulation: it agrees with `pipeback.timeline`, leaps change nothing, and papers' bubbles come out."""

import random
from fractions import Fraction

import pytest

from pipeback.planner.placed_routines import PLACED
from pipeback.planner.published import rows
from pipeback.planner.routines import NAMES, routine
from pipeback.planner.simulation import simulate
from pipeback.planner.sweeps import StageTimes
from pipeback.schedules.programs import fill_drain, flowing, one_f_one_b
from pipeback.schedules.split import zb_h1, zb_h2
from pipeback.schedules.timeline import bubble, timeline


def drawn(seed, stages, messages=True, alike=False):
    """Times of every stage, as fractions."""
    draw = random.Random(seed)

    def number():
        return Fraction(draw.randrange(12), draw.choice((1, 2, 3)))

    def one():
        forth, back = (number(), number()) if messages else (0, 0)
        return StageTimes(1 + number(), number(), number(), draw.choice((0, number())), forth, back)

    same = one()
    return [same if alike else one() for _ in range(stages)]


SCHEDULES = {
    "fill_drain": lambda m: (fill_drain(m), {}),
    "one_f_one_b": lambda m: (one_f_one_b(m), {}),
    "zb_h1": lambda m: (zb_h1(m), {}),
    "zb_h2": lambda m: (zb_h2(m), {}),
    "flowing 0": lambda m: (flowing(0), {"slack": 0}),
    "flowing 1, 3": lambda m: (flowing(1, 3), {"slack": 1, "every": 3}),
    "flowing 2": lambda m: (flowing(2), {}),
}


@pytest.mark.parametrize("stages, m", [(1, 4), (3, 2), (4, 9), (6, 30)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_it_agrees_with_the_timeline(name, stages, m):
    """Where both can: one stage per worker, and messages that take no time. The times are equal, not close."""
    schedule, options = SCHEDULES[name](m)
    times = drawn(f"{name} {stages} {m}", stages, messages=False)
    costs = [
        {"F": t.forward, "B": t.input_gradient + t.weight_gradient, "U": t.update, "I": t.input_gradient,
         "W": t.weight_gradient}
        for t in times
    ]  # fmt: skip
    wanted = list(timeline(schedule, stages, m, costs))
    found = simulate(routine(name.partition(" ")[0], stages, m, **options), times, slots=True)
    assert sorted(found.slots) == sorted(wanted)
    assert found.idle == pytest.approx(bubble(wanted))


@pytest.mark.parametrize("case", range(8))
@pytest.mark.parametrize("name", NAMES)
def test_leaps_change_nothing(name, case):
    """Ends of all workers, stepped through and leapt over, with fractions: the same."""
    draw = random.Random(f"{name} {case}")
    workers, chunks = draw.randrange(1, 7), draw.choice((2, 3))
    m = draw.randrange(60, 200) if name != "interleaved" else workers * draw.randrange(20, 40)
    asked = routine(name, workers, m, chunks=chunks, slack=draw.choice((0, 1, 2)), every=draw.choice((1, 4)))
    replicas = [drawn(f"{name} {case} {n}", asked.stages, alike=case % 2 == 0) for n in range(1 + case % 3 // 2)]
    stepped, leapt = simulate(asked, replicas, slots=True), simulate(asked, replicas)
    assert (leapt.seconds, leapt.ends, leapt.begins) == (stepped.seconds, stepped.ends, stepped.begins)


@pytest.mark.parametrize("name", NAMES)
def test_leaps_are_made(name, monkeypatch):
    """No more sweeps are done for a million micro-batches than for some thousand."""
    done, chunks = {}, routine(name, 8, 8).chunks
    for m in (4_000, 1_000_000):
        kind = "interleaved.InterleavedSweeps.sweep" if name == "interleaved" else "sweeps.Sweeps.sweep"
        if name in PLACED:
            kind = "placed_simulation.PlacedTimes._sent"  # what waits for another worker
        with monkeypatch.context() as patch:
            count = counted(patch, f"pipeback.planner.{kind}")
            found = simulate(routine(name, 8, m), StageTimes(1.0, 1.1, 0.9, 0.3, 0.1, 0.05))
        done[m] = count()
        assert found.seconds == pytest.approx(3 * m * chunks, rel=0.2)
    assert done[1_000_000] <= done[4_000] < 4_000


def counted(patch, name):
    calls = []
    module, kind, method = name.rsplit(".", 2)
    owner = getattr(__import__(module, fromlist=[kind]), kind)
    whole = getattr(owner, method)
    patch.setattr(owner, method, lambda self, *given: (calls.append(given), whole(self, *given))[1])
    return lambda: len(calls)


@pytest.mark.parametrize("row", rows("zero_bubble"), ids=lambda row: f"{row['model']}-{row['micro_batches']}")
def test_published_bubbles(row):
    """Qi et al., Table 9: rates of 1F1B, ZB-H1 and ZB-H2 to the four digits printed; interleaved within 0.004."""
    f, b, w, comm = (float(row[name]) for name in ("f_ms", "b_ms", "w_ms", "comm_ms"))
    stages, m, chunks = int(row["stages"]), int(row["micro_batches"]), int(row["chunks"])
    for name in ("one_f_one_b", "zb_h1", "zb_h2"):
        found = simulate(routine(name, stages, m), StageTimes(f, b, w, 0, comm, comm))
        assert found.bubble == pytest.approx(float(row[name]), abs=1e-4)
    chunk = StageTimes(f / chunks, b / chunks, w / chunks, 0, comm, comm)
    found = simulate(routine("interleaved", stages, m, chunks=chunks), chunk)
    assert found.bubble == pytest.approx(float(row["interleaved"]), abs=0.004)


def test_the_slowest_replica_holds_up_the_others():
    fast, slow = [StageTimes(1, 1, 0, 1)] * 3, [StageTimes(1, 1, 0, 1)] * 2 + [StageTimes(2, 2, 0, 1)]
    flush = routine("one_f_one_b", 3, 6)
    assert simulate(flush, [fast, slow]).seconds == simulate(flush, slow).seconds > simulate(flush, fast).seconds
    # pipelines that update with every micro-batch meet at every update
    flow = routine("flowing", 3, 60)
    both = simulate(flow, [fast, slow], slots=True)
    assert both.seconds >= simulate(flow, slow).seconds
    assert simulate(flow, [fast, slow]).steady == simulate(flow, slow).steady == 5


def test_the_steady_state():
    assert simulate(routine("flowing", 4, 200), StageTimes(1, 1, 1, Fraction(1, 2))).steady == Fraction(7, 2)
    # the in-flight limit of 1F1B exposes two messages per stage and round trip of S micro-batches
    found = simulate(routine("one_f_one_b", 4, 400), StageTimes(1, 1, 1, 0, Fraction(1, 10), Fraction(1, 10)))
    assert found.steady == 3 + Fraction(6, 10) / 4
    assert simulate(routine("one_f_one_b", 4, 5)).steady is None


def test_mistakes():
    with pytest.raises(ValueError, match="times needs one entry per stage: 3, not 2; give those of each stage"):
        simulate(routine("flowing", 3, 4), [StageTimes()] * 2)


@pytest.mark.parametrize("workers, chunks, m", [(2, 2, 4), (4, 2, 8), (4, 3, 12), (8, 2, 32), (5, 1, 7), (8, 4, 4_000)])
def test_the_bubble_of_looped_bfs(workers, chunks, m):
    """(p − 1)/(vM + p − 1), as published, where stages of a worker take as long as the one that they are cut from."""
    times = StageTimes(Fraction(1, chunks), Fraction(1, chunks), Fraction(1, chunks), Fraction(0))
    found = simulate(routine("looped_bfs", workers, m, chunks=chunks), times)
    assert found.idle == float(Fraction(workers - 1, chunks * m + workers - 1))


@pytest.mark.parametrize("workers, m", [(1, 3), (2, 3), (2, 8), (4, 7), (8, 64), (16, 4_000)])
def test_zb_v_has_no_bubble(workers, m):
    """Where F, I and W take equally long, from 2p − 1 micro-batches on, as published; else at most that of ZB-H1."""
    found = simulate(routine("zb_v", workers, m), StageTimes(1, 1, 1))
    assert found.bubble == 0
    assert [(a, b) for a, b in zip(found.begins, found.ends, strict=True)] == [(w, 6 * m + w) for w in range(workers)]
    half, whole = StageTimes(4, 5, 3), StageTimes(8, 10, 6)
    found = simulate(routine("zb_v", workers, m), half)
    assert found.bubble <= simulate(routine("zb_h1", workers, m), whole).bubble


@pytest.mark.parametrize("row", rows("zero_bubble"), ids=lambda row: f"{row['model']}-{row['micro_batches']}")
def test_zb_v_at_published_times(row):
    """Qi et al., section 6: less idle than ZB-H1 at the same memory, messages included."""
    f, b, w, comm = (float(row[name]) for name in ("f_ms", "b_ms", "w_ms", "comm_ms"))
    stages, m = int(row["stages"]), int(row["micro_batches"])
    found = simulate(routine("zb_v", stages, m), StageTimes(f / 2, b / 2, w / 2, 0, comm, comm)).bubble
    assert found < float(row["zb_h1"])
