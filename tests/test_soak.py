"""`make soak` goes on where it was stopped, and never takes a failure for passed."""

import csv
import subprocess

import pytest

from tests import soak
from tests.helpers.choice import usual

MARK = "import os\nimport pytest\npytestmark = pytest.mark.soak\n"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project of its own, with one file that passes and one that fails unless WELL is set."""
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["soak: long"]\n')
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_good.py").write_text(MARK + "def test_one(): pass\ndef test_two(): pytest.skip('not here')\n")
    (tests / "test_ill.py").write_text(MARK + "def test_it(): assert 'WELL' in os.environ\n")
    (tests / "test_quick.py").write_text("def test_that_is_no_soak(): pass\n")
    for words in (["init", "-q"], ["add", "pyproject.toml"], ["commit", "-qm", "first"]):
        git(tmp_path, *words)
    monkeypatch.setattr(soak, "ROOT", tmp_path)
    return tmp_path


def git(where, *words):
    own = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *own, *words], cwd=where, check=True)


def soaked(project, *words):
    """The exit status, and the rows of what has passed."""
    record = project / "record.csv"
    status = soak.main([*words, "--record", str(record), "--", "--timeout", "60", "-p", "no:cacheprovider"])
    rows = list(csv.DictReader(record.read_text().splitlines())) if record.exists() else []
    return status, {row["file"]: (row["tests"], row["skipped"]) for row in rows}


def test_it_goes_on_where_it_was_stopped(project, monkeypatch, capfd):
    good, ill = "tests/test_good.py", "tests/test_ill.py"
    assert soaked(project) == (1, {good: ("2", "1")})
    assert f"FAILED {ill}" in capfd.readouterr().out
    monkeypatch.setenv("WELL", "1")
    assert soaked(project) == (0, {good: ("2", "1"), ill: ("1", "0")})
    printed = capfd.readouterr().out
    assert f"[1 of 1] {ill}" in printed and good not in printed  # which has passed at this commit

    git(project, "commit", "-qm", "second", "--allow-empty")
    assert soaked(project, "--since", "HEAD~1")[0] == 0
    assert "0 files passed" in capfd.readouterr().out  # no older than that
    assert soaked(project, "--only", "test_good.py")[0] == 0
    assert f"[1 of 1] {good}" in capfd.readouterr().out  # a new commit: it has not passed there


def test_a_commit_that_is_not_there_is_named(project, capfd):
    assert soaked(project, "--since", "nowhere") == (2, {})
    assert "revision" in capfd.readouterr().err


@pytest.mark.parametrize("cases", range(1, 14))
def test_each_case_is_a_usual_one_of_some_test_and_few_are_all_run(cases):
    chosen = [usual(f"test_{n}", cases) for n in range(40)]
    assert set().union(*chosen) == set(range(cases))
    assert all(len(each) in ((cases,) if cases <= 3 else (2, 3, cases // 3, cases // 3 + 1)) for each in chosen)
