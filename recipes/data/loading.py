"""Loading: tensors in memory, read in whole batches, which all data of the recipes share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

Batch = tuple[Tensor, Tensor]

try:  # its loader and sampler have a state, so that a run can resume in the middle of an epoch
    from torchdata.stateful_dataloader import StatefulDataLoader as Loader
    from torchdata.stateful_dataloader.sampler import RandomSampler
except ImportError:
    from torch.utils.data import DataLoader as Loader
    from torch.utils.data import RandomSampler


class Samples(Dataset[Batch]):
    """Inputs x (N, …) and targets y (N, …), of which one indexing operation takes a batch.

    prepare: (x, y, indices) of a batch -> (x, y) for the model
    """

    def __init__(self, x: Tensor, y: Tensor, prepare: Callable[[Tensor, Tensor, Tensor], Batch] | None = None) -> None:
        self.x, self.y, self.prepare = x, y, prepare

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Batch:
        x, y = self.__getitems__([index])
        return x[0], y[0]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        rows = torch.as_tensor(indices)
        x, y = self.x[rows], self.y[rows]
        return (x, y) if self.prepare is None else self.prepare(x, y, rows)


def as_it_is(batch: Any) -> Any:
    return batch  # Samples.__getitems__ has already made a batch


class Data(LightningDataModule):
    """Training and validation samples. A subclass defines `load()`, which returns both and sets `facts`.

    batch_size  samples per training batch
    seed        seed of the order of the training samples
    """

    validation_batch = 256
    limits = "data.samples and data.val_samples"

    def __init__(self, batch_size: int = 32, seed: int = 0) -> None:
        super().__init__()
        self.batch_size, self.seed = batch_size, seed
        self.facts: dict[str, Any] = {}
        """The facts that a model builder needs; they exist after `setup`."""
        self.parts: tuple[Samples, Samples] | None = None
        self.order = torch.Generator().manual_seed(seed)

    def load(self) -> tuple[Samples, Samples]:
        raise NotImplementedError

    def setup(self, stage: str | None = None) -> None:
        if self.parts is None:
            self.parts = self.load()
            for name, part in zip(("training", "validation"), self.parts, strict=True):
                if not len(part):
                    raise ValueError(f"data={type(self).__name__}: no {name} samples are left by {self.limits}")

    @property
    def training(self) -> Samples:
        self.setup()
        assert self.parts is not None
        return self.parts[0]

    @property
    def validation(self) -> Samples:
        self.setup()
        assert self.parts is not None
        return self.parts[1]

    @property
    def epoch_samples(self) -> int:
        """Return the training samples per epoch."""
        return len(self.training)

    def train_dataloader(self) -> DataLoader[Batch]:
        # every epoch is one torch.randperm of this generator
        return self._loader(self.training, self.batch_size, sampler=RandomSampler(self.training, generator=self.order))

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a checkpoint's state: Lightning restores the loader within an epoch, but not at its end."""
        self.order.set_state(state["order"])

    def val_dataloader(self) -> DataLoader[Batch]:
        return self._loader(self.validation, self.validation_batch)

    def _loader(self, samples: Samples, batch_size: int, **options: Any) -> DataLoader[Batch]:
        # a generator of its own, since a loader draws a number per epoch, which must not change the model's dropout
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "'set_vital'")  # torchdata 0.11 calls what torch 2.15 deprecates
            return Loader(samples, batch_size=batch_size, collate_fn=as_it_is, generator=torch.Generator(), **options)
