"""A full disk ends a command with one sentence, which names the place; with room, the same command goes on."""

import json

import pytest

pytest.importorskip("hydra")
pytest.importorskip("lightning")
pytest.importorskip("sklearn")

from tests.helpers.full_disk import files_of_at_most
from tests.recipes.cli import TINY, pipeback

CURE = "File too large; make room there, and give the command again"


def said(done, command, place):
    assert done.returncode != 0 and "Traceback" not in done.stderr, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"pipeback {command}: ") and str(place) in last, done.stderr
    return last


@pytest.mark.parametrize(
    ("command", "more"),
    [("train", []), ("sweep", ["methods=[sgd,pb]", "jobs=1"]), ("compare", ["methods=[pb]", "jobs=1"])],
)
def test_a_run(command, more, tmp_path):
    options = [command, *TINY, *more, f"out={tmp_path / 'run'}", "epochs=1"]
    with files_of_at_most(100):
        done = pipeback(*options, cwd=tmp_path)
    last = said(done, command, tmp_path / "run")
    assert last.endswith(CURE) and "hydra" not in last
    done = pipeback(*options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_checkpoint(tmp_path):
    options = ["train", *TINY, f"out={tmp_path / 'run'}"]
    assert pipeback(*options, "epochs=1", cwd=tmp_path).returncode == 0
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    before = last.read_bytes()
    options += ["epochs=2", f"ckpt_path={last}"]
    with files_of_at_most(len(before) // 2):
        done = pipeback(*options, cwd=tmp_path)
    assert f"whole: ckpt_path={last} goes on" in said(done, "train", last) and last.read_bytes() == before
    assert pipeback(*options, cwd=tmp_path).returncode == 0 and last.read_bytes() != before
    last.write_bytes(before[:-100])
    assert "last.ckpt is no whole checkpoint" in said(pipeback(*options, cwd=tmp_path), "train", last)


PLAN = ["plan", "gpt:125m", "devices=2xH100", "stages=2", "method=pb"]


@pytest.mark.parametrize("words", [["draw", "pb"], PLAN, ["results", "delay_lm"]], ids=lambda words: words[0])
def test_a_file(words, tmp_path):
    out = tmp_path / ("out.md" if words[0] == "results" else "out.svg")
    with files_of_at_most(100):
        done = pipeback(*words, f"out={out}", cwd=tmp_path)
    assert said(done, words[0], out).endswith(CURE)
    assert pipeback(*words, f"out={out}", cwd=tmp_path).returncode == 0


def test_a_table_of_the_bench(tmp_path):
    earlier = tmp_path / "some.json"
    facts = {"command": "c", "date": "d", "commit": "e", "pipeback": "f", "machine": "g", "torch": "h"}
    found = {"machine": {**facts, "threads": 1, "load": "0"}, "repeats": 1, "seconds": 1.0, "cases": []}
    earlier.write_text(json.dumps(found))
    options = ["bench", "table", f"read={earlier}", f"out={tmp_path / 'out.json'}"]
    with files_of_at_most(10):
        done = pipeback(*options, cwd=tmp_path)
    assert said(done, "bench", tmp_path / "out.json").endswith(CURE)
    assert pipeback(*options, cwd=tmp_path).returncode == 0
