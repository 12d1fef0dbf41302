"""Law: whatever is combined and called in between, training is its equations, and every runtime the event loop."""

import re
import subprocess
import sys

import pytest

from pipeback import methods
from tests.helpers.choice import mostly_rare
from tests.helpers.mutation import LIBRARY

from . import __main__ as command
from .cases import METHODS
from .check import check
from .faults import FAULTS
from .named import NAMED, SEARCH
from .pending import PENDING
from .program import Program
from .reverts import REVERTS, SEARCHED, stale
from .search import fresh, search

USUAL = [(seed, 16) for seed in (279, 172, 373)]  # together they make nearly every kind of call, on every runtime
MORE = [(seed, 50) for seed in (11, 23, 37, 41)]


@pytest.mark.parametrize(("number", "count"), mostly_rare(USUAL + MORE, *USUAL))
def test_programs(number, count):
    search(number, count)


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


def python(*arguments, seconds=800):
    command = [sys.executable, "-m", "tests.fuzz", *arguments]
    return subprocess.run(command, cwd=LIBRARY.parent, capture_output=True, text=True, timeout=seconds)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", SEARCHED)
def test_the_search_finds_what_is_reverted(name):
    done = python("--revert", name, "--seconds", "300")
    assert not done.returncode, f"{name}: nothing was found\n{done.stdout}{done.stderr}"
    found = re.search(r'python -m tests.fuzz "(Program\(.*\))"', done.stderr)
    assert found, done.stderr
    replayed = python(found[1])
    assert not replayed.returncode, f"{name}: what was found fails with the mending, too\n{replayed.stderr}"


SHOWN = {(row.revert, fault) for row in NAMED for fault in row.shown if fault != SEARCH}


@pytest.mark.soak
@pytest.mark.parametrize(("name", "fault"), sorted(SHOWN))
def test_a_program_fails_with_what_is_reverted(name, fault):
    """That it is as it should be without, `test_faults_that_were_found` shows."""
    done = python("--revert", name, "--fault", fault)
    assert not done.returncode, f"{name}: {fault!r} does not show it\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("revert", [True, False])
def test_what_the_command_says(fails, revert, monkeypatch):
    """1 where a program has failed; with a revert, where none has."""

    def searched(number, count, shrink, **where):
        assert not fails, "a program that trains wrongly"

    name = next(iter(SEARCHED))
    monkeypatch.setattr(command, "take_back", lambda name: None)
    monkeypatch.setattr("tests.fuzz.search.search", searched)
    monkeypatch.setattr("tests.fuzz.search.fresh", lambda seconds, count: iter([1, 2]))
    monkeypatch.setattr(sys, "argv", ["tests.fuzz", *(["--revert", name] if revert else [])])
    assert command.main() == int(fails != revert)


def test_every_fault_that_was_named_is_found():
    assert {row.revert for row in NAMED} == set(REVERTS)
    for row in NAMED:
        assert row.shown, row.words
        assert SEARCH not in row.shown or row.revert in SEARCHED, row.words
        assert {*row.shown} <= {SEARCH, *FAULTS}, row.words


def test_every_method_is_drawn():
    """A method that is added without a case here would not be searched."""
    drawn = {type(method.library(4)).__module__.rpartition(".")[2] for method in METHODS.values()}
    assert set(methods.available()) <= drawn


def test_reverts_fit_the_library():
    assert not stale()


def test_what_is_pending_is_a_fault():
    assert set(PENDING) <= set(FAULTS)


def test_a_program_is_what_it_prints():
    program = Program("mixed", 4, method="cerebras", options={"clip_norm": 0.3}, calls=(("push", 3), ("drain",)))
    assert eval(repr(program)) == program
    assert f'"{program!r}"' in program.command
