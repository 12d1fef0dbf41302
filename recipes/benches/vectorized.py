"""Times stages that run as one over the plain PyTorch loop, in one process and one thread, and what torch.compile
adds. The plain loop steps momentum SGD, or AdamW, by foreach, or fused.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, scaled_dot_product_attention

import pipeback
from pipeback.recipes.benches.against import Rows
from pipeback.recipes.benches.turns import interleaved, spread
from pipeback.recipes.markdown import table


class Linear(nn.Sequential):
    """relu(norm(linear(x)))"""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU())


class Transformer(nn.Module):
    """Pre-norm, causal, four heads, a hidden layer four times as wide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)  # (B, heads, T, width / 4)
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Case(NamedTuple):
    """A number of stages of one width, and micro-batches of one shape."""

    name: str
    block: Callable[[int], nn.Module]
    stages: int
    shape: tuple[int, ...]  # the last is the width
    turn: int  # micro-batches


CASES = (
    Case("20 x 64", Linear, 20, (1, 64), 200),
    Case("48 x 64", Linear, 48, (1, 64), 100),
    Case("20 x 256", Linear, 20, (1, 256), 50),
    Case("20 x 256, micro-batch 8", Linear, 20, (8, 256), 50),
    Case("12 blocks, d 64, T 16", Transformer, 12, (1, 16, 64), 50),
    Case("12 blocks, d 128, T 32", Transformer, 12, (1, 32, 128), 25),
)
METHODS = ("pb", "cerebras", "pipedream")
FLUSH = 25  # micro-batches per flush


Factory = Callable[[Any], torch.optim.Optimizer]
sgd: Factory = partial(torch.optim.SGD, lr=1e-5, momentum=0.9, foreach=True)
fused: Factory = partial(torch.optim.SGD, lr=1e-5, momentum=0.9, fused=True)
adamw: Factory = partial(torch.optim.AdamW, lr=1e-5, foreach=True)


def main(repeats: int, cases: Iterable[Case] = CASES, compiled: bool = True) -> None:
    print("One process, one thread, update size one: samples per second over those of the plain loop.")
    for case in cases:
        runs, compiling = contenders(case, compiled)
        seconds = interleaved(runs, repeats)
        rows = []
        for name, some in seconds.items():
            base = seconds["plain loop, AdamW" if "AdamW" in name else "plain loop"]
            ratios = [a / b for a, b in zip(base, some, strict=True)]
            rows.append([name, f"{statistics.median(some) / case.turn * 1e3:.3f}", spread(ratios)])
        print("\n" + table([case.name, "ms/micro-batch", "of the plain loop"], rows), flush=True)
        if compiled:
            print(f"\nThe first push of `pb`, compiled: {compiling:.1f} s.", flush=True)


def contenders(case: Case, compiled: bool) -> tuple[dict[str, Callable[[], Any]], float]:
    """The contenders, and the seconds of the first push with a compiler."""
    x, y = data(case)
    runs: dict[str, Callable[[], Any]] = {
        "plain loop": partial(plain, *model_and_step(case), x, y, case.shape[0]),
        "plain loop, fused": partial(plain, *model_and_step(case, fused), x, y, case.shape[0]),
        "pb, event loop": partial(pushed, pipeline(case, "pb"), x, y),
    }
    for method in METHODS:
        runs[f"{method}, vectorized"] = partial(pushed, pipeline(case, method, vectorize=True), x, y)
    for name, vectorize in (("event loop", False), ("vectorized", True)):
        gpipe = pipeback.methods.create("gpipe", micro_batches=FLUSH)
        runs[f"gpipe, flushes of {FLUSH}, {name}"] = partial(pushed, pipeline(case, gpipe, vectorize=vectorize), x, y)
    runs["plain loop, AdamW"] = partial(plain, *model_and_step(case, adamw), x, y, case.shape[0])
    runs["pb, AdamW, vectorized"] = partial(pushed, pipeline(case, "pb", adamw, vectorize=True), x, y)
    pipe = pipeline(case, "pb", vectorize="auto")
    runs["pb, vectorize=auto"] = partial(pushed, pipe, x, y)
    if not compiled:
        return runs, 0.0
    begin = time.perf_counter()
    runs["pb, compiled"] = partial(pushed, pipeline(case, "pb", vectorize=True, compile=True), x, y)
    runs["pb, compiled"]()
    seconds = time.perf_counter() - begin
    runs["pb, AdamW, compiled"] = partial(pushed, pipeline(case, "pb", adamw, vectorize=True, compile=True), x, y)
    return runs, seconds


def data(case: Case) -> tuple[Tensor, Tensor]:
    """The micro-batches of a turn."""
    x, y = torch.randn(2, case.turn * case.shape[0], *case.shape[1:])
    return x, y


def model(case: Case) -> nn.Sequential:
    return blocks(case.block, case.stages, case.shape[-1])


def blocks(block: Callable[[int], nn.Module], count: int, width: int) -> nn.Sequential:
    """Return `count` blocks and a linear head."""
    torch.manual_seed(0)
    return nn.Sequential(*[block(width) for _ in range(count)], nn.Linear(width, width))


def model_and_step(case: Case, optimizer: Factory = sgd) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    found = model(case)
    return found, optimizer(found.parameters())


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, size: int) -> None:
    for some, target in zip(x.split(size), y.split(size), strict=True):
        mse_loss(model(some), target).backward()
        optimizer.step()
        optimizer.zero_grad()


def pipeline(case: Case, method: str | pipeback.Method, optimizer: Factory = sgd, **options: Any) -> pipeback.Pipeline:
    return pipeback.Pipeline(
        model(case), loss=mse_loss, optimizer=optimizer, method=method, micro_batch_size=case.shape[0], **options
    )


def pushed(pipe: pipeback.Pipeline, x: Tensor, y: Tensor) -> None:
    pipe.push(x, y)


def rows() -> Rows:
    """What `against=` compares: nothing that is compiled, and no choice that is measured."""
    chosen = {"pb, event loop": ("pb", sgd, False)}
    chosen |= {f"{method}, vectorized": (method, sgd, True) for method in METHODS}
    chosen["pb, AdamW, vectorized"] = ("pb", adamw, True)
    return {(case.name, name): partial(train, case, *how) for case in CASES for name, how in chosen.items()}


def train(case: Case, method: str, optimizer: Factory, vectorize: bool, turns: Iterable[None]) -> None:
    pipe = pipeline(case, method, optimizer, vectorize=vectorize)
    x, y = data(case)
    for _ in turns:
        pushed(pipe, x, y)
