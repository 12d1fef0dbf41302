"""A training script that the launchers start:   python -m tests.lightning.script LAUNCHER FOLDER [fault]"""

import os
import signal
import sys
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import pipeback
from tests.lightning import ranks
from tests.lightning.cases import loader

DATA = partial(ranks.shuffled, samples=8)
VAL = partial(loader, 2, samples=4)


class Fault(pl.Callback):
    """On rank 1, in the middle of it: an error, a death."""

    def __init__(self, kind):
        self.kind = kind

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_rank == 1 and trainer.global_step == 7:
            if self.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError("broken on purpose")


def train(devices, folder, launcher="auto", fault=None):
    """Fit, and what there is to see in the process that called it; then validation there."""
    best = ModelCheckpoint(folder, monitor="val/error", filename=f"{devices}")
    callbacks = [best, *([Fault(fault)] if fault else [])]
    run, module = ranks.fit(
        "cerebras", devices, module=partial(ranks.Whole, scheduler=ranks.cycle), data=DATA, val=VAL,
        callbacks=callbacks, enable_checkpointing=True,
        given={"launcher": launcher, "workers": pipeback.Processes(timeout=60.0)},
    )  # fmt: skip
    found = {
        **ranks.outcome(run, module),
        "best": Path(best.best_model_path).name,
        "score": float(best.best_model_score),
    }
    found["logged"] = sorted(run.logged_metrics)
    found["validated"] = run.validate(module, VAL(), verbose=False)
    found["predicted"] = run.predict(module, VAL())
    return found, run.is_global_zero


def main(launcher, folder, fault=None):
    found, first = train(2, folder, launcher, fault)
    if first:
        torch.save(found, Path(folder) / "found.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
