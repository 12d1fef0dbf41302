"""Weights in safetensors files: read stage by stage into a store, written the same way."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import pipeback
from pipeback import weights
from tests.laws.cases import data, everything, pipeline


def model(seed=0, width=6):
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Tanh(), nn.Linear(width, width))


def absent(width=6):
    with torch.device("meta"):
        return model(width=width)


pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")


def trained(network, count=9, **options):
    torch.manual_seed(3)
    pipe = pipeline(network, "pb", **options)
    for x, y in data(count, samples=8):
        pipe.push(x, y)
    return pipe


@pytest.mark.parametrize("store", [None, "host", "disk"])
def test_a_meta_model_from_a_file(store, tmp_path):
    save_file(model().state_dict(), tmp_path / "model.safetensors")
    store = f"disk:{tmp_path / 'store'}" if store == "disk" else store
    found = trained(absent(), store=pipeback.Streaming(store, init=tmp_path / "model.safetensors"))
    assert torch.equal(everything(found), everything(trained(model())))


@pytest.mark.parametrize(
    "options", [{}, {"store": "host"}, {"store": pipeback.Streaming("host", sparsity="magnitude")}]
)
def test_written_and_read_again(options, tmp_path):
    pipe = trained(model(), **options)
    before = everything(pipe)
    path = weights.save(pipe, tmp_path / "saved")
    assert torch.equal(everything(pipe), before), "what is in flight has changed"
    written = {}
    for file in sorted((tmp_path / "saved").glob("*.safetensors")):
        written.update(load_file(file))
    wanted = pipe.model.state_dict()
    assert set(written) == set(wanted) == set(json.loads(path.read_text())["weight_map"])
    assert all(torch.equal(written[name], wanted[name]) for name in wanted)
    again = pipeline(absent(), "pb", store=pipeback.Streaming("host", init=str(tmp_path / "saved")))
    assert all(torch.equal(value, wanted[name]) for name, value in again.model.state_dict().items())


def test_what_does_not_fit(tmp_path):
    values = model().state_dict()
    file = tmp_path / "model.safetensors"
    with pytest.raises(ValueError, match=r"init='.*': there is no safetensors file, nor a folder with model"):
        pipeline(absent(), "pb", store=pipeback.Streaming(init=file))
    save_file({k: v for k, v in values.items() if k != "1.0.bias"}, file)
    with pytest.raises(ValueError, match=r"stage 1 \(1\): .* has no tensor '1.0.bias'; it belongs to another model"):
        pipeline(absent(), "pb", store=pipeback.Streaming(init=file))
    save_file(values, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match=r"stage 0 \(0\): '0.0.weight' is \(6, 6\) in .*, but \(7, 7\) here"):
        pipeline(absent(7), "pb", store=pipeback.Streaming(init=tmp_path / "b.safetensors"))
    save_file({**values, "2.0.extra": torch.zeros(1)}, tmp_path / "c.safetensors")
    with pytest.raises(ValueError, match=r"stage 2 \(2\): .* has '2.0.extra', which the model has not"):
        pipeline(absent(), "pb", store=pipeback.Streaming(init=tmp_path / "c.safetensors"))


def test_a_file_that_is_no_safetensors(tmp_path):
    file = tmp_path / "weights.pt"
    torch.save(model().state_dict(), file)
    with pytest.raises(
        ValueError, match=rf"{file} is no whole safetensors file \(.*\); write the weights with pipeback"
    ):
        pipeline(absent(), "pb", store=pipeback.Streaming("host", init=file))


@pytest.mark.parametrize("init", ["nowhere", lambda module: None], ids=["path", "function"])
def test_values_for_a_model_that_has_them(init):
    with pytest.raises(ValueError, match=r'but the model has its values; build it in torch.device\("meta"\), or leave'):
        pipeline(model(), "pb", store=pipeback.Streaming("host", init=init))
    pipeline(model(), "pb", store=pipeback.Streaming("host"))


def test_every_name_of_tied_weights(tmp_path):
    def tied(tie):
        torch.manual_seed(0)
        first, last = nn.Embedding(7, 6), nn.Linear(6, 7, bias=False)
        if tie:
            last.weight = first.weight
        return nn.Sequential(nn.Sequential(first, nn.Tanh(), last), nn.Linear(7, 7))

    pipe = pipeline(tied(True), "pb")
    x = torch.arange(4)
    pipe.push(x, torch.randn(4, 7))
    path = weights.save(pipe, tmp_path)
    written = {}
    for file in tmp_path.glob("*.safetensors"):
        written.update(load_file(file))
    assert set(json.loads(path.read_text())["weight_map"]) == set(written) == set(pipe.model.state_dict())
    plain = tied(False)
    plain.load_state_dict(written)  # strict
    assert torch.equal(plain.eval()(x), pipe.evaluate(x))


@pytest.mark.parametrize("file", ["../other/model.safetensors", "/tmp/model.safetensors", "a/../../b"])
def test_an_index_does_not_lead_out_of_its_folder(file, tmp_path):
    (tmp_path / weights.INDEX).write_text(json.dumps({"weight_map": {"0.weight": file}}))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="'0.weight' is in .*outside of its folder"):
        pipeback.Pipeline(
            model,
            loss=nn.functional.mse_loss,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
            method="sgd",
            store=pipeback.Streaming(init=tmp_path),
        )


def read(folder):
    at = json.loads((folder / weights.INDEX).read_text())["weight_map"]
    return {name: load_file(folder / file)[name] for name, file in at.items()}


def same(some, others):
    return some.keys() == others.keys() and all(torch.equal(value, others[name]) for name, value in some.items())


@pytest.mark.parametrize("call", [1, 3])
def test_an_export_that_fails_leaves_the_one_before(call, tmp_path, monkeypatch):
    pipe = trained(model())
    weights.save(pipe, tmp_path)
    before, files = read(tmp_path), sorted(tmp_path.iterdir())
    pipe.push(*data(1, samples=8)[0])
    calls, write = [], safetensors.torch.save_file

    def full(tensors, file, **options):
        calls.append(file)
        if len(calls) == call:
            raise safetensors.SafetensorError("No space left on device")
        write(tensors, file, **options)

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", full)
        with pytest.raises(OSError, match=rf"model-0000{call}-of-.*: SafetensorError: No space.*; make room"):
            weights.save(pipe, tmp_path)
    assert same(read(tmp_path), before)
    assert sorted(tmp_path.iterdir()) == files
    weights.save(pipe, tmp_path)
    assert same(read(tmp_path), pipe.model.state_dict())


def test_an_export_that_ends_amid_its_renames_cannot_be_read(tmp_path, monkeypatch):
    pipe = trained(model())
    weights.save(pipe, tmp_path)
    rename = Path.rename

    def ends(file, name):
        if file.name.startswith("model-00002"):
            raise KeyboardInterrupt
        return rename(file, name)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", ends)
        with pytest.raises(KeyboardInterrupt):
            weights.save(pipe, tmp_path)
    with pytest.raises(ValueError, match="there is no safetensors file, nor a folder with"):
        pipeline(absent(), "pb", store=pipeback.Streaming("host", init=tmp_path))


def test_an_export_that_is_replaced_is_read_anew(tmp_path):
    """In the same process, and cut into other files; those of the old index go, and a user's stay."""
    weights.save(trained(model()), tmp_path)
    pipeline(absent(), "pb", store=pipeback.Streaming("host", init=tmp_path))
    (tmp_path / "model-00009-of-00009.safetensors").write_text("a user's")
    newer = trained(model(seed=1), stages=2)
    weights.save(newer, tmp_path)
    found = pipeline(absent(), "pb", store=pipeback.Streaming("host", init=tmp_path))
    assert same(found.model.state_dict(), newer.model.state_dict())
    assert sorted(file.name for file in tmp_path.glob("*.safetensors")) == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model-00009-of-00009.safetensors",
    ]  # fmt: skip


def test_files_of_an_index_from_elsewhere_stay(tmp_path):
    name = "model-00001-of-00001.safetensors"
    save_file(model().state_dict(), tmp_path / name)
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(model().state_dict(), name)}
    (tmp_path / weights.INDEX).write_text(json.dumps(index))
    weights.save(trained(model()), tmp_path)
    assert (tmp_path / name).exists()


def test_files_are_as_readable_as_their_folder(tmp_path):
    tmp_path.chmod(0o755)
    weights.save(trained(model(), 1), tmp_path)
    assert {file.stat().st_mode & 0o777 for file in tmp_path.glob("*.safetensors")} == {0o644}
