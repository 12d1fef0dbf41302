"""A script whose devices compute stages together:   python -m tests.lightning.tensor_script LAUNCHER FOLDER"""

import sys
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.lightning import ranks
from tests.lightning.test_tensor_parallel import fit, loader


def train(devices, tensor, folder, launcher="auto"):
    """Fit, and what there is to see in the process that called it; then validation there."""
    best = ModelCheckpoint(folder, monitor="val/error", filename=f"{devices}")
    val = partial(loader, 2)
    run, module = fit(
        devices, tensor, given={"launcher": launcher}, val=val, callbacks=[best], enable_checkpointing=True
    )
    found = {**ranks.outcome(run, module), "score": float(best.best_model_score), "losses": None}
    validated = run.validate(module, val(), verbose=False)
    return {**found, "validated": validated, "best": Path(best.best_model_path).name}, run.is_global_zero


def main(launcher, folder):
    found, first = train(2, 2, folder, launcher)
    if first:
        torch.save(found, Path(folder) / "found.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
