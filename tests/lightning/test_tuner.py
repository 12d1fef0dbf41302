"""Lightning's tuner tries a fit and takes it back: the fit after it is the one that would have been without it."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.nn.functional import mse_loss

from pipeback import DiskStore
from pipeback.lightning import PipelineStrategy

OPTIONS = {
    "event loop": lambda folder: {},
    "as one": lambda folder: {"vectorize": "auto", "micro_batch_size": 1},
    "followed": lambda folder: {"module": "self"},
    "host": lambda folder: {"store": "host"},
    "disk": lambda folder: {"store": DiskStore(folder / "store")},
}


class Module(pl.LightningModule):
    def __init__(self, lr=0.05, batch_size=2):
        super().__init__()
        self.save_hyperparameters()
        self.lr, self.batch_size = lr, batch_size
        torch.manual_seed(0)
        self.model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)])

    def training_step(self, batch, batch_idx):
        loss = mse_loss(self.model(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randn(2, 32, 6, generator=generator)
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), self.batch_size)


def trainer(folder, options, *callbacks, devices=1):
    return pl.Trainer(
        accelerator="cpu", devices=devices, max_epochs=2, logger=False, enable_checkpointing=False,
        callbacks=[*callbacks], enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        strategy=PipelineStrategy("pb", **OPTIONS[options](folder)),
    )  # fmt: skip


def same_as_a_fit_alone(module, folder, options):
    alone = Module(module.lr, module.batch_size)
    trainer(folder / "alone", options).fit(alone)
    for found, wanted in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_rate_is_found(options, tmp_path):
    module, by = Module(), trainer(tmp_path, options)
    found = Tuner(by).lr_find(module, num_training=30, min_lr=1e-3, max_lr=1.0)
    assert module.lr == found.suggestion() != 0.05
    by.fit(module)
    same_as_a_fit_alone(module, tmp_path, options)


@pytest.mark.parametrize("options", ["event loop", "disk"])
def test_a_batch_size_is_found(options, tmp_path):
    module, by = Module(), trainer(tmp_path, options)
    assert Tuner(by).scale_batch_size(module, max_trials=2, steps_per_trial=2) == module.batch_size == 4
    by.fit(module)
    same_as_a_fit_alone(module, tmp_path, options)


@pytest.mark.parametrize("options", ["event loop", "host", "disk"])
def test_a_rate_is_found_as_a_fit_begins(options, tmp_path):
    module = Module()
    trainer(tmp_path, options, LearningRateFinder(num_training_steps=30, min_lr=1e-3, max_lr=1.0)).fit(module)
    same_as_a_fit_alone(module, tmp_path, options)


def tried(folder):
    """What a rank of two says."""
    with pytest.raises(ValueError, match=r"Tuner.lr_find .* find the rate with Trainer\(devices=1\)") as raised:
        Tuner(trainer(folder, "event loop", devices=2)).lr_find(Module(), num_training=20)
    return str(raised.value)


def test_it_is_refused_on_several_devices(crew, tmp_path):
    assert all("amid a fit on several devices" in told for told in crew.ranks(2).run(tried, tmp_path))
    module, by = Module(), trainer(tmp_path, "event loop")
    Tuner(by).lr_find(module, num_training=30, min_lr=1e-3, max_lr=1.0)  # the cure
