"""Compares Lightning with Pipeline.push: samples per second on batches of 64 cut into 64 micro-batches."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import pipeback
from pipeback.recipes.benches.against import Rows
from pipeback.recipes.benches.network import create, network, pipeline, sgd
from pipeback.recipes.benches.turns import spread
from pipeback.recipes.markdown import table

METHODS = ("pb", "cerebras")
COUNT = 8  # batches of a turn


def main(repeats: int) -> None:
    """Run one fit; after every batch the same batch is pushed into another pipeline, so that times are paired."""
    import lightning.pytorch as pl

    class Paired(pl.Callback):
        def __init__(self, pipe: pipeback.Pipeline) -> None:
            self.pipe, self.fit, self.push = pipe, [], []  # type: ignore[var-annotated]
            self.began = 0.0

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            middle = time.perf_counter()
            self.pipe.push(*batch)
            end = time.perf_counter()
            if batch_idx >= COUNT:  # the first ones are a warm-up
                self.fit.append(middle - self.began)
                self.push.append(end - middle)
            self.began = time.perf_counter()

    found = data(COUNT * (repeats + 1))
    print("Lightning with the strategy: batches of 64 micro-batches of one sample, 20 stages of width 64.\n")
    rows = []
    for name in METHODS:
        for watched in (False, True):
            paired = Paired(pipeline(name, micro_batch_size=1))
            fit(name, torch.utils.data.DataLoader(found, batch_size=None), watched, paired)  # type: ignore[arg-type]
            ratios = [
                sum(paired.push[n : n + COUNT]) / sum(paired.fit[n : n + COUNT])
                for n in range(0, len(paired.fit), COUNT)
            ]
            rows.append([label(name, watched), spread(ratios)])
    print(table(["", "of the samples/s of `Pipeline.push`"], rows))


def label(method: str, watched: bool) -> str:
    return f"`{method}`" + (" with `PipelineMonitor`" if watched else "")


def data(batches: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return [(torch.randn(64, 64), torch.randint(0, 10, (64,))) for _ in range(batches)]


def fit(method: str, batches: Iterable[Any], watched: bool, *callbacks: Any) -> None:
    """Fit the 20 stages for one epoch. watched: by a `PipelineMonitor`."""
    import lightning.pytorch as pl

    from pipeback.lightning import PipelineMonitor, PipelineStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = network()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            loss = cross_entropy(self.model(x), y)
            self.log("train/loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self.parameters())

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet: dict[str, Any] = {
        "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False, "max_epochs": 1,
        "enable_progress_bar": False, "enable_model_summary": False,
        "callbacks": [PipelineMonitor(), *callbacks] if watched else list(callbacks),
    }  # fmt: skip
    where = PipelineStrategy(create(method, 20), micro_batch_size=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a loader without workers, of a run without a log
        pl.Trainer(strategy=where, **quiet).fit(Module(), batches)


def rows() -> Rows:
    """What `against=` compares."""
    words = "20 blocks of width 64, batches of 64"
    both = (False, True)
    return {(words, label(name, watched)): partial(train, name, watched) for name in METHODS for watched in both}


def train(method: str, watched: bool, turns: Iterable[None]) -> None:
    """A turn has this many batches; Lightning asks for one ahead, which makes no difference from turn to turn."""
    batches = data(COUNT)
    fit(method, (batch for _ in turns for batch in batches), watched)
