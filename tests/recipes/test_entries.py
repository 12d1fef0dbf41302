"""Every entry of conf/optimizer and conf/method trains with the options of its file."""

from pathlib import Path

import pytest
import yaml

pytest.importorskip("hydra")
pytest.importorskip("lightning")
pytest.importorskip("sklearn")

from tests.helpers.choice import mostly_rare
from tests.recipes.cli import TINY, config, facts, numbers, pipeback

ROOT = Path(__file__).parents[2]
OPTIMIZERS = sorted(file.stem for file in (ROOT / "conf" / "optimizer").glob("*.yaml"))
METHODS = sorted(file.stem for file in (ROOT / "conf" / "method").glob("*.yaml") if file.stem != "installed")


@pytest.mark.parametrize("optimizer", mostly_rare(OPTIMIZERS, "nadam_async", "sgd"))
def test_every_optimizer_trains_and_goes_on(optimizer, tmp_path):
    """With the options of its file, under delay, and from a checkpoint with micro-batches in flight."""
    options = [*TINY, f"optimizer={optimizer}", "method=pipedream", "validate_every=2", "epochs=2"]
    assert pipeback("train", *options, "out=whole", cwd=tmp_path).returncode == 0
    assert pipeback("train", *options, "max_steps=2", "out=run", cwd=tmp_path).returncode == 0
    last = "run/checkpoints/last.ckpt"
    done = pipeback("train", *options, "out=run", f"ckpt_path={last}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = numbers(tmp_path / "run")
    assert found == numbers(tmp_path / "whole")
    losses = [row["train/loss"] for row in found if "train/loss" in row]
    assert losses[-1] < losses[0]
    kind = yaml.safe_load((ROOT / "conf" / "optimizer" / f"{optimizer}.yaml").read_text("utf-8"))["name"]
    assert config(tmp_path / "run").optimizer.name == kind


@pytest.mark.parametrize(
    "method",
    mostly_rare(
        METHODS, "braking", "dc_asgd_a", "ef", "eigendelay", "gap_aware", "lwp_w_sc", "msnag", "staleness_lr", "xpipe"
    ),
)
def test_every_entry_of_a_method_trains(method, tmp_path):
    adam = ["optimizer=adamw"] if method == "eigendelay" else []
    done = pipeback("train", *TINY, *adam, f"method={method}", "callbacks=none", "out=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [row for row in numbers(tmp_path / "run") if "val/accuracy" in row]
    file = yaml.safe_load((ROOT / "conf" / "method" / f"{method}.yaml").read_text("utf-8"))
    given = {key for key, value in file.items() if key not in ("name", "defaults", "_target_") and value is not None}
    assert method == "lwp_w_sc" or given <= facts(tmp_path / "run")["method_options"].keys()  # a chain names its parts
