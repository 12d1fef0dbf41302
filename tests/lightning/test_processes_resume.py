"""Law: a checkpoint of several devices is that of one, and resumes on any number of them, bit for bit."""

from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.laws.cases import network
from tests.lightning import ranks
from tests.lightning.cases import Regression, dataset, loader, weights

pytestmark = pytest.mark.filterwarnings("ignore")


def stateful():
    return StatefulDataLoader(dataset(8, samples=8), batch_size=8, shuffle=True)


def saving(folder, **options):
    return ModelCheckpoint(folder, save_top_k=-1, auto_insert_metric_name=False, filename="{epoch}-{step}", **options)


def run(folder=None, ckpt=None, devices=2, method="cerebras", seed=7, **options):
    """Two epochs of eight batches; everything random; a checkpoint every third step."""
    callbacks = [] if folder is None else [saving(folder, every_n_train_steps=3)]
    given = dict(
        method=method, devices=devices, module=partial(ranks.Whole, scheduler=ranks.cycle), data=stateful, ckpt=ckpt,
        val=partial(loader, 2), callbacks=callbacks, enable_checkpointing=bool(callbacks), seed=seed, **options,
    )  # fmt: skip
    return ranks.result(**given)


def same(found, wanted, where=""):
    """Raise where two checkpoints differ: in a value, in a type, in the order of keys."""
    assert type(found) is type(wanted), where
    if isinstance(wanted, dict):
        assert list(found) == list(wanted), where
        for key in wanted:
            same(found[key], wanted[key], f"{where}/{key}")
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted), where
        for n, (a, b) in enumerate(zip(found, wanted, strict=True)):
            same(a, b, f"{where}/{n}")
    elif isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted), where
    else:
        assert found == wanted, where


def content(file):
    found = torch.load(file, weights_only=True)
    for name in [name for name in found["callbacks"] if name.startswith("ModelCheckpoint")]:
        del found["callbacks"][name]  # it tells its folder
    del found["pipeback"]["state"]["plain"]["seconds"]  # measured
    return found


@pytest.mark.parametrize(("method", "count"), [("cerebras", 2), ("pipedream", 3)])
def test_the_file_is_that_of_one_device_and_opens_on_any_number(method, count, tmp_path, crew):
    one, several = tmp_path / "one", tmp_path / "several"
    wanted = run(one, devices=1, method=method)
    for found in crew.ranks(count).run(run, several, devices=count, method=method):
        assert ranks.differences(found, wanted) == []
    files = sorted(file.name for file in one.glob("*.ckpt"))
    assert files == sorted(file.name for file in several.glob("*.ckpt")) == [
        "0-3.ckpt", "0-6.ckpt", "1-12.ckpt", "1-15.ckpt", "1-9.ckpt",
    ]  # fmt: skip
    for name in files:
        same(content(several / name), content(one / name))
    for devices, name in ((1, "0-3.ckpt"), (3 if count == 2 else 2, "0-6.ckpt"), (count, "1-9.ckpt")):
        where = crew.ranks(devices) if devices > 1 else None
        options = dict(ckpt=several / name, devices=devices, method=method, seed=8)
        for found in where.run(run, **options) if where else [run(**options)]:
            assert all(torch.equal(found["weights"][k], v) for k, v in wanted["weights"].items()), (name, devices)
            if found["losses"] is not None:
                assert torch.equal(found["losses"], wanted["losses"][-len(found["losses"]) :])


def test_plain_lightning_opens_it(tmp_path, crew):
    crew.ranks(2).run(run, tmp_path)
    file = tmp_path / "0-6.ckpt"
    _, module = ranks.fit(devices=1, module=ranks.Whole, data=stateful, ckpt=None, max_epochs=0)
    module.load_state_dict(torch.load(file, weights_only=True)["state_dict"])
    loaded = ranks.Whole.load_from_checkpoint(file)
    assert torch.equal(weights(loaded), weights(module))


def from_plain(file, devices):
    return ranks.result("pb", devices, partial(Regression, partial(network, seed=99)()), ckpt=file)


def test_a_plain_checkpoint_goes_on_over_several_devices(tmp_path, crew):
    from tests.lightning.cases import trainer

    plain = trainer(enable_checkpointing=True, callbacks=[saving(tmp_path)], max_epochs=1)
    plain.fit(Regression(), loader())
    (file,) = Path(tmp_path).glob("*.ckpt")
    wanted = from_plain(file, 1)
    for found in crew.ranks(2).run(from_plain, file, 2):
        assert ranks.differences(found, wanted) == []


def save_in_between(folder, devices):
    """`last`, a file saved by hand after fit, and a fit that goes on from "last"."""
    options = dict(data=stateful, module=ranks.Whole, enable_checkpointing=True, max_epochs=1)
    last = ModelCheckpoint(folder, save_last=True)
    first, module = ranks.fit("pb", devices, callbacks=[last], **options)
    first.save_checkpoint(folder / "after.ckpt")
    again = ModelCheckpoint(folder, save_last=True)
    options["max_epochs"] = 2
    second, module = ranks.fit("pb", devices, callbacks=[again], ckpt="last", **options)
    return ranks.outcome(second, module)


def test_last_and_by_hand(tmp_path, crew):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    wanted = save_in_between(tmp_path / "one", 1)
    for found in crew.ranks(2).run(save_in_between, tmp_path / "two", 2):
        assert all(torch.equal(found["weights"][k], v) for k, v in wanted["weights"].items())
    same(content(tmp_path / "two" / "after.ckpt"), content(tmp_path / "one" / "after.ckpt"))


def with_masters(folder=None, ckpt=None, devices=2, **options):
    callbacks = [] if folder is None else [saving(folder, every_n_train_steps=3)]
    return ranks.result(
        "cerebras", devices, ckpt=ckpt, given={"masters": True}, precision="bf16-true", callbacks=callbacks,
        enable_checkpointing=bool(callbacks), **options,
    )  # fmt: skip


def test_masters_are_in_the_checkpoint_of_any_number_of_devices(tmp_path, crew):
    wanted = with_masters(tmp_path / "one", devices=1)
    for found in crew.ranks(2).run(with_masters, tmp_path / "two"):
        assert ranks.differences(found, wanted) == []
    files = sorted(Path(tmp_path / "one").glob("*.ckpt"))
    assert len(files) > 2
    for file in files:
        same(content(tmp_path / "two" / file.name), content(file))
    wanted["losses"] = None
    for found in crew.ranks(2).run(with_masters, ckpt=tmp_path / "one" / files[0].name, seed=9):
        found["losses"] = None
        assert torch.equal(found["weights"]["model.0.0.weight"], wanted["weights"]["model.0.0.weight"])
        assert found["step"] == wanted["step"]
