"""A fit in the library, on one device or as a rank of several, and what it shows. `fitted` can be sent to a process."""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import pipeback
import pipeback.lightning
from tests.fuzz.program import Seen
from tests.helpers.long_forms import grouped

from .fit import Fit
from .module import Asks, Module, Watch

OWN = {"own": "self", "pair": "self", "many": "self"}  # kinds whose layers are the LightningModule's


def fitted(fit: Fit, folder: str, dtype: torch.dtype, how: str = "whole") -> Seen:
    """What a fit shows on this device.

    folder: one that all its devices share, and at first empty. how: "whole"; "saving", with a checkpoint after every
    update; "going on" from the checkpoint after update `resume`, in another Trainer; "plainly", without a pipeline.
    """
    place = _Place(fit, Path(folder), dtype, plainly=how == "plainly")
    with _quiet():
        if how != "going on":
            return place.run(fit.runtime, fit.seed, save=how == "saving")
        files = sorted(place.checkpoints.glob("*.ckpt"), key=lambda file: int(file.stem))
        return place.run(fit.goes_on_with, fit.seed + 1, file=files[min(fit.resume or 0, len(files) - 1)])


class _Place:
    """Where a fit runs."""

    def __init__(self, fit: Fit, folder: Path, dtype: torch.dtype, plainly: bool) -> None:
        self.fit, self.folder, self.dtype, self.plainly = fit, folder, dtype, plainly
        self.checkpoints = folder / "checkpoints"

    def run(self, options: dict[str, Any], seed: int, save: bool = False, file: Path | None = None) -> Seen:
        """A fit with these options of the strategy. save: see `fitted`. file: a checkpoint."""
        fit = self.fit
        pl.seed_everything(seed, verbose=False)
        module = Module(fit, self.dtype)
        if file is not None:
            for p in module.parameters():
                p.data.mul_(0.5)  # what the checkpoint has is to be taken from it
        devices = options.get("devices", 1)
        watch = Watch(fit, weights="store" not in options and devices == 1)
        trainer = self.trainer(options, devices, [watch, *self.callbacks(save)])
        validated = self.loader(5, 1) if fit.validate else None
        trainer.fit(module, self.loader(), validated, ckpt_path=file)
        if fit.twice:
            trainer.fit_loop.max_epochs += 1  # type: ignore[operator]
            trainer.fit(module, self.loader(), validated)
        watch.end(trainer, module)
        return watch.seen

    def trainer(self, options: dict[str, Any], devices: int, callbacks: list[Any]) -> pl.Trainer:
        fit = self.fit
        return pl.Trainer(
            accelerator="cpu", devices=devices, strategy="auto" if self.plainly else self.strategy(options),
            precision=fit.precision, max_epochs=fit.epochs, accumulate_grad_batches=fit.accumulate,
            gradient_clip_algorithm=fit.clip and fit.clip[0], gradient_clip_val=fit.clip and fit.clip[1],
            val_check_interval=fit.validate, check_val_every_n_epoch=None if fit.validate else 1,
            limit_val_batches=None if fit.validate else 0, num_sanity_val_steps=0, callbacks=callbacks,
            enable_checkpointing=any(isinstance(c, pl.callbacks.ModelCheckpoint) for c in callbacks), logger=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=self.folder,
        )  # type: ignore[arg-type]  # fmt: skip

    def strategy(self, options: dict[str, Any]) -> Any:
        given = {name: value for name, value in options.items() if name != "devices"}
        ahead, store = given.pop("ahead", 1), given.get("store")
        if store == "host":
            given["store"] = pipeback.HostStore(prefetch=ahead)
        elif store == "disk":
            given["store"] = pipeback.DiskStore(tempfile.mkdtemp(dir=self.folder), prefetch=ahead)
        if self.fit.reference:
            given["reference_batch"] = self.fit.reference
        return pipeback.lightning.PipelineStrategy(
            method=self.fit.library(),
            micro_batch_size=self.fit.size,
            drain=self.fit.drain,
            plan=False,
            **grouped(given),
        )

    def callbacks(self, save: bool) -> list[Any]:
        found: list[Any] = []
        if save:
            every = {"every_n_train_steps": 1, "save_top_k": -1}
            name = {"filename": "{step}", "auto_insert_metric_name": False}
            found.append(pl.callbacks.ModelCheckpoint(self.checkpoints, **every, **name))
        if "monitor" in self.fit.quirks and not self.plainly:
            found.append(pipeback.lightning.PipelineMonitor())
        if "ask" in self.fit.quirks and not self.plainly:
            found.append(Asks())
        if self.fit.ema:
            found.append(pl.callbacks.EMAWeightAveraging(decay=0.7))
        return found

    def loader(self, samples: int | None = None, seed: int = 0) -> Any:
        fit = self.fit
        shuffle = "shuffle" in fit.quirks and not seed
        return StatefulDataLoader(
            fit.data(self.dtype, samples, seed), batch_size=fit.batch, shuffle=shuffle, drop_last=fit.model == "batch"
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    loggers = [logging.getLogger(f"lightning.{name}") for name in ("pytorch", "fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with (
            warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):  # fmt: skip
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
