"""Who starts devices that compute stages together makes no difference."""

import pytest
import torch

from tests.helpers.choice import rare
from tests.helpers.processes import in_a_new_process, launched
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
    launched(tensor_script.main, "auto", str(folder))


@pytest.mark.parametrize("start", [rare(spawn), fork, rare(torchrun)])
def test_launchers(start, wanted, tmp_path):
    start(tmp_path)
    close(torch.load(tmp_path / "found.pt", weights_only=False), wanted)
