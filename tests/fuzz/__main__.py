"""Replay one program, fit or forward, as a failing search prints it, or search on.

python -m tests.fuzz "Program(...)"
python -m tests.fuzz "Fit(...)"
python -m tests.fuzz "Forward(...)"
python -m tests.fuzz "Step(...)"
python -m tests.fuzz "Written(...)"
python -m tests.fuzz --seconds 1200
python -m tests.fuzz --fits --seconds 1200      # under Lightning, on one device and on two
python -m tests.fuzz --forwards --seconds 1200  # models whose forwards are drawn, too
python -m tests.fuzz --steps --seconds 1200     # the same as training_steps that Lightning's strategy follows
python -m tests.fuzz --written --seconds 1200   # training_steps of plain code, for which graphs stand
python -m tests.fuzz --revert "a velocity that was cleared"     # until the search finds it
python -m tests.fuzz --revert "the store of the ranks has no secret" --fault "a stranger who …"     # must fail
"""

import argparse
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from .reverts import REVERTS, take_back


def main() -> int:
    """1 where a program has failed; with a revert, where none has, be it of the search or one that is to show it."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("program", nargs="?", help="a program, fit or forward to replay")
    parser.add_argument("--fits", action="store_true", help="search for fits, not for programs")
    parser.add_argument("--forwards", action="store_true", help="search for forwards, not for programs")
    parser.add_argument("--steps", action="store_true", help="search for training_steps, not for programs")
    parser.add_argument("--written", action="store_true", help="search for written training_steps, not for programs")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long new seeds are searched")
    parser.add_argument("--revert", choices=list(REVERTS), help="a mending to take back in the library")
    parser.add_argument("--fault", help="a program of tests/fuzz/faults to run instead of a search")
    given = parser.parse_args()
    if given.fits or (given.program or "").startswith("Fit("):
        return _fits(given.program, given.seconds)
    if given.forwards or (given.program or "").startswith("Forward("):
        return _forwards(given.program, given.seconds)
    if given.steps or (given.program or "").startswith("Step("):
        return _steps(given.program, given.seconds)
    if given.written or (given.program or "").startswith("Written("):
        return _written(given.program, given.seconds)
    if given.revert:
        take_back(given.revert)
    from .check import check  # which imports the library
    from .program import Program
    from .search import fresh, search

    if given.program:
        return _replayed(eval(given.program, {"Program": Program}), check)
    if given.revert:
        check(Program())  # which a revert does not break: it is no slip of the pen
    if given.fault:
        return shown(given.fault) ^ bool(given.revert)
    where, failed = REVERTS[given.revert].where if given.revert else {}, False
    for number in fresh(given.seconds, 20 if given.revert else 100):
        try:
            search(number, 20 if given.revert else 100, not given.revert, **where)
        except (Exception, pytest.fail.Exception):
            traceback.print_exc()
            failed = True
            if given.revert:
                break
    return int(failed) ^ int(bool(given.revert))


def _fits(one: str | None, seconds: float) -> int:
    """As `main`, for fits under Lightning."""
    from tests.processes.crew import Crew

    from .fits.check import check
    from .fits.draw import fits
    from .fits.fit import Fit

    with Crew(2) as crew:
        if one:
            return _replayed(eval(one, {"Fit": Fit}), partial(check, crew=crew))
        return _searched(fits(), partial(check, crew=crew), seconds, 40, "fits")


def _forwards(one: str | None, seconds: float) -> int:
    """As `main`, for models whose forwards are drawn."""
    import pipeback

    from .forwards.check import check
    from .forwards.draw import forwards
    from .forwards.forward import Forward

    if one:
        return _replayed(eval(one, {"Forward": Forward, "pipeback": pipeback}), check)
    return _searched(forwards(), check, seconds, 100, "forwards")


def _steps(one: str | None, seconds: float) -> int:
    """As `main`, for training_steps that are drawn."""
    import pipeback

    from .forwards.draw import forwards
    from .forwards.step import Step, check_step

    if one:
        return _replayed(eval(one, {"Step": Step, "pipeback": pipeback}), check_step)
    return _searched(forwards(Step), check_step, seconds, 40, "steps")


def _written(one: str | None, seconds: float) -> int:
    """As `main`, for training_steps whose source is drawn."""
    from .written.draw import written
    from .written.written import Written, check_written

    if one:
        return _replayed(eval(one, {"Written": Written}), check_written)
    return _searched(written(), check_written, seconds, 40, "written steps")


def _replayed(one: Any, check: Callable[[Any], None]) -> int:
    check(one)
    print("as it should be")
    return 0


def _searched(drawn: Any, check: Callable[[Any], None], seconds: float, count: int, what: str) -> int:
    """1 where one has failed."""
    from .search import fresh, search_for

    failed = False
    for number in fresh(seconds, count, what):
        try:
            search_for(drawn, check, number, count)
        except Exception:
            traceback.print_exc()
            failed = True
    return int(failed)


def shown(name: str) -> int:
    """1 where the program of this name fails."""
    from .check import check
    from .faults import FAULTS
    from .program import Program

    fault = FAULTS[name]
    try:
        check(fault) if isinstance(fault, Program) else fault()
    except (Exception, pytest.fail.Exception):
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
