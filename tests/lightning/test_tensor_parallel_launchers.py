"""Who starts devices that compute stages together makes no difference."""

import uuid

import pytest
import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.helpers.choice import rare
from tests.helpers.processes import fork_for_spawn, in_a_new_process
from tests.lightning import tensor_script
from tests.lightning.test_tensor_parallel import WITHIN, far

pytestmark = pytest.mark.filterwarnings("ignore")


def close(found, wanted):
    assert far(found, wanted) == []
    assert found["best"] == "2.ckpt" and abs(found["score"] - wanted["score"]) <= WITHIN
    (mine,), (theirs,) = found["validated"], wanted["validated"]
    assert all(abs(mine[name] - value) <= WITHIN * max(1, abs(value)) for name, value in theirs.items())


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    return tensor_script.train(1, 1, tmp_path_factory.mktemp("one"))[0]


def spawn(folder):
    torch.save(tensor_script.train(2, 2, folder)[0], folder / "found.pt")


def fork(folder):
    in_a_new_process(tensor_script.main, "fork", str(folder))


def torchrun(folder):
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, run_id=uuid.uuid4().hex, max_restarts=0, rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0", start_method="spawn",
    )  # fmt: skip
    elastic_launch(config, tensor_script.main)("auto", str(folder))


@pytest.mark.parametrize("start", [rare(spawn), fork, rare(torchrun)])
def test_launchers(start, wanted, tmp_path, monkeypatch):
    if start is torchrun:
        fork_for_spawn(monkeypatch)
    start(tmp_path)
    close(torch.load(tmp_path / "found.pt", weights_only=False), wanted)
