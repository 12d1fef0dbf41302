"""Compares measured and declared weight copies and method state; and memory after 100 and 10,000 micro-batches."""

from __future__ import annotations

import gc

import torch
from torch import Tensor, nn

from pipeback import methods
from pipeback.recipes.benches.network import pipeline
from pipeback.recipes.markdown import table


def main(repeats: int, stages: int = 20) -> None:
    print(f"Weight copies and method state at the peak, {stages} stages of width 64, micro-batch 1.\n")
    rows = []
    x, y = torch.randn(1, 64), torch.randint(0, 10, (1,))
    for name in methods.available():
        if name == "eigendelay":  # of Adam alone
            continue
        pipe = pipeline(name, stages)
        for _ in range(5 * stages):
            pipe.push(x, y)
        found, method = pipe.memory(), pipe.method
        sizes = [sum(p.numel() for p in part.parameters()) for part in pipe.model.children()]
        declared = sum(method.held(s, stages) * size for s, size in enumerate(sizes)) / sum(sizes)
        kept = sum(method.state_numbers(p.shape) for p in pipe.model.parameters()) / sum(sizes)
        some = (found.copies, declared, found.state, kept)
        rows.append([f"`{name}`", *(f"{number:.2f}" for number in some)])
    print(table(["method", "copies", "declared", "state", "declared"], rows))
    pipe = pipeline("cerebras", 4)
    held = []
    for done, goal in ((0, 100), (100, 10_000)):
        for _ in range(done, goal):
            pipe.push(x, y)
        held.append(alive())
    print(f"\nTensors held after 100 micro-batches: {held[0]:,} bytes; after 10,000: {held[1]:,} bytes.")


def alive() -> int:
    """The bytes of all tensors that the garbage collector knows."""
    gc.collect()
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter) and not thing.is_meta:
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())
