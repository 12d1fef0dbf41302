"""Replay one program, as a failing search prints it, or search on.

python -m tests.fuzz "Program(...)"
python -m tests.fuzz --seconds 1200
"""

import argparse
import traceback

from .check import check
from .program import Program
from .search import fresh, search

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("program", nargs="?", help="a program to replay")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long new seeds are searched")
    given = parser.parse_args()
    if given.program:
        check(eval(given.program, {"Program": Program}))
        print("as it should be")
    else:
        for number in fresh(given.seconds):
            try:
                search(number, 100)
            except Exception:
                traceback.print_exc()
