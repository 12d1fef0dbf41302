"""What is said of plans, meshes and shards that do not fit, and the same with what the message says."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.distributed.tensor.placement_types import Shard

import pipeback
from pipeback.tensor_parallel import ByColumns, Experts, Local
from pipeback.tensor_parallel.group import TensorGroup
from pipeback.tensor_parallel.spread import spread
from tests.laws.cases import OPTIMIZERS, data
from tests.processes.crew import Crew
from tests.processes.tensor_cases import PERCEPTRON, made_of, perceptron
from tests.processes.tensor_cases import made as tensor_made
from tests.processes.tensor_families import mixtral


@pytest.fixture(scope="module")
def crew():
    with Crew(2) as crew:
        yield crew


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.size = 3, 8
        self.up = nn.Linear(6, 8)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight = model[0].weight
    return model


def heard() -> nn.Module:
    model = perceptron()
    model[0].up.weight.register_hook(torch.neg)
    return model


def noisy(noise: float) -> nn.Module:
    model = mixtral()
    for module in model.modules():
        if hasattr(module, "jitter_noise"):
            module.jitter_noise = noise
    return model


def absent() -> nn.Module:
    return perceptron().to("meta")


# the model and the plan that are wrong, what is said, and the same with the cure
PLANS: dict[str, tuple[Callable[[], nn.Module], Any, str, Callable[[], nn.Module], Any]] = {
    "no module": (
        perceptron, {"*.upp": "colwise"}, "plan names '*.upp', but the model has no such module", perceptron,
        PERCEPTRON,
    ),
    "no family": (
        perceptron, None, "is of no family that has a plan; give one, for example", perceptron,
        {"*.up": "colwise", "*.down": "rowwise"},
    ),
    "no dict": (perceptron, [], "plan must be a dict of styles by path of a module", mixtral, None),
    "style": (
        perceptron, {"*.up": "columnwise"}, "plan: the style of '*.up'", perceptron, PERCEPTRON,
    ),
    "layouts": (
        perceptron, {"*.up": ColwiseParallel(input_layouts=Shard(0))},
        "has a ColwiseParallel with layouts of its own, but only the default ones are known", perceptron,
        {"*.up": "colwise_gather_output"},
    ),
    "layouts left out": (
        perceptron, {"*.up": ColwiseParallel(input_layouts=Shard(0))}, "leave them out, or use", perceptron,
        {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()},
    ),
    "no layer": (perceptron, {"0": "colwise"},
                 "only nn.Linear and Conv1D of transformers are cut; give the layers in it",
                 perceptron, {"0.up": "colwise", "0.down": "rowwise"}),
    "uneven": (perceptron, {"*.up": ByColumns(parts=8)}, "which tensor_parallel=2 does not divide; use a divisor of it",
               perceptron, {"*.up": ByColumns(parts=4)}),
    "uneven heads": (Heads, {"up": "colwise", "": Local(())}, "plan names ''", Heads, {"up": "colwise"}),
    "no number": (
        lambda: nn.Sequential(Heads()), {"0": Local(("width",))}, "has no whole number 'width'; leave it out of Local",
        lambda: nn.Sequential(Heads()), {"0": Local(("size",))},
    ),
    "odd heads": (
        lambda: nn.Sequential(Heads()), {"0": Local(("heads",))},
        "has heads=3, which tensor_parallel=2 does not divide",
        lambda: nn.Sequential(Heads()), {"0": Local(("size",))},
    ),
    "tied": (tied, {"0": "colwise"}, "is also 1.weight, and would be cut for both; leave it out of the plan",
             lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), {"0": "colwise", "1": "rowwise"}),
    "hooks": (heard, PERCEPTRON, "0.up.weight has hooks, which would hear of a shard of its gradient only; remove them",
              perceptron, PERCEPTRON),
    "hooks of a layer left out": (heard, PERCEPTRON, "or leave '0.up' out of the plan",
                                  heard, {"1.up": "colwise", "1.down": "rowwise"}),
    "meta": (absent, PERCEPTRON, "shards are cut from values; build the model on the CPU", perceptron, PERCEPTRON),
    "no experts": (perceptron, {"0": "experts"},
                   '"experts" spreads a MixtralSparseMoeBlock of transformers; leave it out',
                   mixtral, None),
    "odd experts": (partial(mixtral, 3), None, "has 3 experts, which tensor_parallel=2 does not divide; use a divisor",
                    partial(mixtral, 2), None),
    "jitter": (partial(noisy, 0.1), None, "has router_jitter_noise, which each rank would draw otherwise; set it to 0",
               partial(noisy, 0.0), {"*.mlp": Experts()}),
}  # fmt: skip


def facts(model: nn.Module) -> list[Any]:
    """The class and the attributes of every module, but for its weights."""
    every = model.named_modules()
    return [(path, type(m), {k: v for k, v in vars(m).items() if k != "_parameters"}) for path, m in every]


@pytest.mark.parametrize("name", PLANS)
def test_plans(name):
    build, plan, told, cured, good = PLANS[name]
    model = build()
    before, weights = facts(model), {path: id(p) for path, p in model.named_parameters()}
    with pytest.raises((ValueError, TypeError), match=re.escape(told)):
        spread(model, plan, TensorGroup(1, 2))
    assert facts(model) == before
    assert {path: id(p) for path, p in model.named_parameters()} == weights
    model = cured()
    whole = copy.deepcopy(model)
    done = spread(model, good, TensorGroup(1, 2))
    done.undo()  # as after an error in what comes later
    assert [type(m) for m in model.modules()] == [type(m) for m in whole.modules()]
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), whole.parameters(), strict=True))


class Own(torch.optim.SGD):
    """Nobody knows what it looks at."""


def made(rank: int, some: dict[str, Any]) -> Any:
    """Build and push, as a rank does; what is raised."""
    some = dict(some)
    torch.manual_seed(0)
    model: Any = perceptron()
    optimizer = some.pop("optimizer", "momentum")
    options: dict[str, Any] = {"method": "pb", "optimizer": {"of one's own": Own, **OPTIMIZERS}.get(optimizer)}
    options["optimizer"] = options["optimizer"] or torch.optim.Adafactor
    options["tensor_parallel"] = pipeback.TensorParallel(some.pop("size", 2), some.pop("plan", PERCEPTRON))
    mesh = some.pop("mesh", None)
    if mesh is not None:
        mesh = init_device_mesh("cpu", mesh, mesh_dim_names=some.pop("names", None))
    try:
        pipe = pipeback.Pipeline(
            model, loss=nn.functional.mse_loss, workers=pipeback.Processes(mesh=mesh, timeout=20.0), **options | some
        )
        for x, y in data(4, dtype=torch.float64):
            pipe.push(x, y)
        pipe.drain()
        pipe.close()
    except (ValueError, TypeError) as error:
        return str(error)
    return None


RANKS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "no module": ({"plan": {"*.upp": "colwise"}}, "plan names '*.upp'", {}),
    "size": ({"size": 3}, "tensor_parallel=3 does not divide the 2 ranks of a replica; start a multiple of it", {}),
    "mesh": (
        {"mesh": (2, 1)}, "mesh has 1 ranks in its last dimension, but tensor_parallel=2; give both the same",
        {"mesh": (1, 2)},
    ),
    "dimensions": (
        {"mesh": (2,)}, "with tensor_parallel=2 its last dimension is that one; use (replicas, workers, tensor)",
        {"mesh": (1, 1, 2)},
    ),
    "names": (
        {"mesh": (1, 2), "names": ("tp", "pp")}, "mesh has the names ('tp', 'pp'), but with tensor_parallel=2",
        {"mesh": (1, 2), "names": ("pp", "tp")},
    ),
    "optimizer": (
        {"optimizer": "of one's own"},
        "may look at whole matrices, but every rank has a shard of them; use one of torch.optim's",
        {"optimizer": "adafactor"},
    ),
    "vectorize": ({"vectorize": True}, "vectorize=True", {"vectorize": False}),
    "compile": ({"compile": True}, "compile=True", {"compile": False}),
    "sparsity": ({"store": pipeback.Streaming(sparsity="set")}, "sparsity", {"store": "host"}),
    "take_back": (
        {"debug": pipeback.Debug(take_back=3)},
        "take_back=3 does not go with tensor_parallel=2; use tensor_parallel=1, or leave take_back out",
        {"debug": pipeback.Debug(take_back=None)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RANKS)
def test_ranks(crew, name):
    bad, told, good = RANKS[name]
    crew = crew.ranks(2)
    for found in crew.run(made, bad, each=range(2)):
        assert told in found
    assert crew.run(made, good, each=range(2)) == [None, None]


def split_before(rank: int, some: bool) -> Any:
    x, model = torch.zeros(3, 6, dtype=torch.float64), perceptron()
    from pipeback.splitting.split import split_model

    given: Any = split_model(model) if some else model
    try:
        pipe = pipeback.Pipeline(
            given, loss=nn.functional.mse_loss, optimizer=OPTIMIZERS["momentum"], method="pb",
            tensor_parallel=pipeback.TensorParallel(2, PERCEPTRON), workers=pipeback.Processes(timeout=20.0),
        )  # fmt: skip
        pipe.push(x, x)
        pipe.close()
    except TypeError as error:
        return str(error)
    return None


def test_a_split(crew):
    crew = crew.ranks(2)
    for found in crew.run(split_before, True, each=range(2)):
        assert "but model is a Split already; give the model itself with stages= and example=" in found
    assert crew.run(split_before, False, each=range(2)) == [None, None]


def routed(rank: int, how: str) -> str:
    """Take a state while tokens are on the way to experts."""
    pipe, batches = made_of(mixtral, 2, activations="recompute" if how == "recompute" else "device")
    for x, y in batches[:4]:
        pipe.push(x, y)
    if how == "drain":
        pipe.drain()
    try:
        pipe.state_dict()
    except ValueError as error:
        return str(error)
    pipe.close()
    return ""


def test_tokens_in_flight(crew):
    says = 'call pipe.drain() before the state is taken, or build the pipeline with activations="recompute"'
    for found in crew.ranks(2).run(routed, "broken", each=range(2)):
        assert "hold tokens that have travelled to experts on other ranks" in found and says in found
    crew.again()
    for how in ("drain", "recompute"):
        assert crew.ranks(2).run(routed, how, each=range(2)) == ["", ""]
        crew.again()


def flown(drain: bool) -> Any:
    pipe = tensor_made("pb", 2)
    for x, y in data(6, dtype=torch.float64):
        pipe.push(x, y)
    if drain:
        pipe.drain()
    state = pipe.state_dict()
    pipe.close()
    return state


def taken_up(state: Any) -> None:
    pipe = tensor_made("pb", 2)
    pipe.load_state_dict(state)
    pipe.drain()
    pipe.close()


def test_other_shards(crew):
    states = crew.ranks(2).run(flown, False)
    with pytest.raises(ValueError, match=r"build the pipeline with tensor_parallel=2, or call pipe.drain\(\) there"):
        tensor_made("pb", 1).load_state_dict(states[0])
    tensor_made("pb", 1).load_state_dict(crew.run(flown, True)[0])
    assert crew.run(taken_up, states[0]) == [None, None]


def stored(folder: str, tensor: int) -> str:
    """Train from a store on disk, commit, and close."""
    try:
        pipe = tensor_made("pb", tensor, store=f"disk:{folder}", workers=pipeback.Processes(timeout=20.0))
    except pipeback.StoreError as error:
        return str(error)
    for x, y in data(6, dtype=torch.float64):
        pipe.push(x, y)
    pipe.commit()
    pipe.close()
    return ""


def test_other_shards_in_a_store(crew, tmp_path):
    crew, folder = crew.ranks(2), str(tmp_path)
    assert crew.run(stored, folder, 2) == ["", ""]
    found = crew.run(stored, folder, 1)
    crew.again()
    says = "build the pipeline with tensor_parallel=2, or load a checkpoint"
    assert all("this store has one of 2 shards of its weights, but 1 rank would go on here" in text for text in found)
    assert all(says in text for text in found)
    assert crew.ranks(2).run(stored, folder, 2) == ["", ""]


def other_data(rank: int, some: bool) -> Any:
    """Ranks that compute together push other data, as loaders that shuffle by themselves would."""
    pipe = pipeback.Pipeline(
        perceptron(), loss=nn.functional.mse_loss, optimizer=OPTIMIZERS["momentum"], method="pb",
        tensor_parallel=pipeback.TensorParallel(2, PERCEPTRON), workers=pipeback.Processes(timeout=20.0),
    )  # fmt: skip
    try:
        for x, y in data(6, dtype=torch.float64, seed=rank if some else 1):
            pipe.push(x, y)
        pipe.drain()
        pipe.close()
    except RuntimeError as error:
        return str(error)
    return None


def test_other_data(crew):
    crew = crew.ranks(2)
    for found in crew.run(other_data, True, each=range(2)):
        assert "every rank must push the same data, in the same order" in found
    crew.again()
    assert crew.ranks(2).run(other_data, False, each=range(2)) == [None, None]


def test_one_process():
    options: dict[str, Any] = {"loss": nn.functional.mse_loss, "optimizer": OPTIMIZERS["momentum"], "method": "pb"}
    with pytest.raises(ValueError, match=r"tensor_parallel=2 needs as many ranks, .*; start it by torchrun"):
        pipeback.Pipeline(perceptron(), tensor_parallel=2, **options)
    with pytest.raises(ValueError, match="plan has no meaning with tensor_parallel=1; give the number of ranks"):
        pipeback.Pipeline(perceptron(), tensor_parallel=pipeback.TensorParallel(plan=PERCEPTRON), **options)
    pipeback.Pipeline(perceptron(), **options)  # left out
