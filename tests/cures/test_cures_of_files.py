"""What is refused of files and folders, and the cure."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import pipeback
from pipeback.streaming import sealed_file

from .rows import BATCH, build, refused, train

pytestmark = pytest.mark.filterwarnings("ignore:.*earlier training", "ignore:.*pages of stages but no version")


def model(width=6):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))


def absent(width=6, kind=model):
    with torch.device("meta"):
        return kind(width)


def started(file, width=6, kind=model):
    return build(absent(width, kind), store=pipeback.Streaming("host", init=file))


@pytest.mark.parametrize(
    ("change", "width", "says"),
    [
        (
            lambda values: values.pop("1.bias"),
            6,
            "has no tensor '1.bias'; it belongs to another model, give the weights",
        ),
        (
            lambda values: values.update({"2.extra": torch.zeros(1)}),
            6,
            "has '2.extra', which the model has not; it belo",
        ),
        (lambda values: None, 7, r"'0.weight' is \(6, 6\) in .*, but \(7, 7\) here; it belongs to another model, give"),
    ],
)
def test_weights_of_another_model(tmp_path, change, width, says):
    values = model().state_dict()
    save_file(values, tmp_path / "own.safetensors")
    change(values)
    save_file(values, tmp_path / "other.safetensors")
    refused(lambda: started(tmp_path / "other.safetensors", width), says)
    train(started(tmp_path / "own.safetensors"))


def test_values_that_are_no_safetensors(tmp_path):
    torch.save(model().state_dict(), tmp_path / "weights.pt")
    says = (
        r"weights.pt is no whole safetensors file .*; write the weights with pipeback.weights.save\(\) or safetensors"
    )
    refused(lambda: started(tmp_path / "weights.pt"), says)
    save_file(torch.load(tmp_path / "weights.pt"), tmp_path / "weights.safetensors")
    train(started(tmp_path / "weights.safetensors"))


def test_values_for_a_model_that_has_them(tmp_path):
    save_file(model().state_dict(), tmp_path / "own.safetensors")
    given = pipeback.Streaming("host", init=tmp_path / "own.safetensors")
    says = (
        r'gives values to weights on the meta device, but the model has its values; build it in torch.device\("meta"\)'
    )
    refused(lambda: build(model(), store=given), says)
    train(build(absent(), store=given))
    train(build(model(), store="host"))


def test_an_export_into_what_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    pipe = build(store="host")
    says = "make room, or give a folder that can be written, and save again"
    with pytest.raises(OSError, match=says):
        pipeback.weights.save(pipe, tmp_path / "file")
    pipeback.weights.save(pipe, tmp_path / "folder")
    train(pipe)


class Table(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("table", torch.ones(width), persistent=False)

    def forward(self, x):
        return self.linear(x) + self.table


def tables(width):
    torch.manual_seed(0)
    return nn.Sequential(*(Table(width) for _ in range(3)))


def test_a_buffer_that_no_file_has(tmp_path):
    save_file(tables(6).state_dict(), tmp_path / "own.safetensors")
    says = r"buffer 'table' is not kept in files \(persistent=False\); give Streaming\(init=\) a function"
    refused(lambda: started(tmp_path / "own.safetensors", kind=tables), says)

    def values(module):
        for tensor in (*module.parameters(), *module.buffers()):
            nn.init.normal_(tensor, std=0.1)

    train(started(values, kind=tables))


class Position(nn.Module):
    """Has weights, and no function that gives them values."""

    def __init__(self, resets):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6))
        if resets:
            self.reset_parameters = lambda: nn.init.zeros_(self.weight)

    def forward(self, x):
        return x + self.weight


def positions(resets, where="meta"):
    with torch.device(where):
        return nn.Sequential(nn.Linear(6, 6), Position(resets), nn.Linear(6, 6))


def test_weights_that_nothing_gives_values():
    says = r"no reset_parameters\(\) that would give .*; write one, give store=pipeback.Streaming\(init=...\), or build"
    refused(lambda: build(positions(False), store="host"), says)
    train(build(positions(True), store="host"))
    train(build(positions(False, "cpu"), store="host"))

    def values(module):
        for p in module.parameters():
            nn.init.normal_(p, std=0.1)

    train(build(positions(False), store=pipeback.Streaming("host", init=values)))


def committed(folder):
    pipe = build(store=f"disk:{folder}")
    pipe.push(BATCH, BATCH)
    pipe.commit()
    pipe.close()


def test_a_version_that_is_lost(tmp_path):
    committed(tmp_path / "own")
    kept = {file: file.read_bytes() for file in (tmp_path / "own").glob("version-*.json")}
    for file in kept:
        os.remove(file)
    says = (
        "which says where the weights lie; restore the folder from a copy, or give the store an empty one to begin anew"
    )
    refused(lambda: build(store=f"disk:{tmp_path / 'own'}"), says)
    train(build(store=f"disk:{tmp_path / 'empty'}"))
    for file, text in kept.items():
        file.write_bytes(text)
    train(build(store=f"disk:{tmp_path / 'own'}"))


def test_a_version_of_another_pipeback(tmp_path):
    committed(tmp_path)
    (file,) = tmp_path.glob("version-*.json")
    document, kept = sealed_file.unsealed(file), file.read_bytes()
    file.write_bytes(sealed_file.sealed({**document, "format": 2}))
    refused(
        lambda: build(store=f"disk:{tmp_path}"), "has format 2, this pipeback reads 1; use the version that wrote it"
    )
    file.write_bytes(kept)
    train(build(store=f"disk:{tmp_path}"))


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    says = "give a folder that can be written, or restore it from a copy"
    refused(lambda: train(build(store=f"disk:{tmp_path / 'file'}")), says)
    train(build(store=f"disk:{tmp_path / 'folder'}"))
