"""Own models whose stages are cut from a trace of their first call."""

import sys

import pytest

pytest.importorskip("hydra")
pytest.importorskip("lightning")
pytest.importorskip("sklearn")

from tests.recipes.cli import facts, numbers, pipeback

OWN = """
import torch
from torch import nn
from pipeback.recipes.tasks import Classification

class Net(nn.Module):
    def __init__(self, inputs, classes, width):
        super().__init__()
        self.first, self.last = nn.Linear(inputs, width), nn.Linear(width, classes)
    def forward(self, x):
        return self.last(torch.relu(self.first(x)))

def sequence(inputs, classes, width):
    return nn.Sequential(nn.Linear(inputs, width), nn.Sequential(nn.ReLU(), nn.Linear(width, classes)))

class Headed(Classification):
    def __init__(self, model, optimizer):
        super().__init__(model, optimizer)
        self.head = nn.Linear(10, 10)
    def training_step(self, batch):
        assert self.trainer.max_epochs == 1
        loss = self.loss(self.head(self.model(batch[0])), batch[1])
        self.log("train/loss", loss)
        return loss
"""
OPTIONS = [
    "--config-dir", "my", "data.samples=64", "epochs=1", "trainer.log_every_n_steps=1", "callbacks=none",
    "trainer.strategy.vectorize=false",
]  # fmt: skip


@pytest.fixture
def mine(tmp_path):
    """A folder with configs and a module of the user's."""
    for name, target in (("model/net", "Net"), ("model/sequence", "sequence"), ("task/headed", "Headed")):
        (tmp_path / "my" / name).parent.mkdir(parents=True, exist_ok=True)
        width = "width: 8\n" if name.startswith("model") else ""
        (tmp_path / "my" / f"{name}.yaml").write_text(f"_target_: own_nets.{target}\n{width}")
    (tmp_path / "own_nets.py").write_text(OWN)
    before = list(sys.path)
    yield tmp_path
    sys.path[:] = before
    sys.modules.pop("own_nets", None)


def test_a_model_with_a_forward_of_its_own_trains_as_a_sequence_does(mine):
    """The batch that is looked at for its stages changes neither the order of the data nor random numbers."""
    for model in ("net", "sequence"):
        done = pipeback("train", *OPTIONS, f"model={model}", "method=pb", f"out={model}", cwd=mine)
        assert done.returncode == 0, done.stderr
        assert facts(mine / model)["delays"] == [2, 0] and facts(mine / model)["stages"] == 2
    assert numbers(mine / "net") == numbers(mine / "sequence") != []


def test_a_task_that_calls_several_modules_is_checked_and_told(mine):
    done = pipeback("train", *OPTIONS, "model=net", "task=headed", "method=pb", "out=run", cwd=mine)
    assert done.returncode == 0, done.stderr
    assert facts(mine / "run")["delays"] == [4, 2, 0]


def test_a_sweep_takes_it_and_checks_its_stages(mine):
    done = pipeback("sweep", *OPTIONS, "model=net", "methods=[pb]", "jobs=1", "out=here", cwd=mine)
    assert done.returncode == 0, done.stderr
    assert facts(mine / "here" / "pb-seed0")["stages"] == 2
    done = pipeback("compare", *OPTIONS, "model=net", "methods=[lwp]", "optimizer=adamw", cwd=mine)
    assert done.returncode == 2 and "momentum SGD" in done.stderr
