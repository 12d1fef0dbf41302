"""Compares fits over two devices, which are two processes on one machine, with fits on one: with stages one by one, and
as one where that is faster. Every fit starts processes of its own.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch

from pipeback.lightning import PipelineStrategy
from pipeback.recipes.benches.network import create, sgd
from pipeback.recipes.benches.turns import one_thread, spread
from pipeback.recipes.benches.under_lightning import COUNT, ONES, Clock, Dataset, run
from pipeback.recipes.markdown import table

BATCHES = 2 * COUNT
CASES = 0, 2  # of `ONES`
FITS: list[tuple[int, bool | str]] = [(1, False), (1, "auto"), (2, False), (2, "auto")]  # devices, vectorize


class Module(pl.LightningModule):
    """One of the networks, which processes can be sent."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.case = ONES[number]
        self.model = self.case.build()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return self.case.loss(self.model(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self.parameters())


def main(repeats: int) -> None:
    """Print a table of the fits, of which those of a turn follow each other."""
    rows = []
    for number in CASES:
        turns = [[seconds(number, *fit) for fit in FITS] for _ in range(repeats)]
        one, one_auto, two, two_auto = zip(*turns, strict=True)
        pairs = (one, two), (one, one_auto), (two, two_auto), (one_auto, two_auto)
        rows.append([ONES[number].words, *(spread([a / b for a, b in zip(*pair, strict=True)]) for pair in pairs)])
    print("Lightning with `pb`, batches of 64 micro-batches of one sample; a device is a process with a core.\n")
    print(table(
        ["", "one by one, two devices over one", '`"auto"` over one by one, one device',
         '`"auto"` over one by one, two devices', '`"auto"`, two devices over one'], rows,
    ))  # fmt: skip


def seconds(number: int, devices: int, vectorize: bool | str) -> float:
    """Return the time per batch of a fit."""
    clock, case = Clock(), ONES[number]
    batches = torch.utils.data.DataLoader(Dataset(BATCHES, number), batch_size=None)
    where = PipelineStrategy(create("pb", case.stages), micro_batch_size=1, vectorize=vectorize, plan=False)
    with one_thread():
        run(Module(number), batches, where, [clock], devices)
    return clock.per_batch()
