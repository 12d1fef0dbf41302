"""Times training on one GPU over the plain PyTorch loop there: calls one by one, and whole ticks as CUDA graphs.

The plain loop is also captured as one CUDA graph per update (forward, backward, step), which is the best it can do.
Contenders take turns; a turn ends when the device has done its work. A second table trains a larger network
whose weights wait in host memory, over the same network with its weights on the GPU.

of plain        samples per second over the plain loop's, momentum SGD by foreach, an update per micro-batch
peak MB         of the GPU's memory, as torch's allocator counts it, above what the process held before
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import pipeback
from pipeback.recipes.benches.contenders import Contender
from pipeback.recipes.benches.network import sgd
from pipeback.recipes.benches.tasks import NETWORKS, Network, Task
from pipeback.recipes.benches.turns import Rates, spread, take_turns
from pipeback.recipes.benches.vectorized import Transformer, blocks
from pipeback.recipes.markdown import table
from pipeback.recipes.provenance import machine
from pipeback.streaming.store import HostStore

PLAIN = "plain loop"
THREADS = 8
LONGER = 8  # turns of CUDA graphs have so many times the micro-batches of others: of ResNet-20, 128
WARM = 3  # updates before a capture, in which libraries set themselves up
LARGE = Network("large", "8 transformer blocks of width 1024, sequence 512", partial(blocks, Transformer, 8, 1024),
                (512, 1024), {2: 8})  # fmt: skip
Build = Callable[[Task], Contender]


def main(repeats: int, networks: str = "") -> None:
    """networks: names with commas between; "" for all."""
    if not torch.cuda.is_available():
        sys.exit("pipeback bench gpu: torch finds no CUDA device here; the other sections run on the CPU")
    known = NETWORKS | {LARGE.name: LARGE}
    names = networks.split(",") if networks else list(known)
    if odd := [name for name in names if name not in known]:
        sys.exit(f"pipeback bench: networks={networks}: there is no {odd[0]!r}; there are {', '.join(known)}")
    device = torch.device("cuda", torch.cuda.current_device())
    torch.set_num_threads(min(THREADS, os.cpu_count() or 1))
    print(f"On {machine(device)}; weights in host memory are updated by {torch.get_num_threads()} threads.")
    for name in names:
        for samples, turn in known[name].turns.items():
            task = Task(known[name], samples, turn)
            print(f"\n{task.network.words}, micro-batch {samples}:\n")
            print(compared(task, STREAMED if name == LARGE.name else ENTRIES, repeats), flush=True)


def compared(task: Task, entries: dict[str, Build], repeats: int) -> str:
    """Let contenders take turns on the GPU; return their table."""
    contenders, peaks, notes = {}, {}, {}
    for name, build in entries.items():
        before = settled()
        try:
            contenders[name] = build(task)
            contenders[name].run()
        except (ValueError, RuntimeError) as error:
            contenders.pop(name, None)
            notes[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        peaks[name] = (torch.cuda.max_memory_allocated() - before) / 1e6
    rates = take_turns(contenders, repeats)
    for contender in contenders.values():
        if contender.pipe is not None:
            contender.pipe.close()
    contenders.clear()
    settled()
    return "\n".join([table(["", "samples/s", "of plain", "peak MB"], list(rows(task, entries, rates, peaks)))]
                     + [f"\n{name}: {why}" for name, why in notes.items()])  # fmt: skip


def rows(task: Task, entries: dict[str, Build], rates: Rates, peaks: dict[str, float]) -> Any:
    for name in entries:
        if name in rates:
            ratios = [mine / theirs for mine, theirs in zip(rates[name], rates[PLAIN], strict=True)]
            speed = task.samples * statistics.median(rates[name])
            yield [name, f"{speed:.1f}", spread(ratios), f"{peaks[name]:.0f}"]
        else:
            yield [name, "–", "–", "–"]


def settled() -> int:
    """Return the bytes of the GPU's memory that are in use, and count peaks from here on."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def data(task: Task, micro_batches: int = 1) -> tuple[Tensor, Tensor]:
    x, y = task.data(micro_batches)
    return x.cuda(), y.cuda()


def built(task: Task) -> nn.Module:
    """The network, made on the GPU."""
    with torch.device("cuda"):
        return task.model()


def until_done(work: Callable[[], object]) -> float:
    """The seconds until the device has done it."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def plain(task: Task, *, fused: bool = False, graph: bool = False) -> Contender:
    """The training loop that everybody writes. graph: captured once per update."""
    task = task._replace(turn=task.turn * LONGER) if graph else task
    model = built(task)
    optimizer = sgd(model.parameters(), fused)
    x, y = data(task)

    def update() -> None:
        task.loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    call = captured(update) if graph else update

    def run() -> None:
        for _ in range(task.turn):
            call()

    return Contender(partial(until_done, run), task.turn)


def captured(update: Callable[[], None]) -> Callable[[], None]:
    """Return the update as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM):
            update()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update()
    return partial(replay, graph, update)


def replay(graph: torch.cuda.CUDAGraph, owner: object) -> None:
    """Replay a graph. owner: of the memory in which it writes, which must live as long."""
    graph.replay()


def pushed(task: Task, method: str = "pb", **options: Any) -> Contender:
    """A pipeline that is full, which gets the micro-batches of a turn in one push."""
    task = task._replace(turn=task.turn * LONGER) if options.get("vectorize") == "cuda_graph" else task
    pipe = pipeback.Pipeline(
        built(task), loss=task.loss, optimizer=sgd, method=method, micro_batch_size=task.samples, **options
    )
    pipe.push(*data(task, max(pipe.delays) + 2))
    x, y = data(task, task.turn)
    return Contender(partial(until_done, partial(pipe.push, x, y)), task.turn, pipe=pipe)


def streamed(method: str, ahead: int, task: Task) -> Contender:
    """Weights and the optimizer's state wait in pinned host memory, and come so many stages ahead."""
    return pushed(task, method, store=HostStore(prefetch=ahead))


ENTRIES: dict[str, Build] = {
    PLAIN: plain,
    "plain loop, fused": partial(plain, fused=True),
    "plain loop as a CUDA graph": partial(plain, graph=True),
    "`pb`, event loop": pushed,
    "`pb`, `vectorize=True`": partial(pushed, vectorize=True),
    '`pb`, `vectorize="cuda_graph"`': partial(pushed, vectorize="cuda_graph"),
    '`cerebras`, `vectorize="cuda_graph"`': partial(pushed, method="cerebras", vectorize="cuda_graph"),
}
STREAMED: dict[str, Build] = {
    PLAIN: plain,
    "`pb`, event loop": pushed,
    '`pb`, `activations="host"`': partial(pushed, activations="host"),
    '`pb`, `activations="recompute"`': partial(pushed, activations="recompute"),
    "`pb`, weights in host memory, 2 ahead": partial(streamed, "pb", 2),
    "`gpipe`, event loop": partial(pushed, method="gpipe"),
    "`gpipe`, weights in host memory, 0 ahead": partial(streamed, "gpipe", 0),
    "`gpipe`, weights in host memory, 2 ahead": partial(streamed, "gpipe", 2),
}
