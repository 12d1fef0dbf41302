"""SIGTERM that one process hears: that of a training, or one of several that do the runs of a command."""

import os
import signal

import pytest

pytest.importorskip("hydra")
pytest.importorskip("lightning")
pytest.importorskip("sklearn")

from pipeback.recipes import callbacks
from pipeback.recipes.live import state
from pipeback.recipes.sweeps import table
from tests.recipes.cli import TINY, pipeback


@pytest.fixture
def terminated(monkeypatch):
    """SIGTERM at the second epoch of the first run; the command has no handler, so that it is a worker that hears."""
    heard = []

    def hears(self, trainer, pl_module):
        if trainer.current_epoch == 1 and not heard:
            heard.append(trainer)
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Lightning calls the handler that it finds
    monkeypatch.setattr(callbacks.Measure, "on_train_epoch_start", hears, raising=False)
    monkeypatch.setattr("pipeback.recipes.interrupts.SIGNALS", ())
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_training_says_how_to_go_on(terminated, tmp_path):
    done = pipeback("train", *TINY, "method=pb", "epochs=2", "out=mine", cwd=tmp_path)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    word = "ckpt_path=mine/checkpoints/last.ckpt"
    assert done.stderr.endswith(f"pipeback train: stopped. The same command with {word} goes on\n")
    assert pipeback("train", *TINY, "method=pb", "epochs=2", "out=mine", word, cwd=tmp_path).returncode == 0


@pytest.mark.parametrize("command", ["sweep", "compare"])
def test_a_worker_is_named_and_the_others_go_on(command, terminated, monkeypatch, tmp_path):
    monkeypatch.setattr("pipeback.recipes.compare.report", lambda runs, *rest: None)
    words = [*TINY, "methods=[pb,sgd]", "epochs=2", "jobs=1", "out=here"]
    done = pipeback(command, *words, cwd=tmp_path)
    assert done.returncode == 1 and "pb" in done.stderr, done.stderr
    assert "was stopped; here/pb-seed0/log.txt tells how, and the same command goes on" in done.stderr
    assert [state(tmp_path / "here" / f"{name}-seed0")["state"] for name in ("pb", "sgd")] == ["stopped", "finished"]
    if command == "sweep":
        assert [row.method for row in table.load(tmp_path / "here" / "results.csv").rows] == ["sgd"]
    monkeypatch.undo()
    assert pipeback(command, *words, cwd=tmp_path).returncode == 0
