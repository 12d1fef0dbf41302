"""Compares fits over two devices, which are two processes on one machine, and fits of two threads, with fits on one
device: with stages one by one, and as one where that is faster.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch

from pipeback import DiskStore, HostStore
from pipeback.lightning import PipelineStrategy
from pipeback.recipes.benches.network import create, sgd
from pipeback.recipes.benches.turns import one_thread, spread
from pipeback.recipes.benches.under_lightning import COUNT, NARROW, ONES, TRANSFORMER, Clock, Dataset, run
from pipeback.recipes.markdown import table

BATCHES = 2 * COUNT
CASES = ONES.index(NARROW), ONES.index(TRANSFORMER)


class Fit(NamedTuple):
    """How a fit is done. workers: threads that share the stages of a device. ahead: the `prefetch` of a store, which is
    in host memory or on disk; None: there is no store.
    """

    words: str
    devices: int = 1
    workers: int | None = None
    vectorize: bool | str = False
    ahead: int | None = None
    on_disk: bool = False
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
    print("Lightning with `pb`, batches of 64 micro-batches of one sample; a device is a process with a core.\n")
    compare(FITS, repeats)


def compare(fits: Sequence[Fit], repeats: int) -> None:
    """Print a table of such fits, over the first one; and of those whose stages run as one, over the first of these."""
    first = next(n for n, fit in enumerate(fits) if fit.vectorize)
    pairs = [*((0, n) for n in range(1, len(fits))), *((first, n) for n in range(first + 1, len(fits)))]
    columns = []
    for number in CASES:
        every = list(zip(*([seconds(number, fit) for fit in fits] for _ in range(repeats)), strict=True))
        columns.append([spread([x / y for x, y in zip(every[a], every[b], strict=True)]) for a, b in pairs])
    rows = zip([f"{fits[b].words}, over {fits[a].words}" for a, b in pairs], *columns, strict=True)
    print(
        table(["samples per second", *(ONES[number].words for number in CASES)], [list(row) for row in rows]),
        flush=True,
    )


def seconds(number: int, fit: Fit) -> float:
    """Return the time per batch of a fit."""
    clock, case = Clock(), ONES[number]
    batches = torch.utils.data.DataLoader(Dataset(BATCHES, number), batch_size=None)
    with one_thread(), tempfile.TemporaryDirectory() as folder:
        kind = partial(DiskStore, folder) if fit.on_disk else HostStore
        where = PipelineStrategy(
            create("pb", case.stages), micro_batch_size=1, vectorize=fit.vectorize, workers=fit.workers, plan=False,
            store=None if fit.ahead is None else kind(prefetch=fit.ahead),
        )  # fmt: skip
        run(Module(number), batches, where, [clock], fit.devices, fit.precision)
    return clock.per_batch()
