"""The order: what it lets run, its agreement with the programs, deadlocks, saving and resuming."""

from functools import partial
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeback.schedules.ops import Op, until
from pipeback.schedules.order import POLICIES, Order, Wave
from pipeback.schedules.programs import fill_drain, flowing, one_f_one_b
from pipeback.schedules.split import late, zb_h1, zb_h2


def flat(waves):
    return [(s, Op(wave.kind, i)) for wave in waves for s, i in wave.ops]


def test_the_steady_state_is_one_wave_of_each_kind():
    order = Order(flowing(2), 4)
    for n in range(1, 12):
        waves = list(order.advance(n))
    assert [(wave.kind, wave.ops) for wave in waves] == [
        ("F", [(0, 10), (1, 10), (2, 10), (3, 10)]),
        ("B", [(0, 4), (1, 6), (2, 8), (3, 10)]),
        ("U", [(0, 4), (1, 6), (2, 8), (3, 10)]),
    ]


def test_groups_of_which_each_loss_is_awaited():
    """Then no two stages can do F at once, but B of all stages can be, since gradients have come before."""
    order = Order(flowing(1, every=8), 4, policy="skewed", by_group=True)
    order.apart = True
    for n in range(1, 12):
        waves = [*order.advance(n), *order.rest()]
    assert [(wave.kind, wave.ops) for wave in waves] == [
        *(("F", [(s, 10)]) for s in range(4)),
        ("B", [(0, 7), (1, 8), (2, 9), (3, 10)]),
        ("U", [(0, 7)]),
    ]


@settings(max_examples=80)
@given(
    st.one_of(
        st.builds(fill_drain, st.integers(1, 5)),
        st.builds(one_f_one_b, st.integers(1, 5)),
        st.builds(flowing, st.integers(0, 2), st.integers(1, 4)),
        st.builds(zb_h1, st.integers(1, 6)),
        st.builds(zb_h2, st.integers(1, 6)),
        st.builds(late, st.integers(0, 2), st.integers(1, 3)),
    ),
    st.integers(1, 5),
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.sampled_from(POLICIES),
    st.integers(0, 3),
)
def test_every_policy_runs_the_programs_and_nothing_else(schedule, stages, pushes, policy, seed):
    order = Order(schedule, stages, policy=policy, seed=seed)
    done, arrived = [], 0
    for n in pushes:
        arrived += n
        done += flat(order.advance(arrived))
    done += flat(order.close(arrived))
    for s in range(stages):
        assert [op for t, op in done if t == s] == list(until(schedule(s, stages), arrived))
    seen = set()
    for s, op in done:
        if op.kind == "F" and s:
            assert (s - 1, op) in seen
        if op.kind in "BI" and s < stages - 1:
            assert (s + 1, op) in seen
        seen.add((s, op))


@settings(max_examples=40)
@given(st.integers(0, 2), st.integers(1, 4), st.integers(1, 12), st.integers(0, 3))
def test_the_quiet_state_does_not_depend_on_the_order(slack, stages, arrived, seed):
    """After n arrivals the set of operations done is the same under every policy."""
    orders = [Order(flowing(slack), stages, policy=p, seed=seed) for p in POLICIES]
    found = [set(flat(chain(order.advance(arrived), order.rest()))) for order in orders]
    assert all(some == found[0] for some in found)


@given(st.integers(0, 3), st.integers(1, 6), st.integers(1, 14))
def test_no_operation_of_a_tick_feeds_another(slack, stages, arrived):
    """What an operation of a wave takes was given in an earlier tick; at a tick a stage does each kind at most once."""
    order, done, tick = Order(flowing(slack), stages, policy="skewed"), dict[tuple[str, int, int], int](), 0
    last = "U"
    for kind, ops in chain(*(order.advance(n) for n in range(1, arrived + 1)), order.rest()):
        tick += "FBU".index(kind) <= "FBU".index(last)
        last = kind
        assert len({s for s, _ in ops}) == len(ops)
        for s, i in ops:
            if kind == "F" and s:
                assert done["F", s - 1, i] < tick
            if kind == "B" and s < stages - 1:
                assert done["B", s + 1, i] < tick
            done[kind, s, i] = tick


@given(
    st.integers(1, 2),
    st.integers(2, 6),
    st.lists(st.tuples(st.integers(1, 14), st.none() | st.integers(0, 9)), min_size=1, max_size=6),
    st.integers(1, 5),
    st.integers(1, 4),
)
def test_ticks_that_are_leapt_are_those_that_would_come(slack, stages, pushes, most, every):
    """Leapt or not, and wherever the rest is broken off, the same operations come in the same ticks."""
    one, other = (Order(flowing(slack, every), stages, policy="skewed") for _ in range(2))
    waves, found, leapt = list[Wave](), list[Wave](), list[int]()

    def leap(span):
        if len(span.stages) == 3:
            return 0  # as where these cannot be leapt
        f, b, now = list(other.forwards), list(other.backwards), span.stages
        done = min(span.ticks, most)
        for _ in range(done):
            found.extend([Wave("F", [(s, f[s]) for s in now]), Wave("B", [(s, b[s]) for s in now])])
            if due := [(s, b[s]) for s in now if not (b[s] + 1) % every]:
                found.append(Wave("U", due))
            for s in now:
                f[s], b[s] = f[s] + 1, b[s] + 1
            now = now if slack == 2 else range(1 - now.start % 2, stages, 2)
        leapt.append(done)
        return done

    other.leap, other.landed = leap, leapt.clear
    arrived = 0
    for pushed, ticks in pushes:
        arrived += pushed
        for order, some in (one, waves), (other, found):
            for wave in order.advance(arrived):
                assert order is one or not leapt  # other operations come after `landed`
                some.append(wave)
            if ticks is not None:
                some.extend(order.rest(partial(next, iter([False] * ticks), True)))
        assert waves == found and one.state() == other.state()
    third = Order(flowing(slack, every), stages, policy="skewed")
    third.resume(flowing(slack, every), other.state())
    waves.extend(one.close(arrived))
    third = list(third.close(arrived))
    found.extend(other.close(arrived))
    assert waves == found and waves[len(waves) - len(third) :] == third


@given(
    st.sampled_from([0, 1, 2]), st.integers(1, 4), st.integers(0, 3),
    st.lists(st.tuples(st.integers(1, 30), st.one_of(st.none(), st.integers(0, 9))), min_size=1, max_size=6),
)  # fmt: skip
def test_groups_that_are_leapt_leave_everything_as_it_was(slack, stages, more, pushes):
    """Whole groups or not, the same has been done when nothing is left, and a state goes on as well."""
    every = slack * (stages - 1) + 1 + more
    one, other = (Order(flowing(slack, every), stages, policy="skewed", by_group=on) for on in (False, True))
    leapt = []

    def leap(span):
        assert other.forwards == other.backwards == other.updated == [other.forwards[0]] * stages
        assert list(span.stages) == list(range(stages)) and span.ticks == every
        leapt.append(other.forwards[0])
        return every

    other.leap = leap
    arrived = 0
    for pushed, ticks in pushes:
        arrived += pushed
        for order in (one, other):
            list(order.advance(arrived))
            list(order.rest(None if ticks is None else partial(next, iter([False] * ticks), True)))
            if ticks is None:
                assert one.state() == other.state() or order is one
    third = Order(flowing(slack, every), stages, policy="skewed")
    list(other.rest())
    third.resume(flowing(slack, every), other.state())
    for order in (one, other, third):
        list(order.close(arrived))
    assert one.state() == other.state() == third.state()
    if every > 1 and len(pushes) == 1:
        assert len(leapt) == max(0, arrived - slack * (stages - 1)) // every


@given(st.integers(0, 3), st.integers(1, 6), st.lists(st.sampled_from([1, 1, 1, 2, 3]), max_size=20))
def test_waves_that_are_repeated_are_those_that_would_come(slack, stages, pushes):
    """With or without a memory of the last micro-batch, the same waves in the same order, to the end."""
    one, other = (Order(flowing(slack), stages) for _ in range(2))
    one._flow = None
    arrived = 0
    for pushed in [*[1] * (slack * stages + 3), *pushes]:
        arrived += pushed
        assert list(one.advance(arrived)) == list(other.advance(arrived))
        assert one.state() == other.state()
        assert pushed > 1 or pushes or arrived < slack * stages + 3 or other._owed
    third = Order(flowing(slack), stages)
    third.resume(flowing(slack), other.state())
    assert flat(one.close(arrived)) == flat(other.close(arrived)) == flat(third.close(arrived))


@pytest.mark.parametrize("schedule", [flowing(0), fill_drain(4)], ids=["none", "GPipe"])
def test_other_schedules_offer_no_leap(schedule):
    order = Order(schedule, 3, policy="skewed")
    order.leap = lambda ticks: pytest.fail("asked")
    list(order.advance(40))


def test_restart_counts_micro_batches_on():
    order = Order(flowing(2), 2)
    list(order.advance(3))
    list(order.close(3))
    assert order.empty
    order.restart(flowing(1))
    assert flat(order.advance(4)) == [(0, Op("F", 3)), (1, Op("F", 3)), (1, Op("B", 3)), (1, Op("U", 3))]


@pytest.mark.parametrize("at", [1, 5, 9])
def test_resume_goes_on_where_the_state_was_taken(at):
    whole, first, second = (Order(flowing(1, every=3), 3) for _ in range(3))
    expected = flat(whole.advance(12))
    before = flat(first.advance(at))
    second.resume(flowing(1, every=3), first.state())
    assert set(before) | set(flat(second.advance(12))) == set(expected)


def test_a_deadlock_is_named():
    def impossible(stage, stages):
        yield Op("F", 0)
        if stage == 1:
            yield Op("F", 1)
        yield from (Op("B", 0), Op("U", 0), Op("F", 1), Op("B", 1), Op("U", 1))

    with pytest.raises(RuntimeError, match=r"deadlocks: stage 0 waits for B0, stage 1 waits for F1"):
        list(Order(impossible, 2).advance(2))


def test_a_program_out_of_turn_is_named():
    def backwards_first(stage, stages):
        yield from (Op("B", 0), Op("F", 0), Op("U", 0))

    with pytest.raises(RuntimeError, match="stage 0: B0 is out of turn"):
        list(Order(backwards_first, 1).advance(1))


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="choose one of grouped, upstream, sticky, random"):
        Order(flowing(1), 2, policy="fast")


@given(
    st.one_of(st.builds(zb_h1, st.integers(1, 6)), st.builds(zb_h2, st.integers(1, 6)), st.builds(late)),
    st.integers(1, 4),
    st.integers(1, 9),
    st.sampled_from(POLICIES),
)
def test_a_split_program_is_resumed_where_its_last_w_may_have_been_done(schedule, stages, arrived, policy):
    one, other = Order(schedule, stages, policy=policy), Order(schedule, stages, policy=policy)
    done = flat(chain(one.advance(arrived), one.rest()))
    other.resume(schedule, one.state())
    rest, again = flat(one.close(arrived)), flat(other.close(arrived))
    for s in range(stages):
        assert [op for op in again if op[0] == s and op[1].kind != "W"] == [
            op for op in rest if op[0] == s and op[1].kind != "W"
        ]
    once = set(done) & set(again)
    assert all(op.kind == "W" for _, op in once) and set(again) - once == set(rest)
