"""`pipeback COMMAND --help`: what conf/ says of every option, on one screen; and what a missing package is told by."""

import importlib.resources
import sys

import pytest
import torch

pytest.importorskip("hydra")

from pipeback.recipes import bench, usage, zoo
from pipeback.recipes.benches import memory
from pipeback.tensors import structures
from tests.recipes.cli import pipeback

CONF = importlib.resources.files("pipeback.conf")


@pytest.mark.parametrize("command", ["train", "compare", "sweep"])
def test_help_is_a_screen_with_the_comments_of_conf(command, tmp_path):
    done = pipeback(command, "--help", cwd=tmp_path)
    assert done.returncode == 0 and not done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) <= 70 and "Hydra" not in done.stdout
    options = lines[next(n for n, line in enumerate(lines) if line.startswith("options")) : -4]
    assert max(map(len, options)) <= usage.WIDTH
    text = " ".join(done.stdout.split())
    for line in CONF.joinpath("train.yaml").read_text("utf-8").splitlines():
        name, _, comment = line.partition("#")
        if comment and not name.startswith((" ", "out")) and name:
            assert comment.strip() in text and f"{name.partition(':')[0]}=" in text
    for group in ("data", "model", "optimizer", "method", "trainer", "experiment"):
        for file in CONF.joinpath(group).iterdir():
            assert file.name.removesuffix(".yaml") in text
    assert "digits*" in text and "sgd*" in text
    assert len([line for line in options if line.startswith("  out=")]) == 1


def test_help_of_a_choice(tmp_path):
    done = pipeback("train", "optimizer=sgd", "experiment=digits", "--help", cwd=tmp_path)
    assert "optimizer.warmup=0      batches until the rate is full" in done.stdout
    assert "  batch_size=32" in done.stdout and "experiment.batch_size" not in done.stdout


def test_quick_is_written_one_way():
    assert zoo.parsed(["quick=true"])[0] == list(zoo.QUICK) and zoo.parsed(["quick=true"])[1]["micro_batches"] == 6
    for word in ("--quick", "quick"):
        with pytest.raises(ValueError, match="did you mean 'quick=true'"):
            zoo.parsed([word])


def test_what_is_missing_for_a_section(monkeypatch, capsys):
    def missing(repeats):
        raise ModuleNotFoundError("No module named 'numpy'", name="numpy")

    monkeypatch.setattr(memory, "main", missing)
    monkeypatch.setattr(sys, "argv", ["pipeback bench", "memory", "repeats=1"])
    with pytest.raises(SystemExit, match=r"pipeback bench memory needs numpy: pip install 'pipeback\[recipes\]'"):
        bench.main()


def test_all_tensors_are_counted_but_those_that_nobody_may_look_at():
    held = torch.zeros(1000)
    assert type(structures.UNSEEN) is structures.Absent and memory.alive() >= held.nbytes
