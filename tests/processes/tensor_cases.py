"""What a rank does in the laws of tensor-parallel stages: the same training, alone or with its shards."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import pipeback
from pipeback import checkpoint
from pipeback.recipes.models.transformer import transformer
from pipeback.tensor_parallel import ByColumns, Experts
from tests.laws.cases import CASES, OPTIMIZERS, data, suited
from tests.processes.tensor_families import images, mixtral

MICRO_BATCHES = 20
OWN = {
    "*.attention.qkv": ByColumns(parts=3),
    "*.attention.out": "rowwise",
    "*.feedforward.up": "colwise",
    "*.feedforward.down": "rowwise",
}
PERCEPTRON = {"*.up": "colwise", "*.down": "rowwise"}


def perceptron(stages: int = 5, inner: int = 8, norm: bool = True) -> nn.Sequential:
    """A hidden layer and a norm a stage, in float64."""
    torch.manual_seed(3)

    def block() -> nn.Sequential:
        parts = {"up": nn.Linear(6, inner), "tanh": nn.Tanh(), "down": nn.Linear(inner, 6)}
        return nn.Sequential(OrderedDict(parts | ({"norm": nn.LayerNorm(6)} if norm else {})))

    return nn.Sequential(*[block() for _ in range(stages)]).double()


def square(inner: int = 6) -> nn.Sequential:
    """A perceptron whose gradients have no null space, with many samples: any basis of one is as good as another."""
    return perceptron(inner=inner, norm=False)


def calm(parameters: Any) -> torch.optim.Optimizer:
    """Small steps, and no entry is divided by next to nothing: the basis of a gradient amplifies rounding."""
    return torch.optim.AdamW(parameters, lr=1e-4, betas=(0.8, 0.95), eps=1e-2)


def muon(parameters: Any) -> torch.optim.Optimizer:
    return pipeback.optim.MuonAdamW(parameters, lr=0.01)


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=0.01)


def rotated(parameters: Any) -> torch.optim.Optimizer:
    """Small steps, as `calm`."""
    return pipeback.optim.RotatedAdamW(parameters, lr=1e-4, betas=(0.8, 0.95), eps=1e-2)


def language_model() -> nn.Sequential:
    torch.manual_seed(3)
    return transformer(vocabulary=11, context=5, width=16, depth=2, heads=4).double()


def tokens(count: int) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    draw = lambda: torch.randint(0, 11, (2, 5), generator=generator)  # noqa: E731
    return [(draw(), draw()) for _ in range(count)]


def loss(y: Any, target: torch.Tensor) -> torch.Tensor:
    logits = y if isinstance(y, torch.Tensor) else y.logits
    return nn.functional.cross_entropy(logits.flatten(0, -2), target.flatten())


def separate() -> nn.Sequential:
    """The perceptron with a stage per layer, so that what travels between stages is spread, too."""

    class Named(nn.Sequential):
        """So that a plan finds the layer by the name within it."""

    blocks = perceptron(2)
    return nn.Sequential(
        *[Named(OrderedDict({name: layer})) for block in blocks for name, layer in block.named_children()]
    )


def made(
    case: str, tensor: int, plan: Any = PERCEPTRON, model: Callable[[], nn.Sequential] = perceptron, **options: Any
) -> pipeback.Pipeline:
    """The perceptron under a method; tensor: ranks that compute a stage together, 1 in one process."""
    if tensor > 1:
        options["tensor_parallel"] = pipeback.TensorParallel(tensor, plan)
    options.setdefault("optimizer", OPTIMIZERS[suited(case)])
    return pipeback.Pipeline(model(), loss=nn.functional.mse_loss, method=CASES[case](5), **options)


def found(pipe: pipeback.Pipeline, batches: list[Any]) -> dict[str, Any]:
    """Losses, weights in flight and drained, the ledger, the output of an evaluation."""
    losses = [pipe.push(x, y) for x, y in batches]
    pipe.wait()
    flying = {k: v.clone() for k, v in pipe.model.state_dict().items()}
    output = pipe.evaluate(batches[0][0])
    pipe.drain()
    result = {
        "losses": torch.stack([loss.detach().clone() for loss in losses]),
        "flying": flying,
        "end": {k: v.clone() for k, v in pipe.model.state_dict().items()},
        "output": {"output": output if isinstance(output, torch.Tensor) else output.logits},
        "ledger": [tuple(record) for record in pipe.ledger],
    }
    pipe.close()
    return result


def train(case: str, tensor: int = 1, samples: int = 3, **options: Any) -> dict[str, Any]:
    return found(made(case, tensor, **options), data(MICRO_BATCHES, samples=samples, dtype=torch.float64))


def made_of(
    build: Callable[[], nn.Module], tensor: int = 1, plan: Any = None, count: int = 12, **options: Any
) -> tuple[pipeback.Pipeline, list[Any]]:
    """A pipeline of a model, and what is pushed."""
    if tensor > 1:
        options["tensor_parallel"] = pipeback.TensorParallel(tensor, plan)
    model = build()
    batches = (images if hasattr(model, "vit") else tokens)(count)
    if not isinstance(model, nn.Sequential):
        options["example"] = batches[0][0]
        blocks = [path for path, module in model.named_modules() if type(module).__name__ == "MixtralSparseMoeBlock"]
        options["stages"] = pipeback.Splitting(leaves=blocks)
    options.setdefault("method", "pb")
    pipe = pipeback.Pipeline(model, loss=loss, optimizer=lambda p: torch.optim.AdamW(p, lr=0.01), **options)
    return pipe, batches


def train_model(*arguments: Any, **options: Any) -> dict[str, Any]:
    return found(*made_of(*arguments, **options))


def loaded(capacity: float) -> tuple[dict[str, Any], dict[str, tuple[list[int], int]]]:
    """Mixtral whose experts are spread and take so many tokens, and their load."""
    plan = {"*.mlp": Experts(capacity)}
    pipe, batches = made_of(mixtral, 2, plan)
    for x, y in batches:
        pipe.push(x, y)
    pipe.drain()
    load = {path: (each.tokens.tolist(), each.dropped) for path, each in pipe.expert_load().items()}
    return found(pipe, batches[:1]), load


def saved(
    case: str, tensor: int, folder: str, flying: str | None, model: Any = perceptron, samples: int = 3, **options: Any
) -> dict[str, Any]:
    """The state after some micro-batches, which is written to a folder, too. flying: how those in flight are kept."""
    pipe = made(case, tensor, activations=flying or "device", model=model, **options)
    for x, y in data(20, samples=samples, dtype=torch.float64)[:10]:
        pipe.push(x, y)
    if not flying:
        pipe.drain()
    state = pipe.state_dict()
    checkpoint.save(pipe, folder)
    pipe.close()
    return state


def resumed(
    case: str, tensor: int, source: Any, flying: str | None, model: Any = perceptron, samples: int = 3, **options: Any
) -> dict[str, Any]:
    pipe = made(case, tensor, activations=flying or "device", model=model, **options)
    if isinstance(source, dict):
        pipe.load_state_dict(source)
    else:
        checkpoint.load(pipe, source)
    return found(pipe, data(20, samples=samples, dtype=torch.float64)[10:])


def watched(tensor: int, **options: Any) -> list[list[float]]:
    """The gap, the norm of an update and the delay of each stage that this rank holds."""
    pipe = made("cerebras", tensor, **options)
    watch = pipe.watch()
    for n, (x, y) in enumerate(data(30, dtype=torch.float64)):
        if n == 15:
            pipe.wait()
            watch.follow()
            watch.mark()
        pipe.push(x, y)
    pipe.drain()
    pipe.close()
    return [list(some) for some in (watch.gap, watch.update, watch.delay)]


def on_disk(case: str, tensor: int, folder: str, count: int, within: int = 10) -> dict[str, Any]:
    """Train from a store on disk, and commit with micro-batches in flight; then go on from what was committed."""
    batches = data(count, dtype=torch.float64)
    pipe = made(case, tensor, store=f"disk:{folder}")
    for x, y in batches[:within]:
        pipe.push(x, y)
    pipe.commit()
    pipe.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it goes on
        return found(made(case, tensor, store=f"disk:{folder}"), batches[within:])


def far(mine: dict[str, Any], wanted: dict[str, Any], within: float = 1e-10) -> list[str]:
    """Names of what differs by more than rounding."""
    odd = [] if torch.allclose(mine["losses"], wanted["losses"], rtol=0, atol=within) else ["losses"]
    for key in ("flying", "end", "output"):
        assert mine[key].keys() == wanted[key].keys()
        for name, value in wanted[key].items():
            other = mine[key][name]
            if other.shape != value.shape or not torch.allclose(other, value, rtol=0, atol=within):
                odd.append(f"{key}: {name}")
    here = {record[0] for record in mine["ledger"]}
    records = sorted(record for record in wanted["ledger"] if record[0] in here)
    return odd if here and records == sorted(mine["ledger"]) else [*odd, "ledger"]


def replicated(tensor: int) -> dict[str, torch.Tensor]:
    """The weights after two replicas have trained, each on its half of every batch."""
    pipe = made("pb", tensor, replicas=2)
    for x, y in data(20, samples=4, dtype=torch.float64):
        pipe.push(x, y) if tensor == 1 else pipe.push(*(t.chunk(2)[pipe.ranks.replica] for t in (x, y)))
    pipe.drain()
    result = {k: v.clone() for k, v in pipe.model.state_dict().items()}
    pipe.close()
    return result
