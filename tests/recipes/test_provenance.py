"""What a file of results begins with: the commit that git tells, and a sentence of what is known."""

import shutil
import subprocess
import sys

import pytest

pytest.importorskip("hydra")

from pipeback.recipes import provenance


def test_the_commit_is_that_of_the_package_and_says_so_where_files_differ(tmp_path, monkeypatch):
    if shutil.which("git") is None:
        pytest.skip("there is no git")

    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    file = tmp_path / "provenance.py"
    file.write_text("1")
    monkeypatch.setattr(provenance, "__file__", str(file))
    git("init", "-q")
    (tmp_path / "other").write_text("1")
    git("add", "other")
    git("commit", "-qm", "of somebody else, whose repository has the package installed in it")
    assert provenance.commit() is None
    git("add", ".")
    git("commit", "-qm", "with the package")
    known = git("rev-parse", "--short", "HEAD").strip()
    assert provenance.commit() == known
    file.write_text("2")
    assert provenance.commit() == f"{known}-dirty"


def test_a_command_is_told_as_it_was_typed(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pipeback compare", "seeds=3", "methods=[sgd,pb]"])
    assert provenance.command() == "pipeback compare seeds=3 'methods=[sgd,pb]'"
    assert provenance.command(["a b"]) == "pipeback compare 'a b'"
    monkeypatch.setattr(sys, "argv", ["recipes/zoo.py"])
    assert provenance.command() == "python recipes/zoo.py"


def test_what_is_not_known_is_not_told():
    known = provenance.provenance()
    assert set(known) == {"date", "commit", "pipeback", "machine", "torch", "python"}
    text = provenance.heading("pipeback zoo", known | {"load": 0.0})
    assert text.startswith(f"```shell\npipeback zoo\n```\n\nMeasured on {known['date']} ")
    assert known["machine"] in text and text.endswith(", load before: 0.0.\n")
    assert provenance.heading("x", {"commit": None, "pipeback": "1"}) == "```shell\nx\n```\n\nMeasured (version 1).\n"
