"""`pipeback bench gpu`, tiny: on a GPU if there is one, and else with the CPU in its place. No times are asserted."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch

from pipeback.recipes import bench
from pipeback.recipes.benches import gpu, turns
from pipeback.recipes.benches.tasks import Network, Task
from pipeback.recipes.benches.vectorized import Linear, Transformer, blocks

THERE = torch.cuda.is_available()
TINY = Task(Network("tiny", "6 layers of width 8", partial(blocks, Linear, 6, 8), (8,), {}), 2, 4)
DEEP = Task(Network("deep", "4 blocks of width 8", partial(blocks, Transformer, 4, 8), (4, 8), {}), 2, 4)


@pytest.fixture
def there(monkeypatch):
    """The CPU stands for a GPU: nothing is queued, and what it would capture runs."""
    monkeypatch.setattr(turns, "MOST", 1)
    if THERE:
        return
    for name, value in {
        "synchronize": lambda: None, "reset_peak_memory_stats": lambda: None, "memory_allocated": lambda: 0,
        "max_memory_allocated": lambda: 2_000_000,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    monkeypatch.setattr(gpu, "built", lambda task: task.model())
    monkeypatch.setattr(gpu, "captured", lambda update: update)


@pytest.mark.parametrize(("task", "entries"), [(TINY, gpu.ENTRIES), (DEEP, gpu.STREAMED)], ids=["small", "streamed"])
def test_contenders(there, task, entries):
    lines = gpu.compared(task, entries, 2).splitlines()
    told = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in lines if line.startswith("|")}
    assert list(told)[2:] == list(entries)
    without = {name for name, speed in told.items() if speed == "–"}
    graphs = {name for name in entries if "cuda_graph" in name}
    assert without == (set() if THERE else graphs)
    for name in without:  # the row has its reason below
        assert any(line.startswith(f"{name}: ValueError: vectorize=") for line in lines)


@pytest.mark.skipif(THERE, reason="there is a GPU")
def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pipeback bench", "gpu"])
    with pytest.raises(SystemExit, match="torch finds no CUDA device here; the other sections run on the CPU"):
        bench.main()


@pytest.mark.skipif(not THERE, reason="needs a GPU: it asks for its name first")
def test_networks_by_name():
    with pytest.raises(SystemExit, match="networks=wide: there is no 'wide'; there are resnet20, "):
        gpu.main(1, networks="wide")
