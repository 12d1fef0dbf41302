"""Sparse training and activations elsewhere, under Lightning: as Pipeline.push does it, and resumed bit for bit."""

import warnings

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import pipeback
from pipeback import sparsities
from pipeback.lightning import PipelineStrategy
from tests.lightning.cases import Regression, loader, strategy, trainer, weights

pytestmark = pytest.mark.usefixtures("small")
POLICY = {"density": 0.5, "every": 5}


def fit(store, path=None, epochs=2, method="cerebras", callbacks=(), sparse=True, **options):
    pl.seed_everything(7, verbose=False)
    module = Regression()
    streaming = pipeback.Streaming(store, sparsity=sparsities.create("set", **POLICY) if sparse else None)
    run = trainer(
        strategy(method, store=streaming, **options), max_epochs=epochs, callbacks=list(callbacks),
        enable_checkpointing=bool(callbacks),
    )  # fmt: skip
    run.fit(module, loader(), ckpt_path=path)
    return run, module


def zeros(module):
    return [float((p == 0).float().mean()) for name, p in module.named_parameters() if p.dim() > 1]


def test_stores_agree(tmp_path):
    _, wanted = fit(None)
    assert all(0.3 < share < 0.7 for share in zeros(wanted))
    for store in ("host", f"disk:{tmp_path / 'store'}"):
        _, found = fit(store)
        assert torch.equal(weights(found), weights(wanted)), store


@pytest.mark.parametrize("store", [None, "host", "disk"])
def test_resumed_is_uninterrupted(store, tmp_path):
    where = (lambda n: f"disk:{tmp_path / n}") if store == "disk" else lambda n: store
    _, wanted = fit(where("a"), epochs=4)
    saver = ModelCheckpoint(tmp_path / "checkpoints", every_n_epochs=1, save_top_k=-1, filename="{epoch}")
    fit(where("b"), epochs=2, callbacks=[saver])
    _, found = fit(where("c"), tmp_path / "checkpoints" / "epoch=1.ckpt", epochs=4)
    assert torch.equal(weights(found), weights(wanted))


def test_a_checkpoint_opens_in_plain_lightning(tmp_path):
    saver = ModelCheckpoint(tmp_path, every_n_epochs=1, filename="last")
    fit("host", callbacks=[saver], epochs=1)
    content = torch.load(tmp_path / "last.ckpt", weights_only=False)
    again = Regression()
    again.load_state_dict(content["state_dict"])
    shapes = [p.shape for p in again.parameters()]
    buffers = [s["momentum_buffer"].shape for s in content["optimizer_states"][0]["state"].values()]
    assert buffers == shapes
    plain = pl.Trainer(
        accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    plain.fit(again, loader(), ckpt_path=tmp_path / "last.ckpt", weights_only=False)


@pytest.mark.parametrize("activations", ["recompute", "host"])
def test_activations(activations):
    wanted = fit(None, method="gpipe", sparse=False)[1]
    for store in (None, "host"):
        found = fit(store, method="gpipe", sparse=False, activations=activations)[1]
        assert torch.equal(weights(found), weights(wanted))


def test_bad_options():
    with pytest.raises(ValueError, match="unknown sparsity 'sett'; did you mean 'set'"):
        PipelineStrategy("gpipe", store=pipeback.Streaming(sparsity="sett"))
    with pytest.raises(ValueError, match="activations must be one of device, recompute, host, but is 'disk'"):
        fit(None, sparse=False, activations="disk")


@pytest.mark.parametrize(("method", "size"), [("pb", 2), ("pb", None), ("gpipe", 2)])
def test_a_name_knows_the_length_of_the_training(method, size):
    run = trainer(
        strategy(method, store=pipeback.Streaming(sparsity="rigl"), micro_batch_size=size), max_epochs=2
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run.fit(Regression(), loader())
    assert not [w for w in said if "is taken with" in str(w.message)]
    pipe = run.strategy.pipeline
    updates = 2 * len(loader()) if method == "gpipe" else pipe.arrived
    assert pipe._engine.holding.sparsity.until == 3 * updates // 4


def test_a_name_in_a_training_without_an_end():
    run = trainer(strategy("pb", store=pipeback.Streaming(sparsity="gradual")), max_epochs=-1, max_time={"seconds": 1})
    with pytest.warns(UserWarning, match="sparsity='gradual' is taken with steps=30, every=100"):
        run.fit(Regression(), loader())
