"""Compares two threads on two cores with two independent single-process copies that run at once."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import torch

from pipeback.recipes.benches.network import pipeline, settle
from pipeback.recipes.benches.turns import spread
from pipeback.recipes.markdown import table

WIDE, DEEP, SAMPLES = 512, 9, 128  # eight blocks of a few milliseconds and a small head: four blocks per worker


def main(repeats: int, count: int = 12) -> None:
    """Two workers share one pipeline; the ideal is two copies in a process each, which train twice the samples."""
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
    print(f"Two threads on two cores: {DEEP} stages of width {WIDE}, {SAMPLES} samples, "
          f"{max(stage) * 1e3:.1f} ms per stage.\n")  # fmt: skip
    print(table(["", "of two independent copies at once"], [["`pb`, `workers=2`", spread(ratios)]]))


def copy(connection: Any, count: int) -> None:
    """A single-process copy trains `count` micro-batches on every "go", and answers with the seconds."""
    settle()
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
