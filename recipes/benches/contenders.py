"""The contenders that take turns: one model in plain loops, in every runtime, and in torch.distributed.pipelining."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn.functional import mse_loss

import pipeback
from pipeback import methods
from pipeback.private import version
from pipeback.recipes.benches.network import sgd

RANKS = 2
PEERS = {"gpipe": ScheduleGPipe, "one_f_one_b": Schedule1F1B}
FLUSHES = (4, 8)  # micro-batches between two steps
# those whose backward is split, or whose ranks hold two parts each: the parts of the two ranks
MORE_PEERS = {
    "interleaved": (ScheduleInterleaved1F1B, ((0, 2), (1, 3))),
    "zb_h1": (ScheduleInterleavedZeroBubble, ((0,), (1,))),
    "zb_v": (ScheduleZBVZeroBubble, ((0, 3), (1, 2))),
}
# the torch since which a peer runs here: in 2.11 it sends to its own rank, which gloo refuses; between, nobody tried
SINCE = {"zb_v": (2, 14)}


class Task(Protocol):
    """A model and its data, in micro-batches of `samples`; each contender trains `turn` of them in its turn."""

    @property
    def samples(self) -> int: ...
    @property
    def turn(self) -> int: ...
    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor]: ...
    @property
    def optimizer(self) -> Callable[[Any], torch.optim.SGD]: ...

    def model(self) -> nn.Sequential: ...
    def data(self, micro_batches: int = 1) -> tuple[Tensor, Tensor]: ...


class Case(NamedTuple):
    """A transformer: layers of `width` on micro-batches of `samples` sequences; `turn` micro-batches per turn.

    fused: whether optimizers step in one pass through memory, instead of by foreach.
    """

    name: str
    width: int
    length: int
    samples: int
    turn: int
    layers: int = 8
    fused: bool = False

    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        return mse_loss

    @property
    def optimizer(self) -> Callable[[Any], torch.optim.SGD]:
        return partial(sgd, fused=self.fused)

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
    """`run` is called on every rank and trains `turn` micro-batches, on each rank (copies) or on all ranks together.

    It returns the seconds that they took, and 0 on ranks that do not measure.
    """

    run: Callable[[], float]
    turn: int
    copies: bool = False
    pipe: pipeback.Pipeline | None = None

    def rate(self, seconds: list[float]) -> float:
        """Micro-batches per second, from the seconds of every rank."""
        return sum(self.turn / some for some in seconds) if self.copies else self.turn / max(seconds)


def alone(case: Case, rank: int) -> dict[str, Contender]:
    """The contenders that need no other process; they are built before there is a process group."""
    threads = pipelined(case, "pb", case.turn, workers=RANKS) if rank == 0 else Contender(lambda: 0.0, case.turn)
    return {
        "two copies of pb": pushed(case._replace(turn=case.turn // RANKS), "pb")._replace(copies=True),
        "two plain loops": plain(case, case.turn // RANKS)._replace(copies=True),
        "pb, threads": threads,
    }


def together(case: Case, rank: int) -> dict[str, Contender]:
    """The contenders that run on several ranks."""
    some = {
        f"pb, {link}": pipelined(case, "pb", case.turn, workers=pipeback.Processes(link=link))
        for link in ("gloo", "shared_memory")
    }
    for flush in FLUSHES:
        for name, schedule in PEERS.items():
            few = max(flush, case.turn // 3 // flush * flush)  # flushes are alike, so fewer will do
            some[f"{name} {flush}"] = pipelined(case, name, few, flush)
            some[f"{schedule.__name__} {flush}"] = peer(case, rank, schedule, flush, few, halves(case.layers))
    flush = FLUSHES[-1]
    few = max(flush, case.turn // 3 // flush * flush)
    for name, (looped, parts) in MORE_PEERS.items():
        if name in methods.available():
            some[f"{name} {flush}"] = pipelined(case, name, few, flush)
        count = sum(map(len, parts))
        owner = [layer * count // case.layers for layer in range(case.layers)]
        if version() >= SINCE.get(name, (2, 0)):
            some[f"{looped.__name__} {flush}"] = peer(case, rank, looped, flush, few, owner, parts)
    return some


def build(task: Task, method: str | pipeback.Method, flush: int = 0, **options: Any) -> pipeback.Pipeline:
    if isinstance(method, str):
        method = methods.create(method, micro_batches=flush) if flush else methods.create(method)
    return pipeback.Pipeline(
        task.model(), loss=task.loss, optimizer=task.optimizer, method=method, micro_batch_size=task.samples, **options
    )


def pushed(task: Task, method: str | pipeback.Method, **options: Any) -> Contender:
    """A Pipeline of this process alone, which gets the micro-batches of a turn in one push.

    It is full before the first turn. No loss is read, since stages that run as one would have to drain for it.
    """
    pipe = build(task, method, **options)
    filled(pipe, task)
    x, y = task.data(task.turn)

    def run() -> float:
        begin = time.perf_counter()
        pipe.push(x, y)
        return time.perf_counter() - begin

    return Contender(run, task.turn, pipe=pipe)


def filled(pipe: pipeback.Pipeline, task: Task) -> None:
    """Push until every stage has a micro-batch for its backward."""
    pipe.push(*task.data(max(pipe.delays) + 2))


def pipelined(task: Task, name: str, turn: int, flush: int = 0, fill: bool = False, **options: Any) -> Contender:
    """A Pipeline of workers or ranks; with `flush`, it gets one flush per push. fill: push before the first turn."""
    pipe = build(task, name, flush, **options)
    if fill:
        filled(pipe, task)
    judges = pipe.ranks.index == pipe.ranks.count - 1
    at_once = flush or turn
    x, y = task.data(at_once)

    def run() -> float:
        """With flushes, time runs between empty pipelines; else from the last loss of a turn to that of the next one,
        while the pipeline is kept full by a third.
        """
        if not flush:
            first, second, _ = (pipe.push(x, y) for _ in range(3))
            seconds = 0.0
            if judges:
                float(first)
                begin = time.perf_counter()
                float(second)
                seconds = time.perf_counter() - begin
            pipe.wait()
            return seconds
        begin = time.perf_counter()
        for _ in range(turn // at_once):
            pipe.push(x, y)
        pipe.wait()
        return time.perf_counter() - begin

    return Contender(run, turn, pipe=pipe)


def plain(task: Task, turn: int, fused: bool = False) -> Contender:
    """The training loop that everybody writes. fused: the optimizer is, whatever that of the task is."""
    model = task.model()
    optimizer = sgd(model.parameters(), fused=True) if fused else task.optimizer(model.parameters())
    x, y = task.data()

    def run() -> float:
        begin = time.perf_counter()
        for _ in range(turn):
            task.loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return time.perf_counter() - begin

    return Contender(run, turn)


def apart(task: Task, turn: int) -> Contender:
    """Runs forward of each stage, then backward of each, and one step: the arithmetic of a pipeline and nothing else.

    No schedule, no versions, no messages. The plain loop does the same, but its backward is one call.
    """
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    x, y = task.data()

    def run() -> float:
        begin = time.perf_counter()
        for _ in range(turn):
            value: Any = x
            ends = []
            for stage in model:
                inside = entering(value)
                value = stage(inside)
                ends.append((inside, value))
            loss = task.loss(value, y)
            gradients: Any = None
            for inside, outside in reversed(ends):
                torch.autograd.backward(loss if gradients is None else outside, gradients)
                gradients = inside.grad if isinstance(inside, Tensor) else [part.grad for part in inside]
            optimizer.step()
            optimizer.zero_grad()
        return time.perf_counter() - begin

    return Contender(run, turn)


def entering(value: Tensor | tuple[Tensor, ...]) -> Any:
    """Detached tensors that collect gradients."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_()
    return tuple(part.detach().requires_grad_() for part in value)


class Part(nn.Sequential):
    """Some of the stages; torch passes a tuple that crosses a boundary as several arguments."""

    def forward(self, *args: Any) -> Any:
        return super().forward(args[0] if len(args) == 1 else args)


def halves(layers: int) -> list[int]:
    """The rank of each layer."""
    return [layer * RANKS // layers for layer in range(layers)]


def peer(
    task: Task, rank: int, schedule: Any, flush: int, turn: int, owner: list[int], parts: Sequence[Sequence[int]] = ()
) -> Contender:
    """torch.distributed.pipelining: a step ends each flush.

    owner: the part of each of the model's stages. parts: those of each rank; (): each rank has one.
    """
    layers, count = task.model(), max(owner) + 1
    mine = {n: Part(*(stage for stage, who in zip(layers, owner, strict=True) if who == n)) for n in range(count)}
    mine = {n: mine[n] for n in (parts[rank] if parts else (rank,))}
    stages = [PipelineStage(part, n, count, torch.device("cpu"), group=dist.group.WORLD) for n, part in mine.items()]
    steps = schedule(stages if parts else stages[0], n_microbatches=flush, loss_fn=task.loss)
    optimizer = task.optimizer([weight for part in mine.values() for weight in part.parameters()])
    x, y = task.data(flush)
    given: tuple[Any, ...] = (x,) if 0 in mine else ()
    judged: dict[str, Any] = {"target": y, "losses": []} if count - 1 in mine else {}

    def run() -> float:
        begin = time.perf_counter()
        for _ in range(turn // flush):
            steps.step(*given, **judged)
            judged.get("losses", []).clear()
            optimizer.step()
            optimizer.zero_grad()
        return time.perf_counter() - begin

    return Contender(run, turn)
