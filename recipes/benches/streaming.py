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
from pipeback.recipes.benches.turns import spread
from pipeback.recipes.markdown import table
from pipeback.schedules.order import Order
from pipeback.streaming.disk_store import DiskStore
from pipeback.streaming.sparse_linear import ROWS, gain
from pipeback.streaming.store import HostStore

WIDTH, STAGES, SAMPLES, MICRO_BATCHES = 1024, 8, 256, 4  # stages of 20 ms and more, 4.2 MB each
METHODS = ("gpipe", "pb", "cerebras")
STICKY = "changing stage only when blocked"


def main(repeats: int) -> None:
    print(f"{STAGES} linear stages of width {WIDTH}, {SAMPLES} samples per micro-batch, pushes of {MICRO_BATCHES} "
          "micro-batches.\n")  # fmt: skip
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for method in METHODS:
            stores: dict[str, Any] = {"resident": None, "host": HostStore(), "host, 2 ahead": HostStore(prefetch=2)}
            if method == "gpipe":
                stores["disk, commits"] = DiskStore(folder)
                stores["disk"] = DiskStore(f"{folder}/seldom", commit_every=10**6)
            rows += compare(method, stores, repeats)
    print(table(["", "ms per resident stage", "samples/s, of resident", "waiting"], rows), flush=True)
    print("\n" + table(["", "measured"], [*sparse(), *skipped(repeats), *visits()]))


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


def compare(method: str, stores: dict[str, Any], repeats: int) -> list[list[str]]:
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
    rows = []
    for name in [name for name in ratios if name != "resident"]:
        after = pipes[name].traffic()
        stall = (after.stall - before[name].stall) / (after.seconds - before[name].seconds)
        rows.append([f"`{method}`, {name}", f"{1e3 * statistics.median(seconds):.1f}", spread(ratios[name]),
                     f"{stall:.1%}"])  # fmt: skip
    for pipe in pipes.values():
        pipe.close()
    return rows


def sparse() -> list[list[str]]:
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
    return [["bytes to the device at 90 % sparsity, of the dense ones", f"{in_ / dense_in:.3f}"],
            ["bytes back from the device", f"{out / dense_out:.3f}"]]  # fmt: skip


def skipped(repeats: int) -> list[list[str]]:
    """Time forward and backward of a linear layer without its zeros, as with `skip_zeros`, against dense ones."""
    rows = []
    for sparsity in (0.8, 0.85, 0.9, 0.95, 0.98):
        shape, density = torch.Size((WIDTH, WIDTH)), 1 - sparsity
        gains = []
        for _ in range(repeats):
            gain.cache_clear()
            gains.append(gain(shape, density, torch.float32, torch.device("cpu")))
        rows.append([f"speed of products without their {sparsity:.0%} zeros, {ROWS} rows", spread(gains)])
    return rows


def visits(stages: int = 20, count: int = 400) -> list[list[str]]:
    """Count how often weights are fetched per stage and micro-batch of pipelined backpropagation."""
    rows = []
    for policy, near in (("sticky", 1), ("streaming", 1), ("streaming", 2), ("streaming", 4)):
        order = Order(schedules.flowing(2), stages, policy=policy, near=near)
        here: list[int] = []
        fetched = 0
        for wave in order.advance(count):
            s = wave.ops[0][0]
            fetched += s not in here
            here = [*(other for other in here if other != s), s][-near - 1 :]
        by = f"in the order that stores have, `prefetch={near}`" if policy == "streaming" else STICKY
        rows.append([f"fetches of `pb` per stage and micro-batch, {stages} stages, {by}",
                     f"{fetched / stages / count:.2f}"])  # fmt: skip
    return rows
