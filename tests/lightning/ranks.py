"""What a rank of a Trainer does in the tests of several devices: fit a case, and give back all that came of it.

All of it is at the top of a file, so that it can be sent to other processes.
"""

from __future__ import annotations

import warnings
from functools import partial

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from torchmetrics import MeanSquaredError

from pipeback import methods
from tests.laws import as_one
from tests.lightning.cases import DataLoader, Regression, TensorDataset, dataset, loader, strategy, trainer

shuffled = partial(loader, shuffle=True)


def cycle(optimizer):
    return {"scheduler": OneCycleLR(optimizer, 0.05, total_steps=24), "interval": "step"}


def plateau(optimizer, interval="epoch"):
    scheduler = ReduceLROnPlateau(optimizer, patience=0, threshold=1e9, factor=0.5)
    return {"scheduler": scheduler, "monitor": "train/loss", "interval": interval}


def plateau_of_error(optimizer):
    scheduler = ReduceLROnPlateau(optimizer, patience=0, threshold=1e9, factor=0.5)
    return {"scheduler": scheduler, "monitor": "train/error"}


def drawing():
    """Batch statistics, dropout, and a table that is no weight."""
    torch.manual_seed(3)
    blocks = [
        nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6) if n % 2 else Shift(), nn.Tanh(), nn.Dropout(0.2))
        for n in range(4)
    ]
    return nn.Sequential(*blocks, nn.Linear(6, 6))


class Shift(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.linspace(0, 1, 6), persistent=False)

    def forward(self, x):
        return x + self.table


class Dropout(pl.Callback):
    """Sets a rate for every batch."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        for each in module.modules():
            if isinstance(each, nn.Dropout):
                each.p = 0.1 * (1 + batch_idx % 3)


class Freezes(pl.Callback):
    """Freezes weights of every rank, and has them trained again."""

    def on_fit_start(self, trainer, module):
        module.model[0].requires_grad_(False)

    def on_train_epoch_start(self, trainer, module):
        module.model[-1].requires_grad_(trainer.current_epoch == 0)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 5:
            module.model[0].requires_grad_(True)

    def on_train_epoch_end(self, trainer, module):
        module.model[0].requires_grad_(trainer.current_epoch == 0)


class Whole(Regression):
    """Logs in every way: on the step, on the epoch, a metric, with sync_dist; and draws before it calls the model."""

    def __init__(self, model=drawing, **options):
        super().__init__(model(), **options)
        self.error, self.val_error = MeanSquaredError(), MeanSquaredError()
        self.head_shift = nn.Parameter(torch.ones(()), requires_grad=False)

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.log("early", float(batch_idx))
        output = self.model(x + 0.01 * torch.randn_like(x))
        loss = mse_loss(output * self.head_shift, y)
        self.losses.append(loss.detach())
        self.error(output, y)
        self.log("train/loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("train/error", self.error, on_epoch=True)
        return {"loss": loss, "other": output}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        output = self.model(x)
        self.val_error(output, y)
        self.log("val/error", self.val_error)
        self.log("val/sum", output.sum(), reduce_fx="sum", sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        return self.model(batch[0])


def fit(method="pb", devices=2, module=Regression, data=loader, val=None, ckpt=None, given=None, seed=7, **named):
    """Fit on so many devices; returns trainer and module. given: options of the strategy."""
    quiet()
    if seed is None:
        torch.seed()
    else:
        pl.seed_everything(seed, verbose=False)
    module = module()
    where = strategy(method if isinstance(method, str) else methods.create(method[0], **method[1]), **(given or {}))
    run = trainer(where, devices=devices, **named)
    run.fit(module, data(), None if val is None else val(), ckpt_path=ckpt)
    return run, module


def quiet():
    torch.set_num_threads(1)
    for text in ("takes its statistics", "does not have many workers", "have no `val_dataloader`", "LeafSpec"):
        warnings.filterwarnings("ignore", f".*{text}")


def result(*args, **named):
    return outcome(*fit(*args, **named))


def outcome(run, module):
    return {
        "weights": {k: v.clone() for k, v in [*module.state_dict().items(), *module.named_buffers()]},
        "metrics": {k: float(v) for k, v in run.callback_metrics.items()},
        "losses": torch.stack(module.losses) if module.losses else None,
        "step": (run.global_step, run.current_epoch),
    }


def differences(found, wanted):
    """Names of what is not equal, bit for bit."""
    odd = [k for k, v in wanted["weights"].items() if not torch.equal(v, found["weights"][k])]
    odd += sorted(set(wanted["weights"]) ^ set(found["weights"]))
    if found["losses"] is not None and not torch.equal(found["losses"], wanted["losses"]):
        odd.append("losses")
    return odd + [key for key in ("metrics", "step") if found[key] != wanted[key]]


def _halve(p):
    p.grad.mul_(0.5)


def hooked():
    """With hooks on weights."""
    module = Regression(drawing())
    for p in module.model[1].parameters():
        p.register_hook(lambda g: g * 0.5)
    module.model[0][0].weight.register_post_accumulate_grad_hook(_halve)
    return module


def deep():
    """Stages that are alike, in float64."""
    return Regression(as_one.model(), scheduler=cycle)


def doubled(batches=6, samples=5):
    """The last slice of a batch is shorter than the others."""
    return DataLoader(TensorDataset(*(t.double() for t in dataset(batches, samples).tensors)), batch_size=samples)


def single():
    return Regression(as_one.model(torch.float32), scheduler=cycle)


def singles():
    return loader(6, 5)
