"""CPU milliseconds per update of a small network of many stages, as a sweep of methods trains it by the hundred.

The network is that of `experiment=delay_lm`: an embedding, 15 times an attention and a feedforward network as stages of
their own, and a head; width 48, an update of 8 windows of 32 characters, AdamW. Every push is one micro-batch, as in a
recipe, and no loss is read. With vectorize="auto", but for the rows that say event loop.

CPU ms/update   the CPU time of all threads of the process: other load on the machine changes it least
of plain        over the plain PyTorch loop, AdamW by foreach, an update after every batch
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import cycle
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import pipeback
from pipeback.recipes.benches.against import Rows
from pipeback.recipes.benches.turns import WARM, spread
from pipeback.recipes.data.shakespeare import Shakespeare
from pipeback.recipes.markdown import table
from pipeback.recipes.models.transformer import transformer

METHODS: dict[str, Mapping[str, Any]] = {
    "pb": {},
    "staleness_lr": {},
    "msnag": {},
    "eigendelay": {},
    "eigendelay refresh=40": {"refresh": 40},
    "eigendelay refresh_by_delay=1": {"refresh_by_delay": 1},
    "eigendelay refresh_by_delay=4": {"refresh_by_delay": 4},
    "eigendelay block=48": {"block": 48},
    "eigendelay block=12": {"block": 12},
}
Push = Callable[[], object]  # trains an update
Vectorize = Literal["auto"] | bool


class Case(NamedTuple):
    """A language model with sublayers as stages. turn: updates of a turn."""

    depth: int = 15
    width: int = 48
    context: int = 32
    batch: int = 8
    turn: int = 40

    @property
    def stages(self) -> int:
        return 2 * self.depth + 2


CASE = Case()


class Classes(nn.Module):
    """(B, T, classes) -> (B, classes, T), as torch's cross_entropy takes them."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


adamw = partial(torch.optim.AdamW, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0, foreach=True)


def main(repeats: int, case: Case = CASE) -> None:
    runs = contenders(case)
    milliseconds = measured(runs, repeats, case.turn)
    rows = [
        [name, spread(some, ".1f"), f"{statistics.median(some) / statistics.median(milliseconds['plain loop']):.2f}"]
        for name, some in milliseconds.items()
    ]
    words = f"{case.stages} stages, width {case.width}, batch {case.batch}, AdamW"
    print(table([words, "CPU ms/update", "of plain"], rows), flush=True)


def contenders(case: Case) -> dict[str, Push]:
    """The plain loop, `pb` in the event loop, and every method as one, each full and past what it does at first."""
    runs = {"plain loop": plain(case), "`pb`, event loop": pushed(case, "pb", vectorize=False)}
    return runs | {f"`{name}`": pushed(case, name) for name in METHODS}


def measured(runs: dict[str, Push], repeats: int, turn: int) -> dict[str, list[float]]:
    """Let all take turns of so many updates; return the CPU milliseconds per update, turn by turn."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for n in range(-WARM, repeats):
        for name, run in runs.items():
            gc.collect()
            begin = time.process_time()
            for _ in range(turn):
                run()
            if n >= 0:
                found[name].append((time.process_time() - begin) / turn * 1e3)
    return found


def windows(case: Case) -> tuple[int, Iterable[tuple[Tensor, Tensor]]]:
    """The number of characters of a text, and its batches, again and again."""
    data = Shakespeare(root=None, context=case.context, batch_size=case.batch)
    text, _ = data.load()
    whole = len(text) // case.batch * case.batch
    return len(data.characters), cycle(zip(text.x[:whole].split(case.batch), text.y[:whole].split(case.batch)))


def network(case: Case, characters: int) -> nn.Sequential:
    torch.manual_seed(0)
    found = transformer(vocabulary=characters, context=case.context, width=case.width, depth=case.depth, sublayers=True)
    return nn.Sequential(*found[:-1], nn.Sequential(*found[-1], Classes()))


def plain(case: Case) -> Push:
    characters, batches = windows(case)
    model = network(case, characters)
    optimizer = adamw(model.parameters())
    turns = iter(batches)

    def update() -> None:
        x, y = next(turns)
        cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


def pushed(case: Case, method: str, vectorize: Vectorize = "auto") -> Push:
    """A pipeline that is full; every call is a push of one micro-batch. method: one of METHODS."""
    characters, batches = windows(case)
    pipe = pipeback.Pipeline(
        network(case, characters), loss=cross_entropy, optimizer=adamw, micro_batch_size=case.batch,
        method=pipeback.methods.create(method.split()[0], **METHODS[method]), vectorize=vectorize,
    )  # fmt: skip
    turns = iter(batches)
    for _ in range(2 * case.stages + 10):  # the first bases of eigendelay come ten updates after the first backward
        pipe.push(*next(turns))
    return lambda: pipe.push(*next(turns))


def rows() -> Rows:
    """What `against=` compares."""
    words = f"{CASE.stages} stages, width {CASE.width}"
    chosen: dict[str, tuple[str, Vectorize]] = {f"`{name}`": (name, "auto") for name in METHODS}
    chosen["`pb`, event loop"] = "pb", False
    return {(words, name): partial(train, CASE, *how) for name, how in chosen.items()}


def train(case: Case, method: str, vectorize: Vectorize, turns: Iterable[None]) -> None:
    push = pushed(case, method, vectorize)
    for _ in turns:
        for _ in range(case.turn):
            push()
