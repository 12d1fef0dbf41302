"""Fits whose weights live in a store, and what two fits have in common."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from pipeback.streaming.store import HostStore
from tests.lightning import ranks
from tests.lightning.cases import Regression, loader, strategy, trainer, weights

STORES = {
    "host": lambda folder: "host",
    "host-3": lambda folder: HostStore(prefetch=3),
    "disk": lambda folder: f"disk:{folder / 'a'}",
}


def fitted(store=None, method="gpipe", size=None, module=Regression, data=loader, val=None, seed=7, **options):
    pl.seed_everything(seed, verbose=False)
    found = module()
    run = trainer(strategy(method, micro_batch_size=size, store=store), **options)
    run.fit(found, data(), None if val is None else val())
    return run, found


def same(found, wanted):
    assert torch.equal(weights(found), weights(wanted))
    assert torch.equal(torch.stack(found.losses), torch.stack(wanted.losses))


def saved(folder):
    return sorted(folder.glob("*.ckpt"), key=lambda file: int(file.stem.split("-")[-1]))


def checkpoints(folder):
    return ModelCheckpoint(
        folder, save_top_k=-1, every_n_train_steps=5, filename="{step}", auto_insert_metric_name=False
    )


def equal(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a, b) if torch.is_tensor(a) else a == b


def streamed(store, folder, **options):
    """Results, what a checkpoint holds, and bytes of weights that were copied."""
    given = {**options.pop("given", {}), "store": store}
    run, module = ranks.fit(devices=2, given=given, callbacks=[Bytes()], **options)
    run.save_checkpoint(folder / "two.ckpt")
    return ranks.outcome(run, module), run.callbacks[0].traffic


class Bytes(pl.Callback):
    def on_train_end(self, trainer, module):
        self.traffic = trainer.strategy.pipeline.traffic()
