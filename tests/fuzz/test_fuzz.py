"""Law: whatever is combined and called in between, training is its equations, and every runtime the event loop."""

import pytest

from .check import check
from .faults import FAULTS
from .pending import PENDING
from .program import Program
from .search import fresh, search

SEEDS = (11, 23, 37, 41)


@pytest.mark.parametrize("number", SEEDS)
def test_programs(number):
    search(number, 50)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("quarter", range(4))
def test_new_programs(quarter):
    """A quarter of an hour; a failure says which command replays it."""
    for number in fresh(900):
        search(number, 100)


def _shown():
    reason = "known and not yet mended; whoever mends it takes it out of tests/fuzz/pending.py"
    marks = pytest.mark.xfail(strict=True, reason=reason)
    return [pytest.param(name, marks=marks if name in PENDING else ()) for name in FAULTS]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", _shown())
def test_faults_that_were_found(name):
    shown = FAULTS[name]
    check(shown) if isinstance(shown, Program) else shown()


def test_what_is_pending_is_a_fault():
    assert set(PENDING) <= set(FAULTS)


def test_a_program_is_what_it_prints():
    program = Program("mixed", 4, method="cerebras", options={"clip_norm": 0.3}, calls=(("push", 3), ("drain",)))
    assert eval(repr(program)) == program
    assert f'"{program!r}"' in program.command
