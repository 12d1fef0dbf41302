"""A checkpoint is written whole or not at all: the one of before stays until the new one is on the disk."""

import os
import tempfile

import pytest
import torch
from lightning.pytorch.plugins import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO

from pipeback.lightning.checkpoint_file import CheckpointFile
from tests.helpers.full_disk import files_of_at_most
from tests.lightning.cases import Regression, loader, strategy, trainer, weights


@pytest.mark.parametrize("plugins", [[], [AsyncCheckpointIO()]], ids=["own", "wrapped"])
def test_a_full_disk_leaves_the_checkpoint_of_before(tmp_path, plugins, monkeypatch):
    """Nothing goes through the temporary folder, which may be another file system."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    made, file = trainer(strategy(), tmp_path, max_epochs=1, plugins=plugins), tmp_path / "last.ckpt"
    made.fit(module := Regression(), loader(4))
    made.save_checkpoint(file)
    made.strategy.checkpoint_io.teardown()
    before = file.read_bytes()
    with files_of_at_most(len(before) // 2), pytest.raises(OSError) as caught:
        made.save_checkpoint(file)
        made.strategy.checkpoint_io.teardown()
    told = str(caught.value)
    assert caught.value.filename == str(file) and "; make room there, or give another folder" in told
    assert file.read_bytes() == before and [each.name for each in tmp_path.iterdir()] == ["last.ckpt"]
    where = told.partition("whole: ckpt_path=")[2].partition(" goes on")[0]
    again = trainer(strategy(), tmp_path, max_epochs=2)
    again.fit(other := Regression(), loader(4), ckpt_path=where)
    assert again.current_epoch == 2 and not torch.equal(weights(other), weights(module))


def test_a_first_checkpoint_that_does_not_fit_leaves_nothing(tmp_path):
    with files_of_at_most(100), pytest.raises(OSError, match="give another folder") as caught:
        CheckpointFile().save_checkpoint({"x": torch.zeros(1000)}, tmp_path / "new" / "last.ckpt")
    assert "ckpt_path" not in str(caught.value) and not list((tmp_path / "new").iterdir())
    CheckpointFile().save_checkpoint({"x": torch.zeros(1000)}, f"file://{tmp_path}/new/last.ckpt")
    assert torch.load(tmp_path / "new" / "last.ckpt", weights_only=True)["x"].shape == (1000,)
    assert os.stat(tmp_path / "new" / "last.ckpt").st_mode & 0o777 == 0o666 & ~_umask()


def _umask():
    os.umask(found := os.umask(0))
    return found


@pytest.mark.parametrize("kept", [0, 1 / 2, 0.99])
def test_a_checkpoint_that_was_cut_short_is_named(tmp_path, kept):
    file = tmp_path / "last.ckpt"
    made = trainer(strategy(), tmp_path, max_epochs=1)
    made.fit(Regression(), loader(4))
    made.save_checkpoint(file)
    made.save_checkpoint(tmp_path / "earlier.ckpt")
    os.truncate(file, int(file.stat().st_size * kept))
    again = trainer(strategy(), tmp_path)
    with pytest.raises(
        ValueError, match=r"last\.ckpt is no whole checkpoint: .* give an earlier checkpoint of the run"
    ):
        again.fit(Regression(), loader(4), ckpt_path=file)
    assert not again.global_step
    again.fit(Regression(), loader(4), ckpt_path=tmp_path / "earlier.ckpt")
    assert again.current_epoch == 2


class OfTheUser(CheckpointIO):
    def save_checkpoint(self, checkpoint, path, storage_options=None):
        torch.save(list(checkpoint), path)

    def load_checkpoint(self, path, map_location=None, **options):
        raise NotImplementedError

    def remove_checkpoint(self, path):
        raise NotImplementedError


def test_what_the_user_gives_writes_the_checkpoints(tmp_path):
    for given in (OfTheUser(), TorchCheckpointIO(), AsyncCheckpointIO(OfTheUser())):
        made = trainer(strategy(), tmp_path, max_epochs=1, plugins=[given])
        assert made.strategy.checkpoint_io is given
        inner = getattr(given, "checkpoint_io", given)
        assert not isinstance(inner, CheckpointFile)
    direct = OfTheUser()
    assert strategy(checkpoint_io=direct).checkpoint_io is direct
    assert isinstance(strategy().checkpoint_io, CheckpointFile)


def test_a_url_is_written_by_lightning(tmp_path):
    import fsspec

    CheckpointFile().save_checkpoint({"x": 1}, "memory://checkpoints/last.ckpt")
    assert fsspec.filesystem("memory").exists("/checkpoints/last.ckpt")
    assert CheckpointFile().load_checkpoint("memory://checkpoints/last.ckpt", weights_only=True) == {"x": 1}
    CheckpointFile().remove_checkpoint("memory://checkpoints/last.ckpt")
