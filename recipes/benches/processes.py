"""Two ranks, a process and a thread each, on two cores.

The ideal is two independent single-process copies that run at once: together they do twice the micro-batches of one,
under the same contention. All contenders take turns within the same two processes. The peers, of
torch.distributed.pipelining, step once a flush of 4 or 8 micro-batches, as our gpipe and one_f_one_b beside them; pb
steps after every one.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from pipeback.recipes.benches.contenders import FLUSHES, PEERS, RANKS, Case, alone, together

CASES = (
    Case("large", width=256, length=64, samples=4, turn=48),
    Case("small", width=64, length=16, samples=2, turn=288),
)
IDEAL = "two copies of pb"
Rates = dict[str, list[float]]  # micro-batches a second, by contender and round


def main(repeats: int, cases: Iterable[Case] = CASES) -> None:
    for case in cases:
        rates, weights, whole = measured(case, repeats)
        print(f"two processes, two cores, a thread each: {case.layers} transformer layers of width {case.width}, "
              f"sequence {case.length}, micro-batch {case.samples}")  # fmt: skip
        table(rates)
        shares = ", ".join(f"{some / whole:.1%}" for some in weights)
        print(f"weights that a rank holds, of {whole / 1e6:.1f} MB: {shares}\n", flush=True)


def measured(case: Case, repeats: int) -> tuple[Rates, list[int], int]:
    """Rates, and bytes of weights on every rank and of the whole model."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the new processes
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = mp.get_context("spawn").SimpleQueue()
            mp.spawn(on_rank, (f"file://{folder}/store", case, repeats, found), nprocs=RANKS)
            return found.get()
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def on_rank(rank: int, store: str, case: Case, repeats: int, found: Any) -> None:
    torch.set_num_threads(1)
    contenders = alone(case, rank)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    contenders |= together(case, rank)
    rates: Rates = {name: [] for name in contenders}
    for turn in range(repeats + 1):
        for name, contender in contenders.items():
            dist.barrier()
            seconds = everywhere(contender.run())
            if turn:  # the first is a warm-up
                rates[name].append(contender.rate(seconds))
    pipe = contenders["pb, shared_memory"].pipe
    assert pipe is not None
    weights = everywhere(pipe.memory().weights)
    for contender in contenders.values():
        if contender.pipe is not None:
            contender.pipe.close()
    if rank == 0:
        found.put((rates, weights, sum(p.nbytes for p in case.model().parameters())))
    dist.destroy_process_group()


def everywhere(value: Any) -> list[Any]:
    values: list[Any] = [None] * RANKS
    dist.all_gather_object(values, value)
    return values


def table(rates: Rates) -> None:
    print(f"{'':<20}{'ms a micro-batch':>18}{'of two copies':>16}{'   spread':>16}")
    for name, some in rates.items():
        print(f"{name:<20}{1e3 / statistics.median(some):>18.2f}{ratio(some, rates[IDEAL])}")
    first = FLUSHES[0]
    peers = (rates[f"{peer.__name__} {first}"] for peer in PEERS.values())
    better = max(peers, key=statistics.median)  # not round by round: noise would make one that nobody can choose
    for link in ("threads", "gloo", "shared_memory"):
        over(f"pb, {link}", rates, better, f"the better peer at {first}")
    for flush in FLUSHES:
        for name, peer in PEERS.items():
            theirs = f"{peer.__name__} {flush}"
            over(f"{name} {flush}", rates, rates[theirs], theirs)


def over(name: str, rates: Rates, theirs: list[float], whose: str) -> None:
    print(f"{name:<20}{'over ' + whose:>26}{ratio(rates[name], theirs, 8)}")


def ratio(some: list[float], others: list[float], width: int = 16) -> str:
    """The median of the rounds' ratios, and their spread."""
    ratios = [a / b for a, b in zip(some, others, strict=True)]
    return f"{statistics.median(ratios):>{width}.2f}{min(ratios):>10.2f} … {max(ratios):.2f}"
