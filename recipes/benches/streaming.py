"""Compares weights in a store with weights on the device: samples per second, share of stall, bytes moved."""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any

import torch
from torch import nn

import pipeback
from pipeback import schedules, sparsities
from pipeback.schedules.order import Order
from pipeback.streaming.disk_store import DiskStore
from pipeback.streaming.sparse_linear import ROWS, gain
from pipeback.streaming.store import HostStore

WIDTH, STAGES, SAMPLES, MICRO_BATCHES = 1024, 8, 256, 4  # stages of 20 ms and more, 4.2 MB each
METHODS = ("gpipe", "pb", "cerebras")


def main(repeats: int) -> None:
    print(f"streamed: {STAGES} linear stages of width {WIDTH}, {SAMPLES} samples, pushes of {MICRO_BATCHES}; AdamW")
    print(f"{'':30} {'of resident':>12} {'spread':>16} {'stall':>7}")
    with tempfile.TemporaryDirectory() as folder:
        for method in METHODS:
            stores: dict[str, Any] = {"resident": None, "host": HostStore(), "host, 2 ahead": HostStore(prefetch=2)}
            if method == "gpipe":
                stores["disk, commits"] = DiskStore(folder)
                stores["disk"] = DiskStore(f"{folder}/seldom", commit_every=10**6)
            compare(method, stores, repeats)
    print()
    sparse()
    skipped(repeats)
    print()
    visits()


def pipeline(method: str, store: Any, **options: Any) -> pipeback.Pipeline:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(STAGES)]
    optimizer = (
        (lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9))
        if method == "cerebras"
        else lambda p: torch.optim.AdamW(p, lr=1e-4)
    )
    return pipeback.Pipeline(
        nn.Sequential(*blocks), loss=nn.functional.mse_loss, optimizer=optimizer, method=method,
        micro_batch_size=SAMPLES, store=store, **options,
    )  # fmt: skip


def compare(method: str, stores: dict[str, Any], repeats: int) -> None:
    """Time pushes with every store over those with resident weights, taken in turns."""
    x, y = torch.randn(2, SAMPLES * MICRO_BATCHES, WIDTH)
    pipes = {name: pipeline(method, store) for name, store in stores.items()}
    for pipe in pipes.values():
        for _ in range(2 * STAGES // MICRO_BATCHES + 1):
            pipe.push(x, y)
        pipe.wait()
    before = {name: pipe.traffic() for name, pipe in pipes.items()}
    ratios: dict[str, list[float]] = {name: [] for name in pipes}
    seconds = []
    for _ in range(repeats):
        took = {}
        for name, pipe in pipes.items():
            begin = time.perf_counter()
            pipe.push(x, y)
            pipe.push(x, y)
            took[name] = time.perf_counter() - begin
        seconds.append(took["resident"] / 2 / MICRO_BATCHES / STAGES)
        for name in pipes:
            ratios[name].append(took["resident"] / took[name])
    for name, some in ratios.items():
        if name == "resident":
            print(f"{method}, {1e3 * statistics.median(seconds):.1f} ms per stage")
            continue
        after = pipes[name].traffic()
        stall = (after.stall - before[name].stall) / (after.seconds - before[name].seconds)
        print(
            f"{f'  {name}':30} {statistics.median(some):12.2f} {f'{min(some):.2f} … {max(some):.2f}':>16} {stall:7.1%}"
        )
    for pipe in pipes.values():
        pipe.close()


def sparse() -> None:
    """Count the bytes to the device with 90 % of zeros, over those of dense weights."""
    x, y = torch.randn(2, SAMPLES, WIDTH)
    sent = []
    for policy in (None, sparsities.create("rigl", density=0.1, until=1000, every=100)):
        pipe = pipeline("gpipe", pipeback.Streaming("host", sparsity=policy))
        for _ in range(3):
            pipe.push(x, y)
        traffic = pipe.traffic()
        sent.append((traffic.weights_in, traffic.gradients_out))
        pipe.close()
    (dense_in, dense_out), (in_, out) = sent
    print(f"90 % sparse: {in_ / dense_in:.3f} of the dense bytes to the device, {out / dense_out:.3f} back")


def skipped(repeats: int) -> None:
    """Time forward and backward of a linear layer without its zeros, as with `skip_zeros`, against dense ones."""
    for sparsity in (0.8, 0.85, 0.9, 0.95, 0.98):
        shape, density = torch.Size((WIDTH, WIDTH)), 1 - sparsity
        gains = []
        for _ in range(repeats):
            gain.cache_clear()
            gains.append(gain(shape, density, torch.float32, torch.device("cpu")))
        print(
            f"{sparsity:.0%} zeros that are not computed, {ROWS} rows: {statistics.median(gains):.2f} times as fast "
            f"({min(gains):.2f} … {max(gains):.2f})"
        )


def visits(stages: int = 20, count: int = 400) -> None:
    """Count how often weights are fetched per stage and micro-batch of pipelined backpropagation."""
    for policy, near in (("sticky", 1), ("streaming", 1), ("streaming", 2), ("streaming", 4)):
        order = Order(schedules.flowing(2), stages, policy=policy, near=near)
        here: list[int] = []
        fetched = 0
        for wave in order.advance(count):
            s = wave.ops[0][0]
            fetched += s not in here
            here = [*(other for other in here if other != s), s][-near - 1 :]
        ahead = f", {near} ahead" if policy == "streaming" else ""
        times = fetched / stages / count
        print(f"pb, {stages} stages, order {policy}{ahead}: {times:.2f} fetches per stage and micro-batch")
