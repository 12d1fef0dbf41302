"""Contenders take turns within the same processes, so that other load on the machine slows them alike."""

from __future__ import annotations

import gc
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

from pipeback.recipes.benches.contenders import RANKS, Contender
from pipeback.recipes.benches.network import settle

Rates = dict[str, list[float]]  # micro-batches per second, by contender and round
WARM = 2  # turns that do not count: the first compiles, the second shows how long a turn is
LEAST = 0.3  # seconds that a turn should take
MOST = 8  # runs of a turn


def on_ranks(work: Callable[..., Any], *given: Any, ranks: int = RANKS, start: str = "spawn") -> Any:
    """work(rank, store, *given) on new processes of one thread; what rank 0 returned. `join` takes the store.

    start: "spawn", or "forkserver", where there is one: new processes that have imported everything, much sooner.
    """
    start = start if start in mp.get_all_start_methods() else "spawn"
    with one_thread(), tempfile.TemporaryDirectory() as folder:
        context = mp.get_context(start)
        if start == "forkserver":
            context.set_forkserver_preload([work.__module__])
        found = context.SimpleQueue()
        mp.start_processes(on_rank, (f"file://{folder}/store", found, work, given), nprocs=ranks, start_method=start)
        return found.get()


@contextmanager
def one_thread() -> Iterator[None]:
    """Set the variables that new processes read, for one thread each."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def on_rank(rank: int, store: str, found: Any, work: Callable[..., Any], given: tuple[Any, ...]) -> None:
    settle()
    answer = work(rank, store, *given)
    if rank == 0:
        found.put(answer)
    if dist.is_initialized():
        dist.destroy_process_group()


def join(rank: int, store: str) -> None:
    """Join the process group: from here on a Pipeline spans all ranks."""
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)


def everywhere(value: Any) -> list[Any]:
    """Return what each rank has given."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * RANKS
    dist.all_gather_object(values, value)
    return values


def take_turns(contenders: Mapping[str, Contender], repeats: int) -> Rates:
    """Let contenders take turns; called on every rank, with the same names in the same order.

    A fast contender runs several times in a turn, so that a momentary load does not decide, and garbage is collected
    before each.
    """
    rates: Rates = {name: [] for name in contenders}
    times = dict.fromkeys(contenders, 1)
    for turn in range(-WARM, repeats):
        for name, contender in contenders.items():
            gc.collect()
            everywhere(None)  # so that no rank runs ahead
            each = [contender.run() for _ in range(times[name])]
            seconds = everywhere(statistics.fmean(each))
            if turn < 0:
                times[name] = min(MOST, math.ceil(LEAST / max(*seconds, 1e-9)))
            else:
                rates[name].append(contender.rate(seconds))
    return rates


def interleaved(runs: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Run all in turn in this process; returns the seconds of every run."""
    rates = take_turns({name: Contender(partial(timed, run), 1) for name, run in runs.items()}, repeats)
    return {name: [1 / rate for rate in some] for name, some in rates.items()}


def spread(some: Sequence[float], form: str = ".2f") -> str:
    """The median, and in brackets the smallest and the largest."""
    return f"{statistics.median(some):{form}} ({min(some):{form}} … {max(some):{form}})"


def timed(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
