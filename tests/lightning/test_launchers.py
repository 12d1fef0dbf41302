"""Who starts the processes makes no difference: the weights are those of one device, and are here when fit returns."""

import os
import subprocess
import sys

import pytest
import torch

from tests.lightning import ranks, script

pytestmark = pytest.mark.filterwarnings("ignore")
PYTHON = [sys.executable, "-m"]
COMMANDS = {
    "torchrun": [*PYTHON, "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m"],
    "script": PYTHON,
    "fork": PYTHON,
}


def start(launcher, *words):
    command = [*COMMANDS[launcher], "tests.lightning.script", "auto" if launcher == "torchrun" else launcher]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, *map(str, words)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def equal(found, wanted):
    assert ranks.differences(found, wanted) == []
    for key in ("score", "logged", "validated"):
        assert found[key] == wanted[key], key
    assert all(torch.equal(a, b) for a, b in zip(found["predicted"], wanted["predicted"], strict=True))
    assert found["best"] == "2.ckpt"


def test_every_launcher(tmp_path):
    """All at once, for most of their time goes into imports; spawn in this process."""
    running = {name: start(name, tmp_path / name) for name in COMMANDS}
    wanted, _ = script.train(1, tmp_path / "one")
    spawned, _ = script.train(2, tmp_path / "spawn")
    wanted["losses"] = None
    equal({**spawned, "losses": None}, wanted)
    assert "MASTER_PORT" not in os.environ
    for name, process in running.items():
        out, _ = process.communicate(timeout=180)
        assert process.returncode == 0, f"{name}: {out[-3000:]}"
        found = torch.load(tmp_path / name / "found.pt", weights_only=False)
        equal({**found, "losses": None}, wanted)
