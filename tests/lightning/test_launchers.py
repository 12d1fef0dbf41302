"""Who starts the processes makes no difference: the weights are those of one device, and are here when fit returns."""

import os
import subprocess
import sys

import pytest
import torch

from tests.helpers.choice import mostly_rare
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


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    found, _ = script.train(1, tmp_path_factory.mktemp("one"))
    return {**found, "losses": None}


def test_spawned_in_this_process(wanted, tmp_path):
    found, _ = script.train(2, tmp_path)
    equal({**found, "losses": None}, wanted)
    assert "MASTER_PORT" not in os.environ


@pytest.mark.parametrize("launcher", mostly_rare(COMMANDS, "torchrun", "fork"))
def test_started_by_a_command(launcher, wanted, tmp_path):
    process = start(launcher, tmp_path)
    out, _ = process.communicate(timeout=180)
    assert process.returncode == 0, out[-3000:]
    found = torch.load(tmp_path / "found.pt", weights_only=False)
    equal({**found, "losses": None}, wanted)
