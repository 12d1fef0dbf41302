"""A fit under Lightning: module, method, optimizer, data, options of Trainer and strategy, and how it goes on.

A fit's repr is Python that makes it again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from tests.fuzz.cases import METHODS
from tests.fuzz.models import DRAWING, WHOLE, WIDTH
from tests.fuzz.replayed import Replayed

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, repr=False)
class Fit(Replayed):
    """A configuration.

    kind: where the module has its layers, and who calls them: `model` (an nn.Sequential that training_step calls),
    `body` (a module with a forward of its own), `own` (the LightningModule's forward), `pair` (two modules, one after
    the other), `many` (each layer by itself). model, stages, seed, method, optimizer, decay: as a `Program` has them.
    samples, batch: of an epoch, and of a batch. size: of a micro-batch. accumulate, clip, validate, precision: of the
    Trainer. scheduler: a name of `module.SCHEDULERS`. skips: batches for which training_step returns None. quirks:
    what else module and callbacks do, see `module.Module`. ema: a callback averages the weights. reference: of the
    strategy, which scales the rates. twice: fit is called again. runtime: options that must not change a number, the
    Trainer's devices among them. resume: the update after which it goes on from a checkpoint, in another Trainer;
    other: with these options, if not with the same.
    """

    kind: str = "model"
    model: str = "linear"
    stages: int = 3
    seed: int = 0
    method: str = "pb-2"
    optimizer: str = "sgd"
    decay: float = 0.0
    samples: int = 12
    batch: int = 4
    size: int | None = None
    epochs: int = 1
    accumulate: int = 1
    clip: tuple[str, float] | None = None
    scheduler: str | None = None
    skips: tuple[int, ...] = ()
    validate: int | None = None
    drain: str = "end"
    quirks: tuple[str, ...] = ()
    resume: int | None = None
    runtime: dict[str, Any] = field(default_factory=dict)
    other: dict[str, Any] | None = None
    precision: str = "32-true"
    twice: bool = False
    ema: bool = False
    reference: int | None = None

    @property
    def by_the_event_loop(self) -> Fit:
        """The same on one device, stage by stage, with its weights there."""
        kept = {name: value for name, value in self.runtime.items() if name == "masters"}
        return replace(self, runtime=kept, other=None)

    @property
    def as_one(self) -> Any:
        """Whether stages may run as one at any time, which rounds otherwise: False, "auto" or True."""
        return self.runtime.get("vectorize") or (self.other or {}).get("vectorize") or False

    @property
    def goes_on_with(self) -> dict[str, Any]:
        return self.runtime if self.other is None else self.other

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and data: the one in which what is rounded otherwise is told from what is wrong."""
        return torch.float64 if self.as_one and self.precision == "32-true" else torch.float32

    @property
    def is_plain(self) -> bool:
        """Whether it is what Lightning does without a pipeline, to the bit."""
        alone = self.size is None and self.accumulate == 1 and self.clip is None and self.reference is None
        return self.method == "sgd" and alone and not self.ema and self.model not in DRAWING and self.drain == "end"

    @property
    def goes_on(self) -> bool:
        """Whether it is to go on from a checkpoint: without a batch that is left, a model that the first batch cuts
        loses what is in flight, with a warning.
        """
        if self.resume is None:
            return False
        batches = -(-self.samples // self.batch) * self.epochs
        return self.kind == "model" or (self.resume + 1) * self.accumulate < batches

    def library(self) -> Any:
        return METHODS[self.method].library(self.stages)

    def data(self, dtype: torch.dtype, samples: int | None = None, seed: int = 0) -> list[Batch]:
        """The samples of a data set, each a dictionary."""
        rng, count = np.random.default_rng((self.seed, seed)), samples or self.samples
        whole = self.model in WHOLE
        x = torch.from_numpy(rng.integers(9, size=count) if whole else rng.normal(size=(count, WIDTH)))
        y = torch.from_numpy(rng.normal(size=(count, WIDTH))).to(dtype)
        x = x if whole else x.to(dtype)
        return [{"x": x[n], "y": y[n]} for n in range(count)]
