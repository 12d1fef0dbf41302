"""Predicts the time of a step on two ranks from costs of one process, and measures it beside, in turns.

Two processes each train a copy of the model at once, alone on their core; a micro-batch's seconds are shared out to
stages and operations as recorded. The planner simulates these costs on two workers, whose messages take as long as one
sent to and fro does. Then both processes train as ranks of one pipeline. All take turns, and the ratio of each round
counts, if the machine did little else in it: two processes that wait for each other lose more to a third one than two
that do not.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from pipeback.planner.simulation import simulate
from pipeback.planner.steps import flowing
from pipeback.planner.sweeps import StageTimes
from pipeback.planner.techniques import technique
from pipeback.recipes.benches.contenders import RANKS, Case, build, filled
from pipeback.recipes.benches.turns import everywhere, join, on_ranks

CASE = Case(
    "large", width=256, length=64, samples=4, turn=8
)  # short turns: few of them meet what else the machine does
QUIET = 0.1  # of the cores, that other processes may take in a round that counts
MOST = 4  # times as many rounds are made, if too few are quiet
FLUSH = 8
LINK: Literal["shared_memory"] = "shared_memory"
METHODS = {"gpipe": FLUSH, "one_f_one_b": FLUSH, "pb": 0}


class Round(NamedTuple):
    """Milliseconds per micro-batch of a method in one round."""

    method: str
    predicted: float
    measured: float
    others: float  # share of the cores that other processes took


def measured(repeats: int, case: Case = CASE) -> list[Round]:
    """So many rounds that count; or, if the machine is never quiet, those in which it was most."""
    rounds: list[Round] = on_ranks(_work, case, repeats)
    return sorted(rounds, key=lambda one: one.others)[: max(sum(map(_counts, rounds)), repeats * len(METHODS))]


def _counts(one: Round) -> bool:
    return one.others <= QUIET


def _work(rank: int, store: str, case: Case, repeats: int) -> list[Round]:
    alone = build(case, "pb")
    filled(alone, case)
    x, y = case.data(case.turn)
    join(rank, store)
    import pipeback

    pipes = {name: build(case, name, flush, workers=pipeback.Processes(link=LINK)) for name, flush in METHODS.items()}
    owner = pipes["pb"].owner
    rounds: list[Round] = []
    for turn in range(-1, MOST * repeats):
        if sum(map(_counts, rounds)) >= repeats * len(METHODS):
            break
        begin = _spent()
        each = everywhere(_costs(alone, x, y, case.turn))
        message = max(everywhere(_message(rank, case)))
        found = []
        for name, pipe in pipes.items():
            everywhere(None)
            took = max(everywhere(_train(pipe, case, METHODS[name])))
            guess = _predicted(name, METHODS[name], each, owner, message)
            found.append(Round(name, 1e3 * guess, 1e3 * took, 0.0))
        if turn >= 0:
            others = everywhere(_others(begin))[0]
            rounds += [one._replace(others=others) for one in found]
    for pipe in (alone, *pipes.values()):
        pipe.close()
    return rounds


class Spent(NamedTuple):
    """Seconds so far: by the clock, of all cores, and of the ranks."""

    clock: float
    cores: float
    ranks: float


def _spent() -> Spent:
    ranks = sum(everywhere(time.process_time()))
    try:
        times = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):  # not on Linux: then nothing is known of others
        return Spent(time.perf_counter(), ranks, ranks)
    busy = sum(times) - times[3] - times[4]  # without being idle and waiting for a disk
    return Spent(time.perf_counter(), busy / os.sysconf("SC_CLK_TCK"), ranks)


def _others(begin: Spent) -> float:
    """The share of the cores that others have taken since."""
    now = _spent()
    whole = (now.clock - begin.clock) * (os.cpu_count() or 1)
    return max(0.0, now.cores - begin.cores - now.ranks + begin.ranks) / whole


Costs = list[Mapping[str, float]]  # seconds of F, B and U of every stage


def _costs(pipe: Any, x: torch.Tensor, y: torch.Tensor, turn: int) -> Costs:
    """Of a copy that trains alone on this core: the whole time per micro-batch, shared out as it is recorded."""
    begin = time.perf_counter()
    pipe.push(x, y)
    whole = (time.perf_counter() - begin) / turn
    pipe.record()
    pipe.push(x, y)
    recorded = pipe.recorded.costs()
    pipe.record(False)
    spent = sum(float(seconds) for costs in recorded for seconds in costs.values())
    return [{kind: float(seconds) * whole / spent for kind, seconds in costs.items()} for costs in recorded]


def _message(rank: int, case: Case, times: int = 20) -> float:
    """Seconds of a micro-batch's activation from one process to the other: half of to and fro."""
    value = torch.zeros(case.samples, case.length, case.width)
    begin = time.perf_counter()
    for _ in range(times):
        if rank == 0:
            dist.send(value, 1)
            dist.recv(value, 1)
        else:
            dist.recv(value, 0)
            dist.send(value, 0)
    return (time.perf_counter() - begin) / times / 2


def _train(pipe: Any, case: Case, flush: int) -> float:
    """Seconds per micro-batch, between empty pipelines if it flushes, else from loss to loss."""
    x, y = case.data(flush or 1)
    judges = pipe.ranks.index == pipe.ranks.count - 1
    turns = case.turn // (flush or 1)
    if not flush:
        for _ in range(6):
            loss = pipe.push(x, y)
        if judges:
            float(loss)
    begin = time.perf_counter()
    for _ in range(turns):
        loss = pipe.push(x, y)
    if flush:
        pipe.wait()
    elif judges:
        float(loss)
    seconds = time.perf_counter() - begin
    pipe.wait()
    return seconds / case.turn if flush or judges else 0.0


def _predicted(name: str, flush: int, each: list[Costs], owner: list[int], message: float) -> float:
    """Seconds per micro-batch. each: the costs that every process has measured; a worker's stages count as one."""
    sums = [
        {kind: sum(each[w][s][kind] for s, mine in enumerate(owner) if mine == w) for kind in "FBU"}
        for w in range(RANKS)
    ]
    times = [StageTimes(one["F"], one["B"], 0.0, one["U"], message, message) for one in sums]
    chosen = technique(name)
    if chosen.flows:
        return flowing(chosen.routine(RANKS, 1), tuple(times))
    return float(simulate(chosen.routine(RANKS, flush), times).seconds) / flush


def ratios(rounds: list[Round]) -> dict[str, list[float]]:
    """Measured over predicted, by method, one number per round."""
    found: dict[str, list[float]] = {}
    for one in rounds:
        found.setdefault(one.method, []).append(one.measured / one.predicted)
    return found


def middle(rounds: list[Round], method: str, what: str) -> float:
    return statistics.median(getattr(one, what) for one in rounds if one.method == method)
