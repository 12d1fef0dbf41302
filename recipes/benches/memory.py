"""Compares measured and declared weight copies and method state; and memory after 100 and 10,000 micro-batches."""

from __future__ import annotations

import gc

import torch
from torch import Tensor

from pipeback import methods
from pipeback.recipes.benches.network import pipeline


def main(repeats: int, stages: int = 20) -> None:
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


def alive() -> int:
    """The bytes of all tensors that the garbage collector knows."""
    gc.collect()
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and not thing.is_meta:
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())
