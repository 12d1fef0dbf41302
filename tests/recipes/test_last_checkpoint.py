"""The checkpoint of the end of a training, wherever its last validation was."""

import pytest
import torch

pytest.importorskip("hydra")
pytest.importorskip("lightning")
pytest.importorskip("sklearn")

from tests.recipes.cli import TINY, numbers, pipeback


def test_training_that_max_steps_ends_is_saved_and_goes_on(tmp_path):
    """Before its first validation; the run that goes on trains as one that was not ended."""
    options = [*TINY, "method=cerebras", "epochs=1", "validate_every=3"]
    done = pipeback("train", *options, "max_steps=2", "out=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == 2
    assert pipeback("train", *options, "out=run", f"ckpt_path={last}", cwd=tmp_path).returncode == 0
    assert pipeback("train", *options, "out=whole", cwd=tmp_path).returncode == 0
    found, wanted = ([row for row in numbers(tmp_path / out) if "val/loss" not in row] for out in ("run", "whole"))
    assert found == wanted and len(wanted) == 3
    assert numbers(tmp_path / "run")[-1] == numbers(tmp_path / "whole")[-1]
