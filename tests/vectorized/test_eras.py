"""Graphs are made anew when modules compute something else, but not when that is so again and again, for short."""

import time

import pytest
import torch

from pipeback.vectorized.making import eras
from pipeback.vectorized.making.eras import Eras
from pipeback.vectorized.tracing.capture import Unfit
from tests.laws.as_one import doubles, model
from tests.laws.cases import pipeline


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 0.0

    monkeypatch.setattr(time, "perf_counter", lambda: Clock.now)
    monkeypatch.setattr(Eras, "spent", 0.0)
    return Clock


def era(some, clock, making, used):
    """An era in which graphs are made, if that is worth it, and used."""
    some.begin()
    try:
        some.check()
    except Unfit:
        clock.now += used
        return False
    with some.making():
        clock.now += making
    clock.now += used
    return True


def test_eras_that_are_too_short(clock):
    some = Eras()
    assert all(era(some, clock, 2.0, 1.0) for _ in range(eras.TIMES))
    assert not any(era(some, clock, 2.0, 1.0) for _ in range(5))
    assert not era(some, clock, 2.0, 3.0)  # it is not known yet that this one stays
    assert era(some, clock, 2.0, 1.0)
    assert some.number == eras.TIMES + 7


def test_eras_that_are_long_enough(clock):
    some = Eras()
    assert all(era(some, clock, 2.0, used) for used in (1.0, 1.0, 3.0) * 5)


def test_what_other_stacks_make_is_no_use(clock):
    some, other = Eras(), Eras()
    for _ in range(eras.TIMES):
        some.begin()
        for each in (some, other):
            with each.making():
                clock.now += 2.0
        clock.now += 1.0
    some.begin()
    with pytest.raises(Unfit, match="changes too often"):
        some.check()


def test_times_decide_nothing_where_bits_must_not_depend_on_them(clock, deterministic):
    some = Eras()
    assert all(era(some, clock, 2.0, 1.0) for _ in range(10))
    assert torch.are_deterministic_algorithms_enabled()


def test_a_change_in_all_stages_begins_one_era():
    built = model()
    pipe = pipeline(built, "pb", micro_batch_size=3, vectorize=True)
    xs, ys = map(torch.cat, zip(*doubles(8), strict=True))
    for eps in (None, 0.1, 0.2):
        pipe.wait()
        for norm in (part[1] for part in built[1:-1] if eps):
            norm.eps = eps
        pipe.push(xs, ys)
    (stack,) = [stack for stack in pipe._engine.setting.stacks if not stack.alone]
    assert stack.eras.number == 2
