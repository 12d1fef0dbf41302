"""A checkpoint that was damaged or edited is refused before anything changes."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from pipeback import checkpoint
from pipeback.checkpoint import folders
from pipeback.checkpoint.save_and_load import CheckpointError
from pipeback.streaming import sealed_file
from tests.checkpoint.saved import trained
from tests.laws.cases import everything

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")


FILES = [*(f"stage-{s:03d}.safetensors" for s in range(5)), "state.json"]


def cut(at):
    return lambda file: os.truncate(file, int(at * file.stat().st_size) if at < 1 else file.stat().st_size - 1)


def flip(at):
    def damage(file):
        content = bytearray(file.read_bytes())
        content[int(at * (len(content) - 1))] ^= 4
        file.write_bytes(content)

    return damage


DAMAGE = {
    "empty": cut(0), "cut early": cut(0.01), "cut in the middle": cut(0.5), "cut late": cut(1),
    "first bit": flip(0), "a bit of the header": flip(0.02), "a bit": flip(0.7), "last bit": flip(1),
    "missing": Path.unlink, "longer": lambda file: file.write_bytes(file.read_bytes() + b" "),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_before_anything_changes(two, damage, tmp_path):
    pipe = trained(3, seed=6)
    before = everything(pipe)
    for file in FILES:
        shutil.copytree(two, folder := tmp_path / file)
        newest, good = folder / "step-00000009", folder / "step-00000007"
        DAMAGE[damage](newest / file)
        with pytest.raises(CheckpointError) as error:
            checkpoint.load(pipe, newest)
        assert str(newest / file) in str(error.value) and f"besides is {good}" in str(error.value)
        assert torch.equal(before, everything(pipe))
        cheap = file == "state.json" or "bit" not in damage  # a flipped bit is found when the content is read
        assert checkpoint.latest(folder) == (good if cheap else newest)
    with pytest.warns(UserWarning, match="passed over: .*step-00000009"):
        assert checkpoint.load(pipe, folder) == {"epoch": 1}
    assert torch.equal(everything(pipe), everything(trained(7)))


def test_an_edited_state(two, tmp_path):
    shutil.copytree(two, folder := tmp_path / "copy")
    file = folder / "step-00000009" / "state.json"
    document = json.loads(file.read_text())
    assert document["checkpoint"]["facts"] == {"epoch": 2}
    file.write_text(file.read_text().replace('"epoch": 2', '"epoch": 3'))
    with pytest.raises(CheckpointError, match="state.json: the content was altered"):
        checkpoint.read(folder / "step-00000009")
    file.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="truncated or edited"):
        checkpoint.read(folder / "step-00000009")


def resealed(folder, change):
    """Edit state.json, its own checksum included."""
    document = sealed_file.unsealed(folder / "state.json")
    change(document)
    (folder / "state.json").write_bytes(sealed_file.sealed(document))


@pytest.mark.parametrize("outside", ["../{name}", "{folder}/{name}", "inner/../../{name}", ".."])
def test_names_that_lead_out_of_the_folder_are_not_followed(two, outside, tmp_path):
    shutil.copytree(two, folder := tmp_path / "copy")
    newest, pipe = folder / "step-00000009", trained(3, seed=6)
    before = everything(pipe)
    shutil.move(newest / "stage-000.safetensors", folder / "stage-000.safetensors")
    name = outside.format(folder=folder, name="stage-000.safetensors")

    def change(document):
        document["files"][name] = document["files"].pop("stage-000.safetensors")

    resealed(newest, change)
    with pytest.raises(CheckpointError, match="no file of this folder, and is not followed.*restore the folder"):
        checkpoint.load(pipe, newest)
    assert torch.equal(before, everything(pipe))
    with pytest.warns(UserWarning, match="passed over: .*is not followed"):
        checkpoint.load(pipe, folder)


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("fetched", 10**15, "stage 1 that 1000000000000000 operations were taken from its schedule"),
        ("fetched", 1.5, "how far each of the . stages is .fetched."),
        ("forwards", 10**15, "1000000000000000 have gone forward"),
        ("start", -1, "of 10 micro-batches"),
        ("arrived", 10**15, "of 1000000000000000 micro-batches"),
    ],
)
def test_a_place_that_cannot_be(two, name, value, found, tmp_path):
    """It would be looked for for ever."""
    shutil.copytree(two / "step-00000009", folder := tmp_path / "step-00000009")
    pipe = trained(3, seed=6)
    before = everything(pipe)

    def change(document):
        order = document["state"]["plain"]["loops"][0]["order"]
        if isinstance(order[name], list):
            order[name][1] = value
        else:
            order[name] = value

    resealed(folder, change)
    with pytest.raises(ValueError, match=f"the state .*{found}.*load another one"):
        checkpoint.load(pipe, folder)
    assert torch.equal(before, everything(pipe))


def test_nothing_to_load(two, tmp_path):
    pipe = trained(2)
    assert checkpoint.latest(tmp_path) is None and checkpoint.latest(tmp_path / "nowhere") is None
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match="there is no whole checkpoint"):
            checkpoint.load(pipe, folder)
    with pytest.raises(CheckpointError, match=f"besides is {two / 'step-00000009'}"):
        checkpoint.load(pipe, two / "step-00000008")
    with pytest.raises(CheckpointError, match="besides is"):
        checkpoint.read(two)
    with pytest.raises(ValueError, match="the state belongs to method"):
        checkpoint.load(trained(2, "pb"), two)


def test_another_format(two, tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "FORMAT", 2)
    checkpoint.save(trained(2), tmp_path)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="has format 2, this pipeback reads 1; update pipeback"):
        checkpoint.read(tmp_path / "step-00000002")
