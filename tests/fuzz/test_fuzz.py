"""Law: whatever is combined and called in between, training is its equations, and every runtime the event loop."""

import subprocess
import sys

import pytest

from tests.mutation import LIBRARY

from .check import check
from .faults import FAULTS
from .pending import PENDING
from .program import Program
from .reverts import REVERTS, stale
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


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", REVERTS)
def test_the_search_finds_what_is_reverted(name):
    command = [sys.executable, "-m", "tests.fuzz", "--revert", name, "--seconds", "300"]
    done = subprocess.run(command, cwd=LIBRARY.parent, capture_output=True, text=True, timeout=800)
    assert not done.returncode, f"{name}: nothing was found\n{done.stdout}{done.stderr}"
    assert "python -m tests.fuzz" in done.stderr  # a program that shows it


def test_reverts_fit_the_library():
    assert not stale()


def test_what_is_pending_is_a_fault():
    assert set(PENDING) <= set(FAULTS)


def test_a_program_is_what_it_prints():
    program = Program("mixed", 4, method="cerebras", options={"clip_norm": 0.3}, calls=(("push", 3), ("drain",)))
    assert eval(repr(program)) == program
    assert f'"{program!r}"' in program.command
