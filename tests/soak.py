"""Runs the tests marked `soak`, file by file, and goes on where an earlier run was stopped.

    python -m tests.soak                                        # every file that has not passed at this commit
    python -m tests.soak --since 9c18592 -- -n 2                # nor at a later commit than that; options for pytest
    python -m tests.soak --only laws/test_equations.py,fuzz

A file has a row in tests/soak.csv as soon as all its tests have passed: how many, how long they took on that machine,
and the commit. What fails is printed, and keeps the row it had.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "tests" / "soak.csv"


class Passed(NamedTuple):
    """A file of tests, all of which have passed or were skipped."""

    file: str
    tests: int
    skipped: int
    seconds: int
    commit: str
    date: str


def main(words: list[str]) -> int:
    own, pytests = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    parser = argparse.ArgumentParser(prog="python -m tests.soak", usage="%(prog)s [options] [-- options of pytest]")
    parser.add_argument("--since", metavar="COMMIT", help="take for passed what has passed at this commit or later")
    parser.add_argument("--only", metavar="PATHS", default="", help="files or folders of tests/, with commas between")
    parser.add_argument("--record", type=Path, default=RECORD, metavar="FILE", help="default: tests/soak.csv")
    asked = parser.parse_args(own)
    paths = [f"tests/{path}" for path in asked.only.split(",") if path] or ["tests"]
    known = passed(asked.record)
    try:
        since = git("rev-parse", "--verify", f"{asked.since or 'HEAD'}^{{commit}}")
        todo = [name for name in files(paths) if not has_passed(known.get(name), since)]
    except subprocess.CalledProcessError as error:
        print(error.stderr or error.stdout or error, file=sys.stderr)
        return 2
    failed = []
    for n, name in enumerate(todo, 1):
        print(f"[{n} of {len(todo)}] {name}", flush=True)
        result = run(name, pytests)
        if result is None:
            failed.append(name)
        else:
            known[name] = result
            write(known, asked.record)
    print("\n".join([f"{len(todo) - len(failed)} files passed", *(f"FAILED {name}" for name in failed)]))
    return 1 if failed else 0


def files(paths: list[str]) -> list[str]:
    """The files below `paths` that hold such tests."""
    words = ["-m", "soak", "--collect-only", "-q", "-p", "no:cacheprovider"]
    lines = subprocess.run(
        [sys.executable, "-m", "pytest", *words, *paths], cwd=ROOT, check=True, text=True, capture_output=True
    ).stdout.splitlines()
    return sorted({line.split("::")[0] for line in lines if "::" in line})


def run(name: str, pytests: list[str]) -> Passed | None:
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.xml"
        words = ["-q", "-m", "soak", "--timeout", "3600", f"--junitxml={found}", *pytests, name]
        if subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, check=False).returncode:
            return None
        suite = next(ElementTree.parse(found).iter("testsuite"))
    seconds = round(float(suite.attrib["time"]))
    tests, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    return Passed(name, tests, skipped, seconds, git("rev-parse", "--short", "HEAD"), date.today().isoformat())


def has_passed(row: Passed | None, since: str) -> bool:
    """Whether the file has passed at this commit or a later one."""
    if row is None:
        return False
    words = ["git", "merge-base", "--is-ancestor", since, row.commit]
    return subprocess.run(words, cwd=ROOT, check=False, capture_output=True).returncode == 0


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, text=True, capture_output=True).stdout.strip()


def passed(record: Path) -> dict[str, Passed]:
    if not record.exists():
        return {}
    with record.open(newline="", encoding="utf-8") as lines:
        rows = csv.reader(lines)
        next(rows)
        return {r[0]: Passed(r[0], int(r[1]), int(r[2]), int(r[3]), r[4], r[5]) for r in rows}


def write(known: dict[str, Passed], record: Path) -> None:
    record.parent.mkdir(parents=True, exist_ok=True)
    with record.open("w", newline="", encoding="utf-8") as lines:
        rows = csv.writer(lines)
        rows.writerow(Passed._fields)
        rows.writerows(known[name] for name in sorted(known))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
