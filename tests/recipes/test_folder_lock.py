"""A folder belongs to one command at a time; a second one is refused before it writes anything there."""

import os

import pytest

pytest.importorskip("hydra")
pytest.importorskip("lightning")
pytest.importorskip("sklearn")
pytest.importorskip("fcntl")

from pipeback.recipes.folder_lock import NAME, locked
from tests.helpers.processes import forked
from tests.recipes.cli import TINY, pipeback


@pytest.mark.parametrize(
    ("command", "words"),
    [("train", ["callbacks=none"]), ("sweep", ["methods=[sgd]", "jobs=1"]), ("compare", ["methods=[sgd]", "jobs=1"])],
)
def test_a_second_command_is_refused_and_goes_on_afterwards(command, words, monkeypatch, tmp_path):
    monkeypatch.setattr("pipeback.recipes.compare.report", lambda runs, *rest: None)
    with locked(tmp_path / "here"):
        done = pipeback(command, *TINY, *words, "out=here", cwd=tmp_path)
        assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1, done.stderr
        assert "out=here: another command is at work in this folder; wait until it has ended" in done.stderr
        assert os.listdir(tmp_path / "here") == [NAME]
    assert not (tmp_path / "here").exists()
    done = pipeback(command, *TINY, *words, "out=here", cwd=tmp_path)
    assert done.returncode == 0 and not list(tmp_path.rglob(NAME)), done.stderr


def killed(out):
    with locked(out):
        os._exit(1)


def test_a_process_that_was_killed_leaves_the_folder_to_others(tmp_path):
    process = forked().Process(target=killed, args=(tmp_path / "far" / "here",))
    process.start()
    process.join()
    assert os.listdir(tmp_path / "far" / "here") == [NAME]
    with (
        locked(tmp_path / "far" / "here"),
        pytest.raises(ValueError, match="give another out="),
        locked(tmp_path / "far" / "here"),
    ):
        pass
    assert os.listdir(tmp_path / "far" / "here") == []
