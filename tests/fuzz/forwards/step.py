"""A training_step that does the steps of a forward itself, so that the strategy has to follow its calls."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

import pipeback
from pipeback.lightning import PipelineStrategy

from ..check import TOLERANCE, close
from ..program import Seen
from .check import cured
from .forward import Forward, Model, sgd, without_nan


@dataclass(frozen=True, repr=False)
class Step(Forward):
    """A forward that a training_step does."""


class StepModule(pl.LightningModule):
    """Has the layers of the model itself."""

    def __init__(self, of: Forward) -> None:
        super().__init__()
        model = Model(of)
        for name, part in model.named_children():
            setattr(self, name, part)
        self.of, self.scale, self.losses = of, model.scale, list[Tensor]()
        self.register_buffer("fixed", model.fixed)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = mse_loss(Model.forward(self, x), y)  # type: ignore[arg-type]
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].detach().clone())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self.parameters())


def fitted(forward: Forward, dtype: torch.dtype, strategy: Any) -> Seen:
    """The losses, and the weights at the end."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module, data = StepModule(forward).to(dtype), forward.data(dtype)
    torch.manual_seed(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a loader without workers
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, max_epochs=1, strategy=strategy, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    weights = [(f"weight {name}", value.detach().clone()) for name, value in module.state_dict().items()]
    return without_nan([*((f"loss {n}", loss) for n, loss in enumerate(module.losses)), *weights])


def followed(forward: Forward, dtype: torch.dtype = torch.float32, **options: Any) -> Seen:
    """The same by the strategy, with these options."""
    options = {"method": forward.method, "stages": forward.stages, **options}
    return fitted(forward, dtype, PipelineStrategy(module="self", debug=pipeback.Debug(stop_at_nan=False), **options))


def check_step(forward: Forward) -> None:
    """Raise AssertionError, naming what was seen, where a followed step shows other numbers than it should."""
    forward = cured(replace(forward, resume=None), followed)
    if not forward.draws:
        plain = fitted(forward, torch.float32, "auto")
        close(followed(forward, method="sgd"), plain, 0.0, "the bits of plain Lightning")
    runtime = {name: value for name, value in forward.runtime.items() if name != "vectorize"}
    if runtime:
        try:
            found = followed(forward, **{**runtime, **({"workers": 2} if "workers" in runtime else {})})
        except ValueError as error:
            if "at most one worker per stage" not in str(error):
                raise
            return
        close(found, followed(forward), 0.0, "the bits of the event loop")
    elif forward.runtime and not forward.draws and not forward.rounds:
        for size in (None, 1):
            found, wanted = (
                followed(forward, torch.float64, micro_batch_size=size, vectorize=how) for how in ("auto", False)
            )
            close(found, wanted, TOLERANCE, "the event loop")
