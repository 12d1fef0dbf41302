"""What the Lightning tests run over: an ordinary LightningModule, its data, and a Trainer without noise."""

import logging
import warnings

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import pipeback.lightning
from tests.laws.cases import OPTIMIZERS, network

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", ".*does not have many workers.*")
warnings.filterwarnings("ignore", ".*smaller than the logging interval.*")


class Regression(pl.LightningModule):
    """Knows nothing of pipelines."""

    def __init__(self, model=None, optimizer="momentum", scheduler=None):
        super().__init__()
        self.model = network() if model is None else model
        self.optimizer, self.scheduler = optimizer, scheduler
        self.losses = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = mse_loss(self.model(x), y)
        self.losses.append(loss.detach())
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/loss", mse_loss(self.model(x), y))

    def configure_optimizers(self):
        made = OPTIMIZERS[self.optimizer](self.parameters())
        return made if self.scheduler is None else {"optimizer": made, "lr_scheduler": self.scheduler(made)}


def dataset(batches=12, samples=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    n = batches * samples
    return TensorDataset(torch.randn(n, 6, generator=generator), torch.randn(n, 6, generator=generator))


def loader(batches=12, samples=3, seed=1, **options):
    return DataLoader(dataset(batches, samples, seed), batch_size=samples, **options)


def trainer(strategy=None, tmp=None, **options):
    quiet = {
        "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 2,
        "num_sanity_val_steps": 0, "default_root_dir": tmp,
    }  # fmt: skip
    if strategy is not None:
        quiet["strategy"] = strategy
    return pl.Trainer(**{**quiet, **options})


def strategy(method="pb", **options):
    return pipeback.lightning.PipelineStrategy(method=method, **{"plan": False, **options})


def weights(module):
    return torch.cat([value.detach().flatten().double() for value in module.state_dict().values()])


def dropout_network(blocks=2):
    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.3))  # noqa: E731
    return nn.Sequential(*[block() for _ in range(blocks)], nn.Linear(6, 6))
