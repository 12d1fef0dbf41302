"""Routines are the programs of pipeback's own schedules, and those that the papers describe."""

import pytest

from pipeback.planner.routines import NAMES, read, routine
from pipeback.schedules.ops import Op, until
from pipeback.schedules.programs import fill_drain, flowing, one_f_one_b
from pipeback.schedules.split import zb_h1, zb_h2

SIZES = [(1, 1), (1, 5), (2, 1), (2, 7), (3, 2), (4, 4), (5, 3), (6, 20)]
SCHEDULES = {
    "fill_drain": lambda m: (fill_drain(m), {}),
    "one_f_one_b": lambda m: (one_f_one_b(m), {}),
    "zb_h1": lambda m: (zb_h1(m), {}),
    "zb_h2": lambda m: (zb_h2(m), {}),
    **{
        f"flowing({slack}, {every})": lambda m, slack=slack, every=every: (
            flowing(slack, every),
            {"slack": slack, "every": every},
        )
        for slack in (0, 1, 2, 3)
        for every in (1, 3)
    },
}


def programs(found):
    return [[op for _, op in found.program(s)] for s in range(found.workers)]


@pytest.mark.parametrize("stages, m", SIZES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_routine_does_what_its_schedule_says(name, stages, m):
    schedule, options = SCHEDULES[name](m)
    wanted = [list(until(schedule(s, stages), m)) for s in range(stages)]
    assert programs(routine(name.partition("(")[0], stages, m, **options)) == wanted
    assert programs(read(schedule, stages, m)) == wanted


def test_what_is_no_routine_is_refused():
    def odd(stage, stages):
        yield from (Op("F", 0), Op("F", 1), Op("B", 0), Op("B", 1), Op("F", 2), Op("B", 2), Op("U", 2))

    with pytest.raises(ValueError, match="stage 0: the schedule does not consist of rounds"):
        read(odd, 2, 3)


def text(found, worker):
    return " ".join(f"{op.kind}{op.mb}" for _, op in found.program(worker))


def test_zero_bubble_orders():
    """Figures 2 and 3 of the paper, for three stages and four micro-batches."""
    h1, h2 = routine("zb_h1", 3, 4), routine("zb_h2", 3, 4)
    assert text(h1, 0) == "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3 U3"
    assert text(h1, 2) == "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3 U3"
    assert text(h2, 0) == "F0 F1 F2 F3 I0 W0 I1 W1 I2 W2 I3 W3 U3"
    assert text(h2, 1) == "F0 F1 F2 I0 F3 I1 I2 W0 I3 W1 W2 W3 U3"


def test_interleaved_order():
    """Megatron's: groups of as many micro-batches as workers, chunk after chunk; backwards from the last chunk."""
    found = routine("interleaved", 2, 4, chunks=2)
    ops = list(found.program(0))
    forwards = [(stage, op.mb) for stage, op in ops if op.kind == "F"]
    backwards = [(stage, op.mb) for stage, op in ops if op.kind == "B"]
    assert forwards == [(0, 0), (0, 1), (2, 0), (2, 1), (0, 2), (0, 3), (2, 2), (2, 3)]
    assert backwards == [(2, 0), (2, 1), (0, 0), (0, 1), (2, 2), (2, 3), (0, 2), (0, 3)]
    assert [op.kind for _, op in ops[:6]] == ["F", "F", "F", "F", "F", "B"]
    assert programs(routine("interleaved", 3, 5, chunks=1)) == programs(routine("one_f_one_b", 3, 5))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_in_flight_is_counted_on_the_program(name):
    for workers, m in ((1, 3), (3, 3), (3, 12), (4, 4), (5, 40)):
        m = m if name != "interleaved" else workers * m
        found = routine(name, workers, m)
        for w in range(workers):
            flying = unfinished = most = 0
            peak = (0.0, 0, 0)
            for _, op in found.program(w):
                flying += (op.kind == "F") - (op.kind in "BI")
                unfinished += (op.kind == "I") - (op.kind == "W")
                most = max(most, flying)
                peak = max(peak, (flying + 0.9 * unfinished, flying, unfinished))
            assert found.in_flight(w) == most
            assert (found.in_flight(w), found.unfinished(w)) == peak[1:]


@pytest.mark.parametrize("call, says", [
    (lambda: routine("1f1b", 4, 8), "there is no routine '1f1b'; there are fill_drain, one_f_one_b"),
    (lambda: routine("flowing", 0, 8), "workers must be at least 1, but is 0"),
    (lambda: routine("interleaved", 4, 6), "6 micro-batches are no multiple of 4 workers.*give micro_batches=8"),
])  # fmt: skip
def test_mistakes(call, says):
    with pytest.raises(ValueError, match=says):
        call()
