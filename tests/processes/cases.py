"""What a rank does in the laws: train a case, and give back all that came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import pipeback
from pipeback.errors import RankError
from pipeback.vectorized.stacks import whole_cost
from tests.laws.cases import CASES, LATE, OPTIMIZERS, STAGES, allowed, data, network, pipeline


def drawing(width: int = 6) -> nn.Sequential:
    """Dropout in every stage, batch statistics in two."""
    torch.manual_seed(3)
    return nn.Sequential(
        *[
            nn.Sequential(
                nn.Linear(width, width), nn.BatchNorm1d(width) if s % 2 else nn.LayerNorm(width), nn.Dropout(0.3)
            )
            for s in range(STAGES)
        ]
    )


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype)


def half() -> nn.Sequential:
    """Weights in bfloat16; what enters and what comes out is float32, of which every torch has the loss."""
    model = network(dtype=torch.bfloat16)
    first, *rest, last = model
    return nn.Sequential(nn.Sequential(Cast(), first), *rest, nn.Sequential(last, Cast(torch.float32)))


MODELS = {"plain": network, "drawing": drawing, "half": half}


def flat(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor of a state by name; not the raw bytes that a graph keeps, which have gaps that nobody writes."""
    return {
        f"{s}/{name}": tensor
        for s, tensors in enumerate(state["stages"])
        for name, tensor in tensors.items()
        if not (name.startswith("flight/") and tensor.dtype == torch.uint8)
    }


def settled(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """`flat` without what graphs keep: of batch statistics they keep the live ones, which a restored graph has not."""
    return {name: tensor for name, tensor in flat(state).items() if "/saved/" not in name}


def train(
    model: str, case: str, pushes: int = 11, more: int = 3, samples: int = 8, replica: int | None = None, **options: Any
) -> dict[str, Any]:
    """Losses, the state in flight, and the state after a drain and some more.

    replica: of several, which push their halves (thirds, …) of the batches; None: all is pushed here.
    """
    torch.manual_seed(7)
    pipe = pipeline(MODELS[model](), (CASES | LATE)[case](STAGES), **options)
    batches = data(pushes, samples=samples)
    x0 = batches[0][0]
    if replica is not None:
        batches = [(x.chunk(pipe.replicas)[replica], y.chunk(pipe.replicas)[replica]) for x, y in batches]
    losses = [pipe.push(x, y) for x, y in batches]
    flying = flat(pipe.state_dict())
    output = pipe.evaluate(x0)
    pipe.drain()
    losses += [pipe.push(x, y) for x, y in batches[:more]]
    result = {
        "losses": torch.stack([loss.clone() for loss in losses]),
        "flying": flying,
        "end": flat(pipe.state_dict()),
        "output": output,
        "model": {k: v.clone() for k, v in pipe.model.state_dict().items()},
    }
    pipe.close()
    return result


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Names of what is not equal bit for bit."""
    odd = []
    for key, value in wanted.items():
        if isinstance(value, dict):
            odd += [f"{key}: {n}" for n in sorted(set(value) ^ set(found[key]))]
            odd += [f"{key}: {n}" for n in value if n in found[key] and not torch.equal(found[key][n], value[n])]
        elif not torch.equal(found[key], value):
            odd.append(key)
    return odd


def sets_modes() -> dict[str, torch.Tensor]:
    """Modules are set to train and to evaluate between pushes; losses, and all that is held afterwards."""
    model = drawing()
    pipe = pipeline(model, "pb")
    some, losses = data(12), []

    def push(first: int, last: int) -> None:
        losses.extend(pipe.push(x, y) for x, y in some[first:last])

    push(0, 4)
    model.eval()
    push(4, 6)
    model[2].train()
    model[3][2].train()
    push(6, 8)
    model.train()
    push(8, 12)
    state = settled(pipe.state_dict())
    found = {**state, "losses": torch.stack([loss.detach().clone() for loss in losses])}
    pipe.close()
    return found


def as_one(case: str, optimizer: str = "momentum", **options: Any) -> dict[str, Any]:
    """Losses, weights in flight and drained, the state in flight taken up again in between, and what was told."""
    from tests.laws import as_one

    pipe = as_one.pipeline(as_one.model(), CASES[case](as_one.S), optimizer, micro_batch_size=3, **options)
    found: dict[str, Any] = {}
    losses = []
    xs, ys = map(torch.cat, zip(*as_one.doubles(50), strict=True))
    for n, (x, y) in enumerate(zip(xs.split([27, 3, 69, 6, 45]), ys.split([27, 3, 69, 6, 45]), strict=True)):
        losses.append(pipe.push(x, y))
        if n == 2:
            pipe.load_state_dict(pipe.state_dict())
        if n == 3:
            losses[-1] = losses[-1].double() + 0
            found["flying"] = {k: v.clone() for k, v in pipe.model.state_dict().items()}
    pipe.drain()
    found["losses"] = torch.stack([loss.double().clone() for loss in losses])
    found["model"] = {k: v.clone() for k, v in pipe.model.state_dict().items()}
    found["vectorized"] = dict(pipe.vectorized)
    found["stacks"] = [stack.numbers for stack in pipe._engine.setting.stacks]
    pipe.close()
    return found


def timed_otherwise(case: str, gains: Sequence[float], **options: Any) -> dict[str, Any]:
    """As `as_one`, on ranks that have measured so many times the speed as one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_cost, "gain", lambda stack, under, whole: gains[dist.get_rank()])
        return as_one(case, vectorize="auto", **options)


def judged(case: str, sizes: tuple[int, ...] = (30, 3, 1, 9, 2), **options: Any) -> dict[str, Any]:
    """As `as_one`, with the loss computed outside: micro-batches of 3 samples go forward together."""
    from tests.laws import as_one

    made = OPTIMIZERS["momentum" if allowed(case, "momentum") else "sgd"]
    method = CASES[case](as_one.S)
    pipe = pipeback.Pipeline(as_one.model(), loss=None, optimizer=made, method=method, **options)
    found: dict[str, Any] = {}
    losses: list[float] = []
    some = iter(as_one.doubles(sum(sizes)))
    for n, size in enumerate(sizes):
        xs, ys = zip(*islice(some, size), strict=True)
        output = pipe.forward_many(xs, expected=size, judge=partial(_judge, ys, losses))[0]
        pipe.backward(None if output is None else _judge(ys, losses, size - 1, output))
        pipe.step()
        if n == 2:
            pipe.load_state_dict(pipe.state_dict())
        if n == 3:
            found["flying"] = {k: v.clone() for k, v in pipe.model.state_dict().items()}
    pipe.drain()
    found["losses"] = torch.tensor(losses, dtype=torch.float64)
    found["model"] = {k: v.clone() for k, v in pipe.model.state_dict().items()}
    found["vectorized"] = dict(pipe.vectorized)
    pipe.close()
    return found


def shared_out(owner: list[int], function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Call a function while these workers have the stages, whatever each of them takes."""
    with pytest.MonkeyPatch.context() as patch:
        for place in ("distributed.held_stages", "pipeline.stacking"):
            patch.setattr(f"pipeback.{place}.balance", lambda seconds, workers: owner)
        return function(*given, **named)


def none_alike() -> str:
    """The error where no rank has two stages that are alike, though the model has."""
    from tests.laws import as_one

    sgd, some = OPTIMIZERS["momentum"], as_one.doubles(4)
    pipe = pipeback.Pipeline(as_one.unlike(), loss=None, optimizer=sgd, method="gpipe", vectorize=True)
    with pytest.raises(ValueError, match="no stages can run as one") as caught:
        pipe.forward_many([x for x, _ in some], expected=4)
    pipe.close()
    return str(caught.value)


def judge_fails() -> str:
    """The error of every rank where the loss that is computed outside raises one."""
    from tests.laws import as_one

    def fails(n: int, output: torch.Tensor) -> Any:
        raise KeyError("no such label")

    xs = [x for x, _ in as_one.doubles(9)]
    pipe = pipeback.Pipeline(as_one.model(), loss=None, optimizer=OPTIMIZERS["momentum"], method="pb", vectorize=True)
    with pytest.raises((KeyError, RankError)) as caught:
        pipe.forward_many(xs, judge=fails)
        pipe.backward(None)
        pipe.step()
        pipe.wait()
    pipe.close()
    return f"{caught.type.__name__}: {caught.value}"


def _judge(ys: Sequence[torch.Tensor], losses: list[float], n: int, output: torch.Tensor) -> Any:
    loss = mse_loss(output, ys[n])
    losses.append(float(loss))
    return torch.autograd.grad(loss, output)[0]


def far(found: dict[str, Any], wanted: dict[str, Any], within: float = 1e-10) -> list[str]:
    """Names of what differs by more than rounding."""
    odd = [] if torch.allclose(found["losses"], wanted["losses"], rtol=within, atol=within) else ["losses"]
    for key in ("flying", "model"):
        for name, value in wanted[key].items():
            if not torch.allclose(found[key][name], value, rtol=within, atol=within):
                odd.append(f"{key}: {name}")
    return odd
