"""Checkpoints and evaluation of weights that live in a store."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from tests.helpers.choice import rare
from tests.laws.cases import network
from tests.lightning.cases import Regression, loader, strategy, trainer, weights
from tests.lightning.streamed import STORES, checkpoints, equal, fitted, same, saved

pytestmark = pytest.mark.usefixtures("small")


@pytest.mark.parametrize(("method", "size"), [("pb", None), ("cerebras", 1), rare("pipedream", None), rare("gpipe", 1)])
def test_checkpoints_are_those_without_a_store(method, size, tmp_path):
    """Weights, the optimizer's state and what is in flight; one resumes from the other, and plain Lightning from it."""

    def fit(store, folder=None, ckpt=None):
        pl.seed_everything(7, verbose=False)
        module = Regression(optimizer="momentum")
        callbacks = [checkpoints(folder)] if folder else []
        run = trainer(
            strategy(method, micro_batch_size=size, store=store), callbacks=callbacks,
            enable_checkpointing=bool(callbacks),
        )  # fmt: skip
        run.fit(module, torch.utils.data.DataLoader(loader().dataset, batch_size=3), ckpt_path=ckpt)
        return run, module

    _, wanted = fit(None, tmp_path / "resident")
    resident = saved(tmp_path / "resident")
    for name, store in STORES.items():
        run, found = fit(store(tmp_path), tmp_path / name)
        same(found, wanted)
        assert len(resident) == len(saved(tmp_path / name)) == 4
        for ours, theirs in zip(saved(tmp_path / name), resident, strict=True):
            ours, theirs = torch.load(ours, weights_only=True), torch.load(theirs, weights_only=True)
            assert equal(ours["state_dict"], theirs["state_dict"])
            assert equal(ours["optimizer_states"], theirs["optimizer_states"])
            here, there = ours["pipeback"]["state"], theirs["pipeback"]["state"]
            assert equal(here["stages"], there["stages"]) and here["plain"]["loops"] == there["plain"]["loops"]
        run.save_checkpoint(tmp_path / f"{name}-after.ckpt")
        after = torch.load(tmp_path / f"{name}-after.ckpt", weights_only=True)
        assert equal(after["state_dict"], dict(found.state_dict())) and "pipeback" in after
        plain = Regression(network(seed=99))
        plain.load_state_dict(after["state_dict"])
        assert torch.equal(weights(plain), weights(found))
        if method == "pb":
            with pytest.warns(UserWarning, match="dataloader is not resumable"):
                for ckpt, where in ((resident[1], store(tmp_path)), (saved(tmp_path / name)[1], None)):
                    _, first = fit(None, ckpt=ckpt)
                    _, second = fit(where, ckpt=ckpt)
                    assert torch.equal(weights(first), weights(second))


@pytest.mark.parametrize("store", STORES)
def test_resumed_is_uninterrupted(store, tmp_path):
    """From an epoch's end, with micro-batches in flight."""

    def fit(folder, seed=0, ckpt=None, epochs=3):
        module = Regression(network(seed=seed), optimizer="momentum")
        saving = ModelCheckpoint(tmp_path / folder, save_top_k=-1, filename="{epoch}", auto_insert_metric_name=False)
        run = trainer(
            strategy("cerebras", store=STORES[store](tmp_path / folder)), callbacks=[saving], max_epochs=epochs,
            enable_checkpointing=True,
        )  # fmt: skip
        run.fit(module, loader(), loader(2), ckpt_path=ckpt)
        return module

    whole = fit("whole")
    for epoch in (0, 1):
        resumed = fit(f"again-{epoch}", seed=99, ckpt=tmp_path / "whole" / f"{epoch}.ckpt")
        assert torch.equal(weights(whole), weights(resumed))


class Predicting(Regression):
    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        return self.model(batch[0])


@pytest.mark.parametrize("store", STORES)
def test_validate_test_and_predict(store, tmp_path):
    """Before a fit, within it, and after it."""
    seen = []
    for where in (None, STORES[store](tmp_path)):
        module = Predicting()
        run = trainer(strategy("cerebras", store=where), val_check_interval=0.25, num_sanity_val_steps=1)
        mine = []
        for _ in range(2):
            mine += [run.validate(module, loader(2), verbose=False), run.test(module, loader(2), verbose=False)]
            mine += [run.predict(module, loader(2)), module.model(torch.ones(2, 6)).detach()]
            run.fit(module, loader(), loader(2))
            mine += [dict(run.callback_metrics), weights(module)]
        seen.append(mine)
    assert equal(*seen)


@pytest.mark.parametrize("store", STORES)
def test_after_a_failure_the_module_has_its_weights(store, tmp_path):
    class Fails(nn.Tanh):
        now = False

        def forward(self, x):
            if Fails.now:
                raise OSError("mine")
            return super().forward(x)

    class AtTheNinthBatch(pl.Callback):
        """The rehearsal in the first one runs forwards as often as its measurement takes."""

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            Fails.now = batch_idx == 8

    model = nn.Sequential(*network(), Fails())
    module, before = Regression(model), weights(model)
    with pytest.raises(RuntimeError, match="stage 5 .* the forward failed: mine"):
        run = trainer(strategy("pb", store=STORES[store](tmp_path)), callbacks=[AtTheNinthBatch()])
        run.fit(module, loader())
    found = weights(module)
    assert torch.isfinite(found).all() and not torch.equal(found, before)
    fitted(STORES[store](tmp_path))  # its folder is free again
