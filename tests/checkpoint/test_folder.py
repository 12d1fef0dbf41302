"""The folder of checkpoints: how many remain, which is the newest, what killed runs left."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeback import checkpoint
from pipeback.checkpoint import folders
from pipeback.checkpoint.save_and_load import CheckpointError
from tests.checkpoint.saved import names, process, trained
from tests.helpers import checkpoint_faults
from tests.helpers.choice import rare
from tests.laws.cases import data

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")


def test_how_many_remain(tmp_path):
    pipe = trained(1)
    for keep, left in [(3, [1]), (3, [1, 2]), (3, [1, 2, 3]), (3, [2, 3, 4]), (2, [4, 5]), (1, [6])]:
        checkpoint.save(pipe, tmp_path, keep=keep)
        assert names(tmp_path) == [f"step-{n:08d}" for n in left]
        pipe.push(*data(1)[0])
    with pytest.raises(ValueError, match="keep=0"):
        checkpoint.save(pipe, tmp_path, keep=0)


def test_a_damaged_one_does_not_count(tmp_path):
    pipe = trained(1)
    for n in range(4):
        checkpoint.save(pipe, tmp_path, keep=2)
        if n == 1:
            (tmp_path / "step-00000002" / "stage-001.safetensors").unlink()
        pipe.push(*data(1)[0])
        if n == 2:
            assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]
    assert names(tmp_path) == ["step-00000003", "step-00000004"]


def test_the_newest_is_the_one_saved_last(tmp_path):
    """A run that goes back to an earlier checkpoint goes on from there, not from the line it has left."""
    pipe = trained(5)
    for _ in range(4):
        checkpoint.save(pipe, tmp_path, keep=4)
        pipe.push(*data(1)[0])
    checkpoint.load(pipe, tmp_path / "step-00000005")
    pipe.push(*data(1)[0])
    again = checkpoint.save(pipe, tmp_path, keep=3, facts="again")
    assert again.name == "step-00000006" and checkpoint.latest(tmp_path) == again
    assert names(tmp_path) == ["step-00000006", "step-00000007", "step-00000008"]
    assert checkpoint.load(pipe, tmp_path) == "again"


def test_the_same_step_again(tmp_path):
    pipe = trained(6)
    for n in range(3):
        path = checkpoint.save(pipe, tmp_path, keep=1, facts=n)
        assert names(tmp_path) == ["step-00000006"] and checkpoint.load(pipe, path) == n


def test_killed_between_two_renames(two, tmp_path):
    """What was to be replaced is found under its other name, and gets its name back."""
    shutil.copytree(two, folder := tmp_path / "copy")
    aside = (folder / "step-00000009").rename(folder / ".step-00000009.replaced")
    assert checkpoint.latest(folder) == aside
    pipe = trained(0)
    assert checkpoint.load(pipe, folder) == {"epoch": 2}
    pipe.push(*data(10)[9])
    checkpoint.save(pipe, folder)
    assert names(folder) == ["step-00000009", "step-00000010"]


def test_what_killed_runs_left_is_removed_but_not_what_a_live_one_writes(tmp_path):
    alive = folders.Draft(tmp_path, 3)
    alive.open()
    for name in (".step-00000002.partial", ".step-00000004.partial", ".step-00000001.removed", "notes"):
        (tmp_path / name).mkdir()
    pipe = trained(2)
    checkpoint.save(pipe, tmp_path)
    assert names(tmp_path) == [".step-00000003.partial", "notes", "step-00000002"]
    pipe.push(*data(1)[0])
    with pytest.raises(CheckpointError, match=".step-00000003.partial: FileExistsError"):
        checkpoint.save(pipe, tmp_path)
    assert alive.partial.exists()
    alive.close()
    checkpoint.save(pipe, tmp_path)
    assert names(tmp_path) == ["notes", "step-00000002", "step-00000003"]


def test_relative_paths_and_file_systems_that_cannot_sync_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sync, pipe = os.fsync, trained(4)

    def fsync(file):
        if Path(f"/proc/self/fd/{file}").is_dir():
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(file)

    monkeypatch.setattr(os, "fsync", fsync)
    assert checkpoint.save(pipe, "runs/a") == Path("runs/a/step-00000004") == checkpoint.latest("runs/a")
    checkpoint.load(trained(0), "runs/a")
    monkeypatch.setattr(
        os, "fsync", lambda file: fsync(file) or (_ for _ in ()).throw(OSError(errno.EIO, "broken disk"))
    )
    pipe.push(*data(1)[0])
    with pytest.raises(CheckpointError, match="stage-00.*broken disk"):
        checkpoint.save(pipe, "runs/a")
    assert names(Path("runs/a")) == ["step-00000004"]


def test_bad_arguments(tmp_path, monkeypatch):
    pipe = trained(2)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="rank 0 .*file"):
        checkpoint.save(pipe, tmp_path / "file")
    with pytest.raises(CheckpointError, match="checkpoint/facts/a: a set is no JSON value"):
        checkpoint.save(pipe, tmp_path, facts={"a": {1}})
    with pytest.raises(CheckpointError, match="the key 3 is no string"):
        checkpoint.save(pipe, tmp_path, facts={3: 1})
    assert names(tmp_path) == ["file"]
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for call in (checkpoint.save, checkpoint.load):
        with pytest.raises(ImportError, match=r"pip install 'pipeback\[checkpoint\]'"):
            call(pipe, tmp_path)


@pytest.mark.parametrize(("steps", "most"), [(18, 10), rare(45, 25)])
def test_killed_at_any_moment(steps, most, tmp_path):
    """So many times SIGKILL: what is newest is whole and right, and the end is that of a run without kills."""
    found = process(checkpoint_faults.kills, tmp_path, steps=steps, most=most)
    assert "in the end []" in found and f"killed {most} " in found


def test_a_file_that_cannot_be_written(tmp_path):
    assert "trained on" in process(checkpoint_faults.limit, tmp_path)


def test_a_full_disk(tmp_path):
    script = 'mount -t tmpfs -o size=256k tmpfs "$0" && mkdir "$0/runs" && exec "$@"'
    inside = ["unshare", "-rm", "sh", "-c", script, str(tmp_path)]
    if not shutil.which("unshare") or subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("a small file system needs user namespaces, which are not allowed here")
    assert "trained on" in process(checkpoint_faults.full, tmp_path / "runs", *inside)
