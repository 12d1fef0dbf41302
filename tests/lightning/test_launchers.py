"""Who starts the processes makes no difference: the weights are those of one device, and are here when fit returns."""

import os
import subprocess
import sys

import pytest
import torch

from tests.helpers.choice import rare
from tests.helpers.processes import fork_for_spawn, in_a_new_process, launched
from tests.lightning import ranks, script

pytestmark = pytest.mark.filterwarnings("ignore")
PYTHON = [sys.executable, "-m"]
COMMANDS = {
    "torchrun": [*PYTHON, "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m"],
    "script": PYTHON,
    "fork": PYTHON,
}


def command(launcher, folder):
    words = [*COMMANDS[launcher], "tests.lightning.script", "auto" if launcher == "torchrun" else launcher, str(folder)]
    done = subprocess.run(
        words, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]


def started(launcher, folder):
    """As the command does it, from processes that have imported Lightning."""
    if launcher == "fork":
        in_a_new_process(script.main, launcher, str(folder))
        return
    launched(script.main, "auto", str(folder))


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


@pytest.mark.parametrize(
    ("start", "launcher"),
    [
        (started, "torchrun"),
        (started, "fork"),
        *(rare(command, launcher, id=f"command-{launcher}") for launcher in COMMANDS),
    ],
)
def test_started_from_outside(start, launcher, wanted, tmp_path, monkeypatch):
    fork_for_spawn(monkeypatch)
    start(launcher, tmp_path)
    found = torch.load(tmp_path / "found.pt", weights_only=False)
    equal({**found, "losses": None}, wanted)
