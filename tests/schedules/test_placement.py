"""Placements, and schedules by worker: grids, bubbles (the published ones, too), and the planner's own simulation."""

from fractions import Fraction
from itertools import accumulate, islice

import pytest

from pipeback.planner.published import rows
from pipeback.planner.routines import routine
from pipeback.planner.simulation import simulate
from pipeback.schedules.ops import until
from pipeback.schedules.placement import KINDS, Placed, place, unwaited
from pipeback.schedules.programs import fill_drain, flowing, one_f_one_b
from pipeback.schedules.split import late, splits, whole, zb_h1, zb_h2
from pipeback.schedules.timeline import bubble, timeline
from pipeback.schedules.worker_programs import as_stages, interleaved, looped_bfs, zb_v
from tests.planner.test_simulation import drawn

PROGRAMS = {"interleaved": interleaved, "looped_bfs": looped_bfs}


def loop(workers, chunks, each=1):
    return place("loop", workers, [part for part in range(workers * chunks) for _ in range(each)])


def by_worker(placed, micro_batches, **options):
    """One text per worker: when it does what in which chunk, one column per unit of time."""
    slots = list(timeline(placed, len(placed.placement.owner), micro_batches, **options))
    rows = [["."] * int(max(slot.end for slot in slots)) for _ in range(placed.placement.workers)]
    for slot in slots:
        worker = placed.placement.owner[slot.stage]
        chunk = next(n for n, part in enumerate(placed.placement.chunks(worker)) if slot.stage in part)
        if slot.op.kind != "U":
            rows[worker][int(slot.start)] = f"{slot.op}{'abc'[chunk]}"
    return [" ".join(f"{text:3}" for text in row).rstrip() for row in rows]


GRIDS = {
    "zb_v": """
        F0a F1a F2a F0b I0b W0b F1b I1b W1b F3a I0a W0a F2b I2b W2b I1a W1a F3b I3b W3b I2a W2a I3a W3a .
        .   F0a F0b F1a F1b I0b W0b F2a I0a W0a F2b I1b W1b F3a I1a W1a F3b I2b W2b I2a I3b I3a W2a W3b W3a
    """,
    "interleaved": """
        F0a F1a F0b F1b F2a B0b F3a B1b F2b B0a F3b B1a .   B2b .   B3b B2a B3a
        .   F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a .
    """,
    "looped_bfs": """
        F0a F1a F2a F3a F0b F1b F2b F3b .   .   B0b B1b B2b B3b B0a B1a B2a B3a
        .   F0a F1a F2a F3a F0b F1b F2b F3b B0b B1b B2b B3b B0a B1a B2a B3a .
    """,
}


def test_where_stages_are():
    assert loop(2, 2).owner == [0, 1, 0, 1]
    assert loop(3, 2, each=2).owner == [0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2]
    assert place("v", 3, range(6)).owner == [0, 1, 2, 2, 1, 0]
    assert place("v", 2, [0, 0, 1, 2, 3, 3]).chunks(0) == [range(2), range(4, 6)]
    assert all(place(kind, 3, [0, 1, 1, 2]).owner == [0, 1, 1, 2] for kind in KINDS)


@pytest.mark.parametrize("name", GRIDS)
def test_grids(name):
    placement = place("v", 2, range(4)) if name == "zb_v" else loop(2, 2)
    found = by_worker(Placed({**PROGRAMS, "zb_v": zb_v}[name](4), placement), 4)
    assert found == [line.strip() for line in GRIDS[name].strip().splitlines()]


@pytest.mark.parametrize("workers, chunks, m", [(2, 2, 4), (4, 2, 8), (4, 3, 12), (3, 5, 6), (8, 2, 32), (5, 1, 7)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_bubble_is_divided_by_the_chunks(name, workers, chunks, m):
    """(p − 1)/(vM + p − 1), exactly: chunks of one worker take as long as the one stage that they are cut from."""
    placed = Placed(PROGRAMS[name](m), loop(workers, chunks))
    slots = list(timeline(placed, workers * chunks, m, {"F": Fraction(1), "B": Fraction(2), "U": Fraction(0)}))
    assert bubble(slots, placed.placement.owner) == float(Fraction(workers - 1, chunks * m + workers - 1))


@pytest.mark.parametrize("row", rows("zero_bubble"), ids=lambda row: f"{row['model']}-{row['micro_batches']}")
def test_published_bubbles(row):
    """Qi et al., Table 9, of the worker that is longest at work: as here, but for the time of one message per worker.

    Here a flush waits for 2vp − 2 messages one after the other: p − 1 until the last worker begins, p for each further
    chunk, and so back. The published rates are those of 2vp − 2 − p; the paper does not say which p wait for nothing.
    """
    f, b, w, comm = (float(row[name]) for name in ("f_ms", "b_ms", "w_ms", "comm_ms"))
    workers, m, chunks = int(row["stages"]), int(row["micro_batches"]), int(row["chunks"])
    placed = Placed(interleaved(m), loop(workers, chunks))
    costs = {"F": f / chunks, "B": (b + w) / chunks, "U": 0}
    slots = list(timeline(placed, workers * chunks, m, costs, message=comm))
    owner = placed.placement.owner
    spans = [[slot for slot in slots if owner[slot.stage] == worker] for worker in range(workers)]
    longest = max(max(slot.end for slot in some) - min(slot.start for slot in some) for some in spans)
    found = 1 - m * (f + b + w) / (longest - workers * comm)
    assert found == pytest.approx(float(row["interleaved"]), abs=1e-4)


@pytest.mark.parametrize("case", range(6))
@pytest.mark.parametrize("name", [*PROGRAMS, "zb_v"])
def test_the_planner_has_the_same_order_and_times(name, case):
    """With fractions: the times are equal, not close. The planner does all updates of a worker as one."""
    workers, chunks, m = [(1, 2, 3), (2, 2, 4), (3, 2, 9), (4, 3, 8), (4, 2, 16), (2, 5, 6)][case]
    chunks = 2 if name == "zb_v" else chunks
    asked, stages = routine(name, workers, m, chunks=chunks), workers * chunks
    placed = Placed(PROGRAMS[name](m), loop(workers, chunks)) if name in PROGRAMS else None
    placed = placed or Placed(zb_v(m), place("v", workers, range(stages)))
    for worker in range(workers):
        both = [
            [(s, op) for s, op in some if op.kind != "U"] for some in (asked.program(worker), placed.until(worker, m))
        ]
        assert both[0] == both[1]
    if workers > 1:
        t = drawn(f"place {name} {case}", stages, alike=True)[0]._replace(
            update=0, back=Fraction(1, 3), forth=Fraction(1, 3)
        )
        found = simulate(asked, [t] * stages, slots=True)
        costs = {"F": t.forward, "B": t.input_gradient + t.weight_gradient, "U": t.update}
        costs |= {"I": t.input_gradient, "W": t.weight_gradient}
        slots = [s for s in timeline(placed, stages, m, costs, message=t.back) if s.op.kind != "U"]
        assert sorted(s for s in found.slots if s.op.kind != "U") == sorted(slots)
        ends = [max(s.end for s in slots if placed.placement.owner[s.stage] == w) for w in range(workers)]
        assert simulate(asked, [t] * stages).ends == ends


@pytest.mark.parametrize("m", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("name", PROGRAMS)
def test_any_number_of_micro_batches(name, m):
    """Groups of workers that do not divide a flush end in a smaller one; a run that ends inside a flush is cut."""
    placed = Placed(PROGRAMS[name](m), loop(3, 2, each=2))
    for stages in placed.placement.parts:
        for s in stages:
            mine = list(islice(placed(s, 12), 4 * m + 2))
            for first in (0, m):
                for kind in "FB":
                    assert [op.mb for op in mine if op.kind == kind][first : first + m] == list(range(first, first + m))
            assert [op.mb for op in mine if op.kind == "U"] == [m - 1, 2 * m - 1]
    for n in range(1, 2 * m + 2):
        done = [(slot.stage, *slot.op) for slot in timeline(placed, 12, n)]
        plain = [(s, *op) for s in range(12) for op in until(fill_drain(m)(s, 12), n)]
        assert sorted(done) == sorted(plain)


def test_the_last_chunk_of_a_v_is_on_the_first_worker():
    """Messages between the two middle parts take no time, as one worker has both."""
    placement = place("v", 2, range(4))
    slots = list(timeline(flowing(2), 4, 1, workers=placement.owner, message=Fraction(1, 2)))
    starts = {(slot.stage, slot.op.kind): slot.start for slot in slots}
    assert [starts[s, "F"] for s in range(4)] == [0, Fraction(3, 2), Fraction(5, 2), 4]
    assert [starts[s, "B"] for s in range(4)] == [9, Fraction(15, 2), Fraction(13, 2), 5]


@pytest.mark.parametrize("workers, m", [(1, 3), (2, 3), (2, 8), (4, 7), (4, 30), (7, 13)])
def test_zb_v_has_no_bubble_and_even_memory(workers, m):
    """Where F, I and W take equally long, from 2p − 1 micro-batches on: no worker waits, and each holds 2p halves."""
    placed = Placed(zb_v(m), place("v", workers, range(2 * workers)))
    slots = [slot for slot in timeline(placed, 2 * workers, m) if slot.op.kind != "U"]
    for worker in range(workers):
        mine = [slot for slot in slots if placed.placement.owner[slot.stage] == worker]
        assert mine[-1].end - mine[0].start == len(mine) == 6 * m
        assert max(accumulate({"F": 1, "I": 0, "W": -1}[slot.op.kind] for slot in mine)) == 2 * workers


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 9])
def test_zb_v_of_few_micro_batches(m, split):
    """It is cut wherever a flush or a run ends; whole backwards come where I would."""
    placed = Placed(zb_v(m, split), place("v", 3, [0, 0, 1, 2, 3, 3, 4, 5]))
    plain = zb_h1(m) if split else whole(zb_h1(m))
    for n in range(1, 2 * m + 2):
        done = [(slot.stage, *slot.op) for slot in timeline(placed, 8, n)]
        assert sorted(done) == sorted((s, *op) for s in range(8) for op in until(plain(s, 8), n))


def without(program, n):
    """The first n micro-batches of a program as text, with I and W in the place of each B."""
    text = " ".join(map(str, until(program, n)))
    return " ".join(f"I{op[1:]} W{op[1:]}" if op[0] == "B" else op for op in text.split())


@pytest.mark.parametrize("workers, m", [(2, 1), (2, 8), (3, 4), (4, 9)])
@pytest.mark.parametrize("name", ["zb_h1", "zb_h2", "zb_v"])
def test_nobody_waits_for_the_first_part(name, workers, m):
    """Its backwards are whole, all others are split, and nothing else is another."""
    if name == "zb_v":
        placement = place("v", workers, range(2 * workers))
        split = Placed(zb_v(m), placement)
    else:
        placement = place("neighbours", workers, [worker for worker in range(workers) for _ in range(2)])
        split = Placed(as_stages({"zb_h1": zb_h1, "zb_h2": zb_h2}[name](m)), placement)
    found, stages = unwaited(split), 2 * workers
    for s in range(stages):
        kinds = {op.kind for op in until(found(s, stages), 3 * m)}
        assert kinds == ({"F", "B", "U"} if s in placement.parts[0] else {"F", "I", "W", "U"})
        assert without(found(s, stages), 3 * m) == " ".join(map(str, until(split(s, stages), 3 * m)))
    assert splits(found, stages) and not splits(found)
    if name == "zb_v":
        for worker in range(workers):
            assert [op for s, op in found.until(worker, m) if s == 0] == (
                list(until(found(0, stages), m)) if worker == 0 else []
            )


def test_what_is_late_stays_split():
    """Where the gradient of the weights does not follow at once, or nothing is split, the program is as it was."""
    placement = place("neighbours", 2, [0, 0, 1, 1])
    for schedule in (late(), one_f_one_b(4), fill_drain(3)):
        for s in range(4):
            found = unwaited(Placed(as_stages(schedule), placement))(s, 4)
            assert list(islice(found, 40)) == list(islice(schedule(s // 2, 2), 40))
