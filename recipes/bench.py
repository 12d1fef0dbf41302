"""Speed and memory of the core, as ratios within one run: everything compared is interleaved, medians are printed.

    make bench
    pipeback bench repeats=9

1. One process, one thread, 20 stages of width 64, micro-batch 1: a push of 150 over the plain PyTorch loop.
2. Two threads on two cores against two independent single-process copies that run at once.
3. Weight copies and method state, measured and declared; memory after 100 and after 10,000 micro-batches.
4. Lightning with the pipeback strategy, batches of 64 cut into 64 micro-batches: samples a second over Pipeline.push's.
5. `import pipeback` beyond `import torch`.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import pipeback
from pipeback import methods

METHODS = ("pb", "cerebras", "sgd", "sc", "lwp", "pipedream", "spectrain", "pipemare", "gpipe", "one_f_one_b")


class Block(nn.Module):
    """x + relu(linear(norm(x)))"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


def network(stages: int = 20, width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(width) for _ in range(stages - 1)], nn.Linear(width, 10))


def sgd(params: Any) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=1e-5, momentum=0.999, weight_decay=1e-4, foreach=True)


def create(name: str, stages: int) -> pipeback.Method:
    options: dict[str, dict[str, int]] = {
        "pipemare": {"anneal": 10_000}, "pipedream_2bw": {"micro_batches": stages},
        "gpipe": {"micro_batches": 32}, "one_f_one_b": {"micro_batches": 32},
    }  # fmt: skip
    return methods.create(name, **options.get(name, {}))


def pipeline(method: str, stages: int = 20, width: int = 64, **options: Any) -> pipeback.Pipeline:
    return pipeback.Pipeline(
        network(stages, width), loss=cross_entropy, optimizer=sgd, method=create(method, stages), **options
    )


def main() -> None:
    repeats = 9
    for argument in sys.argv[1:]:
        name, _, value = argument.partition("=")
        if name != "repeats" or not value.isdecimal():
            sys.exit(f"pipeback bench: {argument!r} is not an option; there is repeats=9")
        repeats = int(value)
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, one intra-op thread; medians of {repeats}\n")
    event_loop(repeats)
    print()
    two_threads(repeats)
    print()
    memory()
    print()
    under_lightning(repeats)
    print()
    imports(repeats)


def event_loop(repeats: int, count: int = 150) -> None:
    x, y = torch.randn(count, 64), torch.randint(0, 10, (count,))
    model = network()
    optimizer = sgd(model.parameters())

    def plain() -> None:
        for i in range(count):
            cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
            optimizer.step()
            optimizer.zero_grad()

    runs: dict[str, Callable[[], Any]] = {"plain loop": plain}
    for name in METHODS:
        pipe = pipeline(name, micro_batch_size=1)
        runs[name] = partial(pipe.push, x, y)
    seconds = interleaved(runs, repeats)
    print("one process, one thread: 20 stages of width 64, micro-batch 1")
    print(f"{'':<14}{'ms a micro-batch':>18}{'of the plain loop':>20}{'   spread':>16}")
    for name, some in seconds.items():
        ratios = [a / b for a, b in zip(seconds["plain loop"], some, strict=True)]
        print(f"{name:<14}{statistics.median(some) / count * 1e3:>18.3f}{statistics.median(ratios):>20.2f}"
              f"{min(ratios):>10.2f} … {max(ratios):.2f}")  # fmt: skip


def interleaved(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of every run, in turn, after a warm-up."""
    for run in runs.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begin)
    return seconds


WIDE, DEEP, SAMPLES = 512, 9, 128  # eight blocks of a few milliseconds and a small head: four blocks a worker


def two_threads(repeats: int, count: int = 12) -> None:
    """Two workers share one pipeline; the ideal is two copies of it, a process each, at once: twice the samples."""
    x, y = torch.randn(SAMPLES, WIDE), torch.randint(0, 10, (SAMPLES,))
    pipe = pipeline("pb", DEEP, WIDE, workers=2)
    for _ in range(2 * DEEP):
        pipe.push(x, y)
    pipe.wait()
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    copies = [context.Process(target=copy, args=(theirs, count), daemon=True) for _, theirs in pipes]
    for process in copies:
        process.start()
    stage = [mine.recv() for mine, _ in pipes]
    ratios = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(count):
            pipe.push(x, y)
        pipe.wait()
        threads = count / (time.perf_counter() - begin)
        for mine, _ in pipes:
            mine.send("go")
        ideal = sum(count / mine.recv() for mine, _ in pipes)
        ratios.append(threads / ideal)
    for mine, _ in pipes:
        mine.send(None)
    pipe.close()
    print(
        f"two threads, two cores: {DEEP} stages of width {WIDE}, {SAMPLES} samples, {max(stage) * 1e3:.1f} ms a stage"
    )
    print(f"pb, workers=2: {statistics.median(ratios):.2f} of two independent copies at once "
          f"({min(ratios):.2f} … {max(ratios):.2f})")  # fmt: skip


def copy(connection: Any, count: int) -> None:
    """A single-process copy: on every "go", `count` micro-batches; answers with the seconds."""
    torch.set_num_threads(1)
    x, y = torch.randn(SAMPLES, WIDE), torch.randint(0, 10, (SAMPLES,))
    pipe = pipeline("pb", DEEP, WIDE)
    for _ in range(2 * DEEP):
        pipe.push(x, y)
    begin = time.perf_counter()
    for _ in range(4):
        pipe.push(x, y)
    connection.send((time.perf_counter() - begin) / 4 / DEEP)
    while connection.recv():
        begin = time.perf_counter()
        for _ in range(count):
            pipe.push(x, y)
        connection.send(time.perf_counter() - begin)


def memory(stages: int = 20) -> None:
    print(f"weight copies and method state at the peak, {stages} stages of width 64, micro-batch 1")
    print(f"{'':<16}{'copies':>8}{'declared':>10}{'state':>8}{'declared':>10}")
    x, y = torch.randn(1, 64), torch.randint(0, 10, (1,))
    for name in methods.available():
        pipe = pipeline(name, stages)
        for _ in range(5 * stages):
            pipe.push(x, y)
        found, method = pipe.memory(), pipe.method
        sizes = [sum(p.numel() for p in part.parameters()) for part in pipe.model.children()]
        declared = sum(method.held(s, stages) * size for s, size in enumerate(sizes)) / sum(sizes)
        print(f"{name:<16}{found.copies:>8.2f}{declared:>10.2f}{found.state:>8.2f}{method.state_copies:>10.2f}")
    pipe = pipeline("cerebras", 4)
    held = []
    for done, goal in ((0, 100), (100, 10_000)):
        for _ in range(done, goal):
            pipe.push(x, y)
        held.append(alive())
    print(f"\ntensors held after 100 micro-batches: {held[0]:,} bytes; after 10,000: {held[1]:,} bytes")


def under_lightning(repeats: int, count: int = 8) -> None:
    """One fit; after every batch the same batch is pushed into a pipeline of its own, so that both are paired."""
    import lightning.pytorch as pl

    from pipeback.lightning import PipelineMonitor, PipelineStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = network()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            loss = cross_entropy(self.model(x), y)
            self.log("train/loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self.parameters())

    class Paired(pl.Callback):
        def __init__(self, pipe: pipeback.Pipeline) -> None:
            self.pipe, self.fit, self.push = pipe, [], []  # type: ignore[var-annotated]
            self.began = 0.0

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            middle = time.perf_counter()
            self.pipe.push(*batch)
            end = time.perf_counter()
            if batch_idx >= count:  # the first are a warm-up
                self.fit.append(middle - self.began)
                self.push.append(end - middle)
            self.began = time.perf_counter()

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    batches: Any = [(torch.randn(64, 64), torch.randint(0, 10, (64,))) for _ in range(count * (repeats + 1))]
    print("Lightning with the strategy, 64 micro-batches of one sample a batch, 20 stages of width 64")
    for name in ("pb", "cerebras"):
        for watched in (False, True):
            paired = Paired(pipeline(name, micro_batch_size=1))
            callbacks = [PipelineMonitor(), paired] if watched else [paired]
            quiet: dict[str, Any] = {
                "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False, "max_epochs": 1,
                "enable_progress_bar": False, "enable_model_summary": False, "callbacks": callbacks,
            }  # fmt: skip
            where = PipelineStrategy(create(name, 20), micro_batch_size=1)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a loader without workers, of a run without a log
                pl.Trainer(strategy=where, **quiet).fit(Module(), torch.utils.data.DataLoader(batches, batch_size=None))
            ratios = [
                sum(paired.push[n : n + count]) / sum(paired.fit[n : n + count])
                for n in range(0, len(paired.fit), count)
            ]
            label = name + (" with PipelineMonitor" if watched else "")
            print(f"{label:<32}{statistics.median(ratios):.2f} of Pipeline.push's samples/s "
                  f"({min(ratios):.2f} … {max(ratios):.2f})")  # fmt: skip


def imports(repeats: int) -> None:
    """Seconds of an import in a new process, torch there already."""
    code = (
        "import time, torch; a = time.perf_counter(); import pipeback; pipeback.Pipeline; b = time.perf_counter(); "
        "print(b - a)"
    )
    some = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(min(repeats, 5))
    ]
    print(f"import pipeback, with its Pipeline, beyond import torch: {statistics.median(some) * 1e3:.0f} ms")


def alive() -> int:
    """Bytes of all tensors that the garbage collector knows."""
    gc.collect()
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and not thing.is_meta:
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())


if __name__ == "__main__":
    main()
