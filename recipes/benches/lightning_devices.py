"""Compares fits over two devices, which are two processes on one machine, and fits of two threads, with fits on one
device: with stages one by one, and as one where that is faster.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch

from pipeback import HostStore
from pipeback.lightning import PipelineStrategy
from pipeback.recipes.benches.network import create, sgd
from pipeback.recipes.benches.turns import one_thread, spread
from pipeback.recipes.benches.under_lightning import COUNT, NARROW, ONES, TRANSFORMER, Clock, Dataset, run
from pipeback.recipes.markdown import table

BATCHES = 2 * COUNT
CASES = ONES.index(NARROW), ONES.index(TRANSFORMER)


class Fit(NamedTuple):
    """How a fit is done. workers: threads that share the stages of a device. ahead: the `prefetch` of a host store."""

    words: str
    devices: int = 1
    workers: int | None = None
    vectorize: bool | str = False
    ahead: int | None = None
    precision: str = "32-true"


FITS = (
    Fit("one device"),
    Fit("two threads", workers=2),
    Fit("two devices", devices=2),
    Fit('one device, `"auto"`', vectorize="auto"),
    Fit('two threads, `"auto"`', workers=2, vectorize="auto"),
    Fit('two devices, `"auto"`', devices=2, vectorize="auto"),
)


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
    columns = []
    for number in CASES:
        turns = [[seconds(number, fit) for fit in FITS] for _ in range(repeats)]
        one, *_, one_auto, threads_auto, two_auto = every = list(zip(*turns, strict=True))
        pairs = *((one, some) for some in every[1:]), (one_auto, threads_auto), (one_auto, two_auto)
        columns.append([spread([a / b for a, b in zip(*pair, strict=True)]) for pair in pairs])
    words = *(f"{fit.words}, over one device" for fit in FITS[1:]), *(f'{n}, over one device with `"auto"`' for n in
             (FITS[-2].words, FITS[-1].words))  # fmt: skip
    print("Lightning with `pb`, batches of 64 micro-batches of one sample; a device is a process with a core.\n")
    rows = [[name, *cells] for name, *cells in zip(words, *columns, strict=True)]
    print(table(["samples per second", *(ONES[number].words for number in CASES)], rows))


def seconds(number: int, fit: Fit) -> float:
    """Return the time per batch of a fit."""
    clock, case = Clock(), ONES[number]
    batches = torch.utils.data.DataLoader(Dataset(BATCHES, number), batch_size=None)
    where = PipelineStrategy(
        create("pb", case.stages), micro_batch_size=1, vectorize=fit.vectorize, workers=fit.workers, plan=False,
        store=None if fit.ahead is None else HostStore(prefetch=fit.ahead),
    )  # fmt: skip
    with one_thread():
        run(Module(number), batches, where, [clock], fit.devices, fit.precision)
    return clock.per_batch()
