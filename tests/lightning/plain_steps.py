"""A training_step of plain code, and fits with and without graphs that stand for it."""

import lightning.pytorch as pl
import torch
from torch import nn

from pipeback.lightning import captured_step
from tests.laws.as_one import S, model
from tests.laws.cases import CASES, OPTIMIZERS
from tests.lightning.cases import DataLoader, TensorDataset, dataset, strategy, trainer

SAMPLES, BATCHES = 8, 6
seen = []  # by what is more than plain code


class Plain(pl.LightningModule):
    """As most are written."""

    def __init__(self, optimizer="momentum"):
        super().__init__()
        self.save_hyperparameters({"optimizer": optimizer, "share": 0.5})
        self.model = model()
        self.criterion = nn.MSELoss()
        self.register_buffer("each", torch.linspace(0.5, 1.5, 6, dtype=torch.float64))
        self.after, self.logged = [], []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.criterion(self.model(x), y)
        self.log("train/loss", loss, prog_bar=True, batch_size=len(x))
        return loss

    def on_train_batch_end(self, *_):
        self.after.append(torch.cat([p.detach().flatten() for p in self.parameters()]))
        self.logged.append({name: value.clone() for name, value in self.trainer.callback_metrics.items()})

    def configure_optimizers(self):
        return OPTIMIZERS[self.hparams.optimizer](self.parameters())


def data(batches=BATCHES):
    found = dataset(batches, SAMPLES)
    return DataLoader(TensorDataset(*(t.double() for t in found.tensors)), batch_size=SAMPLES)


def fitted(kind, case="pb", size=1, loader=None, where=None, **options):
    pl.seed_everything(3, verbose=False)
    module = kind()
    how = strategy(CASES[case](S), micro_batch_size=size, **{"vectorize": True, **(where or {})})
    trainer(how, **{"max_epochs": 1, "logger": False, **options}).fit(module, loader or data())
    return module, how


def step_of(how):
    return how.vectorized["training_step"]


def alike(monkeypatch, kind, case="pb", told="a graph stands for it", **options):
    """Fit with graphs and without, and compare all numbers to the bit."""
    found, how = fitted(kind, case, **options)
    assert told in step_of(how), step_of(how)
    with monkeypatch.context() as patched:
        patched.setattr(captured_step, "FEW", 1000)
        wanted, other = fitted(kind, case, **options)
    assert "training_step" not in other.vectorized
    same_fits(found, wanted)
    return found, wanted


def same_fits(found, wanted):
    """Compare the weights and what was logged, after every batch."""
    assert len(found.after) == len(wanted.after) > 0
    for mine, others in ((found.after, wanted.after), (found.logged, wanted.logged)):
        torch.testing.assert_close(mine, others, rtol=0, atol=0, equal_nan=True)
