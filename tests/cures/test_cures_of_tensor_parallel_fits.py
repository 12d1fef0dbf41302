"""What is said under Lightning of plans and devices that do not fit, and the same with what the message says."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import pipeback
from tests.lightning import ranks
from tests.lightning.cases import Regression
from tests.lightning.test_tensor_parallel import LanguageModel, loader, tokens
from tests.processes.crew import Crew
from tests.processes.tensor_cases import PERCEPTRON, perceptron
from tests.processes.tensor_families import mixtral

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def crew():
    with Crew(2) as crew:
        yield crew


def regression() -> Any:
    return Regression(perceptron())


def fits(rank: int, tensor: Any, module: Any = regression, data: Any = loader, devices: int = 2, **given: Any) -> str:
    """Fit as a rank does; what is raised before anything is trained."""
    made: list[Any] = []

    def build() -> Any:
        made.append(module())
        return made[0]

    try:
        ranks.fit("pb", devices, build, data, given={"tensor_parallel": tensor, **given}, max_epochs=1)
    except (ValueError, TypeError) as error:
        assert made[0].trainer.global_step == 0
        return str(error)
    return ""


def language(experts: int) -> Any:
    return LanguageModel(partial(mixtral, experts))


class Itself(Regression):
    """Parallelizes itself in configure_model, in the way that the row asks for."""

    def __init__(self, how: str) -> None:
        super().__init__(nn.Identity())
        self.how = how

    def configure_model(self) -> None:
        if not isinstance(self.model, nn.Identity):
            return
        self.model, how = perceptron(), self.how
        mesh = self.device_mesh["tensor_parallel"]
        plan: dict[str, Any] = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
        if how == "tensor":
            weight = self.model[0].up.weight
            self.model[0].up.weight = nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)]))
        elif how == "outside":
            self.error = nn.Linear(6, 6).requires_grad_(False)
            parallelize_module(self, mesh, {"error": ColwiseParallel()})
        elif how == "sequence":
            plan["*.norm"] = SequenceParallel()
        if how not in ("none", "tensor"):
            parallelize_module(self.model, mesh, plan)


LEAVES = pipeback.Splitting(leaves=["model.layers.0.mlp", "model.layers.1.mlp"])
PLAN = pipeback.TensorParallel(2, PERCEPTRON)
ROWS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "no module": (
        {"tensor": pipeback.TensorParallel(2, {"*.upp": "colwise"})},
        "plan names '*.upp', but the model has no such module", {"tensor": PLAN},
    ),
    "no family": ({"tensor": 2}, "is of no family that has a plan; give one, for example", {"tensor": PLAN}),
    "devices": (
        {"tensor": pipeback.TensorParallel(4, PERCEPTRON)},
        "tensor_parallel=4 has 4 devices compute each stage together, but the Trainer has 2 devices; use "
        "Trainer(devices=4) or a multiple of it, or leave tensor_parallel out", {"tensor": 1},
    ),
    "experts": (
        {"tensor": 2, "module": partial(language, 3), "data": tokens, "stages": LEAVES},
        "has 3 experts, which tensor_parallel=2 does not divide; use a divisor of it",
        {"tensor": 2, "module": partial(language, 2), "data": tokens, "stages": LEAVES},
    ),
    "a DTensor": (
        {"tensor": PLAN, "module": partial(Itself, "tensor")},
        "configure_model makes a DTensor of model.0.up.weight, but shards are cut from whole weights; leave that out, "
        "or give the plan to the strategy: tensor_parallel=pipeback.TensorParallel(2, plan=",
        {"tensor": PLAN, "module": partial(Itself, "none")},
    ),
    "two plans": (
        {"tensor": PLAN, "module": partial(Itself, "both")},
        "both configure_model and tensor_parallel have a plan; use tensor_parallel=2 alone, or",
        {"tensor": 2, "module": partial(Itself, "one")},
    ),
    "two plans, the other way": (
        {"tensor": PLAN, "module": partial(Itself, "both")}, "or leave parallelize_module out of configure_model",
        {"tensor": PLAN, "module": partial(Itself, "none")},
    ),
    "outside": (
        {"tensor": 2, "module": partial(Itself, "outside")},
        "configure_model parallelizes a Linear outside self.model, which is trained; leave it out",
        {"tensor": 2, "module": partial(Itself, "one")},
    ),
    "a style that is not known": (
        {"tensor": 2, "module": partial(Itself, "sequence")},
        "configure_model: plan: the style of '0.norm'",
        {"tensor": PLAN, "module": partial(Itself, "none")},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_ranks(crew, name):
    bad, says, good = ROWS[name]
    crew = crew.ranks(2)
    for found in crew.run(fits, **bad, each=range(2)):
        assert re.search(re.escape(says), found), found
    assert crew.ranks(2).run(fits, **good, each=range(2)) == ["", ""]


def test_one_device():
    assert "use Trainer(devices=2) or a multiple of it" in fits(0, PLAN, devices=1)
    assert fits(0, 1, devices=1) == ""
