"""What takes turns in the section `processes`: one model in every runtime, and in torch.distributed.pipelining."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import mse_loss

import pipeback
from pipeback import methods
from pipeback.recipes.benches.network import sgd

RANKS = 2
PEERS = {"gpipe": ScheduleGPipe, "one_f_one_b": Schedule1F1B}
FLUSHES = (4, 8)  # micro-batches between two steps


class Case(NamedTuple):
    """A transformer: layers of `width` on micro-batches of `samples` sequences; `turn` micro-batches a turn."""

    name: str
    width: int
    length: int
    samples: int
    turn: int
    layers: int = 8

    def model(self) -> nn.Sequential:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer
        return nn.Sequential(
            *[layer(self.width, 4, 4 * self.width, dropout=0.0, batch_first=True) for _ in range(self.layers)]
        )

    def data(self, micro_batches: int = 1) -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        x, y = torch.randn(2, micro_batches * self.samples, self.length, self.width)
        return x, y


class Contender(NamedTuple):
    """`run` is called on every rank and does `turn` micro-batches: of its own (copies), or all ranks together.

    It returns the seconds that they took; 0 where another rank knows better.
    """

    run: Callable[[], float]
    turn: int
    copies: bool = False
    pipe: pipeback.Pipeline | None = None

    def rate(self, seconds: list[float]) -> float:
        """Micro-batches a second, from the seconds of every rank."""
        return sum(self.turn / some for some in seconds) if self.copies else self.turn / max(seconds)


def alone(case: Case, rank: int) -> dict[str, Contender]:
    """Those that need no other process; built before there is a process group."""
    threads = pipelined(case, "pb", case.turn, workers=RANKS) if rank == 0 else Contender(lambda: 0.0, case.turn)
    return {
        "two copies of pb": pipelined(case, "pb", case.turn // RANKS)._replace(copies=True),
        "two plain loops": plain(case),
        "pb, threads": threads,
    }


def together(case: Case, rank: int) -> dict[str, Contender]:
    """Those that a rank is part of."""
    some = {f"pb, {link}": pipelined(case, "pb", case.turn, link=link) for link in ("gloo", "shared_memory")}
    for flush in FLUSHES:
        for name, schedule in PEERS.items():
            few = max(flush, case.turn // 3 // flush * flush)  # flushes are alike, so fewer will do
            some[f"{name} {flush}"] = pipelined(case, name, few, flush)
            some[f"{schedule.__name__} {flush}"] = peer(case, rank, schedule, flush, few)
    return some


def pipelined(case: Case, name: str, turn: int, flush: int = 0, **options: Any) -> Contender:
    """A Pipeline; with `flush`, micro-batches come by the flush."""
    method = methods.create(name, micro_batches=flush) if flush else methods.create(name)
    pipe = pipeback.Pipeline(
        case.model(), loss=mse_loss, optimizer=sgd, method=method, micro_batch_size=case.samples, **options
    )
    judges = pipe.ranks.index == pipe.ranks.count - 1
    at_once = flush or 1
    x, y = case.data(at_once)

    def run() -> float:
        """A flush begins and ends with an empty pipeline; else it is full, and time goes from a loss to a later one."""
        if not flush:
            loss = pipe.push(x, y)
            if judges:
                float(loss)
        begin = time.perf_counter()
        for _ in range(turn // at_once):
            loss = pipe.push(x, y)
        if not flush and judges:
            float(loss)
            seconds = time.perf_counter() - begin
        pipe.wait()
        if flush:
            seconds = time.perf_counter() - begin
        return seconds if flush or judges else 0.0

    return Contender(run, turn, pipe=pipe)


def plain(case: Case) -> Contender:
    """The loop that everybody writes, on every rank for itself."""
    model, turn = case.model(), case.turn // RANKS
    optimizer = sgd(model.parameters())
    x, y = case.data()

    def run() -> float:
        begin = time.perf_counter()
        for _ in range(turn):
            mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return time.perf_counter() - begin

    return Contender(run, turn, copies=True)


def peer(case: Case, rank: int, schedule: Any, flush: int, turn: int) -> Contender:
    """torch.distributed.pipelining: a rank has half of the layers, and a step ends each flush."""
    each = case.layers // RANKS
    part = case.model()[rank * each : (rank + 1) * each]
    stage = PipelineStage(part, rank, RANKS, torch.device("cpu"), group=dist.group.WORLD)
    steps = schedule(stage, n_microbatches=flush, loss_fn=mse_loss)
    optimizer = sgd(part.parameters())
    x, y = case.data(flush)

    def run() -> float:
        begin = time.perf_counter()
        for _ in range(turn // flush):
            if rank == 0:
                steps.step(x)
            else:
                steps.step(target=y, losses=[])
            optimizer.step()
            optimizer.zero_grad()
        return time.perf_counter() - begin

    return Contender(run, turn)
