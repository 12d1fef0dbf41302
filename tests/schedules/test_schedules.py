"""Schedules against the grids drawn beside them, their ragged ends, their delays, horizons and bubbles."""

from fractions import Fraction
from itertools import islice, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeback.draw.figures import grid
from pipeback.planner.published import rows
from pipeback.schedules.ops import Op, until
from pipeback.schedules.programs import fill_drain, flowing, one_f_one_b
from pipeback.schedules.split import late, whole, zb_h1, zb_h2
from pipeback.schedules.timeline import Horizon, bubble, delays, horizons, in_flight, timeline

GRIDS = {
    "fill_drain(4)": (
        fill_drain(4),
        """
        0 │ F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
        1 │ .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
        2 │ .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .
        """,
    ),
    "one_f_one_b(4)": (
        one_f_one_b(4),
        """
        0 │ F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
        1 │ .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
        2 │ .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .
        """,
    ),
    "zb_h1(4)": (
        zb_h1(4),
        """
        0 │ F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        1 │ .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        2 │ .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
        """,
    ),
    "zb_h2(6)": (
        zb_h2(6),
        """
        0 │ F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 .  .
        1 │ .  F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5 .
        2 │ .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5
        """,
    ),
    "late(1)": (
        late(1),
        """
        0 │ F0 F1 F2 .  .  I0 F3 I1 W0 F4 I2 W1 F5 I3 …
        1 │ .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 …
        2 │ .  .  F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 F4 …
        """,
    ),
    "flowing(2)": (
        flowing(2),
        """
        0 │ F0 F1 F2 F3 F4 B0 F5 B1 F6 B2 …
        1 │ .  F0 F1 F2 B0 F3 B1 F4 B2 F5 …
        2 │ .  .  F0 B0 F1 B1 F2 B2 F3 B3 …
        """,
    ),
    "flowing(1)": (
        flowing(1),
        """
        0 │ F0 F1 F2 .  .  B0 F3 B1 F4 B2 …
        1 │ .  F0 F1 .  B0 F2 B1 F3 B2 F4 …
        2 │ .  .  F0 B0 F1 B1 F2 B2 F3 B3 …
        """,
    ),
}


@pytest.mark.parametrize("name", GRIDS)
def test_grids(name):
    schedule, picture = GRIDS[name]
    wanted = [line.strip() for line in picture.strip().splitlines()]
    width = {"flowing": 10, "late": 14}.get(name.partition("(")[0])
    found = grid(schedule, 3, 8 if width else int(name[-2]), width=width)
    assert found.splitlines() == wanted


def text(ops):
    return " ".join(map(str, ops))


def test_until_issues_the_update_of_a_ragged_end():
    assert text(until(fill_drain(4)(0, 2), 6)) == "F0 F1 F2 F3 B0 B1 B2 B3 U3 F4 F5 B4 B5 U5"
    assert text(until(one_f_one_b(4)(0, 3), 5)) == "F0 F1 F2 B0 F3 B1 B2 B3 U3 F4 B4 U4"
    assert text(until(one_f_one_b(8)(0, 3), 2)) == "F0 F1 B0 B1 U1"
    assert text(until(flowing(1, every=2)(0, 2), 3)) == "F0 F1 B0 F2 B1 U1 B2 U2"
    assert text(until(flowing(2)(0, 2), 0)) == ""


SCHEDULES = st.one_of(
    st.builds(fill_drain, st.integers(1, 6)),
    st.builds(one_f_one_b, st.integers(1, 6)),
    st.builds(flowing, st.integers(0, 3), st.integers(1, 5)),
    st.builds(zb_h1, st.integers(1, 6)),
    st.builds(zb_h2, st.integers(1, 6)),
    st.builds(late, st.integers(0, 3), st.integers(1, 4)),
)


@settings(max_examples=60)
@given(SCHEDULES, st.integers(1, 5), st.integers(0, 14))
def test_until_is_complete_and_in_order(schedule, stages, n):
    for s in range(stages):
        ops = list(until(schedule(s, stages), n))
        split = any(op.kind == "I" for op in ops)
        for kind in "FIW" if split else "FB":
            assert [op.mb for op in ops if op.kind == kind] == list(range(n))
        updates = [op.mb for op in ops if op.kind == "U"]
        assert updates == sorted(set(updates)) and (not n or updates[-1] == n - 1)
        for at, op in enumerate(ops):
            if op.kind in "BI":
                assert Op("F", op.mb) in ops[:at]
            if op.kind == "W":
                assert Op("I", op.mb) in ops[:at]
            if op.kind == "U":
                assert ops[at - 1] == Op("W" if split else "B", op.mb)


@settings(max_examples=40)
@given(SCHEDULES, st.integers(1, 5), st.integers(1, 12))
def test_a_timeline_respects_programs_and_data(schedule, stages, n):
    end = {}
    costs = {"F": 2, "B": 3, "I": 2, "W": Fraction(4, 3), "U": Fraction(1, 2)}
    for slot in timeline(schedule, stages, n, costs, message=Fraction(1, 5)):
        kind, i = slot.op
        if kind == "F" and slot.stage:
            assert end["F", slot.stage - 1, i] + Fraction(1, 5) <= slot.start
        if kind in "BI" and slot.stage < stages - 1:
            assert end[kind, slot.stage + 1, i] + Fraction(1, 5) <= slot.start
        if kind == "W":
            assert end["I", slot.stage, i] <= slot.start
        end[kind, slot.stage, i] = slot.end
    assert sum(kind in "BW" for kind, _, _ in end) == stages * n


@pytest.mark.parametrize("stages", [1, 2, 3, 7])
def test_delays_are_counted(stages):
    for slack in (0, 1, 2, 3):
        wanted = [slack * (stages - 1 - s) for s in range(stages)]
        assert delays(flowing(slack), stages) == wanted
        assert in_flight(flowing(slack), stages) == [d + 1 for d in wanted]
    for n in (1, 3):
        assert delays(late(2, n), stages) == [2 * (stages - 1 - s) + n for s in range(stages)]
    assert delays(fill_drain(4), stages) == delays(one_f_one_b(4), stages) == [0] * stages
    assert delays(zb_h1(4), stages) == delays(zb_h2(4), stages) == [0] * stages
    assert in_flight(zb_h1(99), stages) == [stages] * stages  # as many as 1F1B at the first stage, and at all of them
    assert in_flight(zb_h2(99), stages) == [2 * stages - 1] * stages
    assert in_flight(fill_drain(5), stages) == [5] * stages
    assert in_flight(one_f_one_b(5), stages) == [min(5, stages - s) for s in range(stages)]


def test_delays_within_a_group_are_the_largest():
    assert delays(flowing(2, every=3), 4) == [2, 2, 1, 0]  # 6, 4, 2 and 0 micro-batches ahead, three an update
    assert delays(flowing(1, every=200), 3) == [1, 1, 0]  # also when a group is longer than any fill


@pytest.mark.parametrize("stages", [1, 2, 3, 8, 13])
def test_what_is_computed_is_what_is_counted(stages):
    """Of a function of which nothing is known, the program is counted."""
    known = [flowing(slack, every) for slack in range(4) for every in (1, 2, 5, 30)]
    known += [make(m) for make in (fill_drain, one_f_one_b, zb_h1, zb_h2) for m in (1, 2, 5, 30)]
    known += [late(slack, n) for slack in range(3) for n in (1, 2, 5)]
    for schedule in known:
        unknown = lambda s, S, of=schedule: of(s, S)  # noqa: E731
        assert delays(schedule, stages) == delays(unknown, stages), schedule
        assert in_flight(schedule, stages) == in_flight(unknown, stages), schedule
    assert horizons(flowing(1), stages) == horizons(lambda s, S: flowing(1)(s, S), stages)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
def test_spectrain_horizons_fall_out_of_the_timeline(stages):
    wanted = [Horizon(k // 2 + stages - k - 1, k // 2) for k in range(stages)]
    assert horizons(lambda s, S: flowing(1)(s, S), stages) == wanted  # counted, as of a schedule that is not known


@pytest.mark.parametrize("slack", [3, 8, 16, 64])
@pytest.mark.parametrize("stages", [2, 3, 5])
def test_on_the_first_stage_the_horizon_is_the_delay(slack, stages):
    """What ends on stage 0 between F(i) and B(i) there are the updates of the delay, however long the filling takes."""
    first = horizons(flowing(slack), stages)[0]
    assert first == Horizon(delays(flowing(slack), stages)[0], 0)


@pytest.mark.parametrize(("p", "m"), [(2, 3), (4, 4), (5, 16)])
def test_bubbles(p, m):
    wanted = (p - 1) / (m + p - 1)
    assert bubble(timeline(fill_drain(m), p, m)) == pytest.approx(wanted, abs=1e-12)
    assert bubble(timeline(one_f_one_b(m), p, m)) == pytest.approx(wanted, abs=1e-12)
    assert bubble(timeline(flowing(0), p, m)) == pytest.approx(1 - 1 / p, abs=1e-12)


def test_filling_and_draining_takes_the_steps_of_the_convention():
    """N samples take N + 2(S − 1) steps of one forward and one backward each: at the last stage, back to back."""
    stages, n = 4, 12
    slots = [s for s in timeline(flowing(2), stages, n) if s.op.kind != "U"]
    last = [s for s in slots if s.stage == stages - 1]
    assert max(s.end for s in last) - min(s.start for s in last) == 2 * n
    assert max(s.end for s in slots) == 2 * n + 2 * (stages - 1)


def test_workers_share_stages():
    slots = list(timeline(flowing(2), 4, 40, workers=[0, 0, 1, 1]))
    for worker in (0, 1):
        mine = sorted((s.start, s.end) for s in slots if s.stage // 2 == worker and s.end > s.start)
        assert all(a[1] <= b[0] for a, b in pairwise(mine))
    assert bubble(slots, [0, 0, 1, 1]) < 0.06


def test_a_deadlock_is_named():
    def impossible(stage, stages):
        i = 0
        while True:  # stage 1 wants two forwards before a backward, stage 0 a backward before the second forward
            if stage:
                yield from (Op("F", i), Op("F", i + 1), Op("B", i), Op("B", i + 1), Op("U", i + 1))
            else:
                yield from (Op("F", i), Op("B", i), Op("F", i + 1), Op("B", i + 1), Op("U", i + 1))
            i += 2

    with pytest.raises(RuntimeError, match=r"deadlocks.*stage 0 for B0, stage 1 for F1"):
        list(timeline(impossible, 2, 4))


def test_programs_are_endless():
    assert len(list(islice(flowing(2)(0, 3), 10_000))) == 10_000


@pytest.mark.parametrize(
    "build", [lambda: fill_drain(0), lambda: one_f_one_b(-1), lambda: flowing(-1), lambda: flowing(1, every=0)]
)
def test_nonsense_is_refused(build):
    with pytest.raises(ValueError, match=r"must be a whole number of at least \d, but is"):
        build()


@pytest.mark.parametrize("row", rows("zero_bubble"), ids=lambda row: f"{row['model']}-{row['micro_batches']}")
def test_published_bubbles(row):
    """Qi et al., Table 9, on the timelines: the idle share of the stage that is longest at work, to four digits."""
    f, i, w, comm = (Fraction(row[name]) for name in ("f_ms", "b_ms", "w_ms", "comm_ms"))
    stages, m = int(row["stages"]), int(row["micro_batches"])
    costs = {"F": f, "B": i + w, "I": i, "W": w, "U": 0}
    for name, schedule in (("one_f_one_b", one_f_one_b), ("zb_h1", zb_h1), ("zb_h2", zb_h2)):
        slots = list(timeline(schedule(m), stages, m, costs, message=comm))
        spans = [[slot for slot in slots if slot.stage == s] for s in range(stages)]
        longest = max(mine[-1].end - mine[0].start for mine in spans)
        assert float(1 - m * (f + i + w) / longest) == pytest.approx(float(row[name]), abs=1e-4), name


@pytest.mark.parametrize("stages, m", [(2, 2), (3, 6), (4, 12), (8, 24)])
def test_bubbles_of_zero_bubble_schedules(stages, m):
    """Table 2 of the paper, for any times of F ≥ W and I ≥ W: what a worker idles while it is at work."""
    costs = {"F": 7, "B": 11, "I": 6, "W": 5, "U": 0}
    for schedule, wanted in ((one_f_one_b, 7 + 11), (zb_h1, 7 + 6 - 5), (zb_h2, max(0, 7 + 6 - 2 * 5))):
        slots = list(timeline(schedule(m), stages, m, costs))
        first = [slot for slot in slots if slot.stage == 0]
        idle = first[-1].end - first[0].start - m * 18
        if m >= 2 * stages - 1 or schedule is not zb_h2:
            assert idle == (stages - 1) * wanted, schedule
    assert bubble(timeline(zb_h2(40 * stages), stages, 40 * stages)) < 1 / 40


def test_a_schedule_with_whole_backwards():
    for s in range(3):
        assert text(until(whole(zb_h1(5))(s, 3), 12)) == text(until(one_f_one_b(5)(s, 3), 12))
