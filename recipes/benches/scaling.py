"""Measures the cost per micro-batch and stage by number of stages, method and delay, and memory beside its prediction.

    pipeback bench scaling repeats=5
    pipeback bench scaling stages=16,64,256,1024 methods=pb slack=1 micro_batches=100,1000,10000,100000,1000000

Stages are so narrow that the overhead of the pipeline dominates. For every method and slack (about slack × stages
micro-batches are in flight at the first stage) one new process builds and fills a pipeline of each size; then they take
turns. 1,024 stages at slack 1 keep half a million micro-batches in flight, which are six gigabytes of graphs.

µs              per micro-batch and stage: F (forward), B (backward) and U (update), with the pipeline full. `power` is
                the exponent p of the law seconds per micro-batch ∝ stages^p that fits best: 1 if a stage costs the
                same among few and many
copies          of the weights at the peak, and what the method declares
MB counted      weights, their copies, method state and activations, as `Pipeline.memory` counts tensors
MB planned      the same, optimizer state and gradients, as `Pipeline.plan` predicts them
MB resident     growth of the process when the pipeline was built and filled. Only this counts what is no tensor:
                `KB in flight` is resident beyond planned, over the stages' micro-batches that are in flight

For every slack, `pb` takes turns with the same done by hand, in torch alone (`by_hand`): as many graphs are alive, and
nothing else. What grows there with the number of stages is the cost of memory that has left the caches.

Two more tables follow: pushes of more and more micro-batches (`push_length`), and what happens once in pipelines of up
to 1,024 stages (`deep`). Their stages run one by one, and as one.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy

import pipeback
from pipeback import methods
from pipeback.plan.training_plan import Plan
from pipeback.recipes.benches import deep, push_length
from pipeback.recipes.benches.by_hand import ByHand
from pipeback.recipes.benches.network import create, network, pipeline
from pipeback.recipes.benches.peaks import peak
from pipeback.recipes.benches.turns import interleaved, on_ranks, spread
from pipeback.recipes.markdown import table
from pipeback.schedules.timeline import in_flight

SIZES, METHODS, SLACKS = (16, 64, 128), ("pb", "cerebras", "pipedream", "pipemare"), (1, 2)
WIDTH, TURN = 8, 4  # micro-batches per turn


class Point(NamedTuple):
    """The measurements of a pipeline with this number of stages."""

    stages: int
    flying: int  # micro-batches in flight, summed over the stages
    seconds: list[float]  # per turn
    copies: float
    declared: float
    counted: int  # bytes
    planned: int  # bytes
    resident: float | None  # MB

    @property
    def cost(self) -> float:
        """Seconds per micro-batch."""
        return statistics.median(self.seconds) / TURN


def main(repeats: int, stages: str = "", methods: str = "", slack: str = "", micro_batches: str = "") -> None:
    sizes, slacks = numbers("stages", stages, SIZES, 2), numbers("slack", slack, SLACKS, 0)
    lengths = numbers("micro_batches", micro_batches, push_length.LENGTHS, 1)
    print(f"One process, one thread, stages of width {WIDTH}, micro-batch 1.")
    for name in named(methods):
        for ahead in slacks:
            points = on_ranks(grown, name, ahead, sizes, repeats, ranks=1)
            print("\n" + text(name, ahead, points), flush=True)
    for ahead in filter(None, slacks):  # at slack 0 one backward waits for the other
        found = on_ranks(beside_by_hand, ahead, sizes, repeats, ranks=1)
        print("\n" + text_by_hand(ahead, sizes, found), flush=True)
    print()
    push_length.main(repeats, lengths)
    print()
    if stages:
        deep.main(repeats, sizes, [size for size in sizes if size <= max(deep.AS_ONE)])
    else:
        deep.main(repeats)


def numbers(option: str, given: str, default: Sequence[int], least: int) -> list[int]:
    parts = given.split(",") if given else [str(n) for n in default]
    if not all(part.isdecimal() and int(part) >= least for part in parts):
        sys.exit(f"pipeback bench: {option}={given}: whole numbers from {least} on, like "
                 f"{option}={','.join(map(str, default))}")  # fmt: skip
    return sorted({int(part) for part in parts})


def named(given: str) -> list[str]:
    names = given.split(",") if given else list(METHODS)
    flowing = [name for name in methods.available() if hasattr(create(name, 2), "slack")]
    for name in names:
        if name not in flowing:
            sys.exit(f"pipeback bench: methods={given}: there is no {name!r} with a slack; there are "
                     + ", ".join(flowing))  # fmt: skip
    return names


def grown(rank: int, store: str, name: str, slack: int, sizes: list[int], repeats: int) -> list[Point]:
    """Build a pipeline of each size, the smaller ones first; all exist when they take turns."""
    x, y = torch.randn(TURN, WIDTH), torch.randint(0, 10, (TURN,))
    pipes: dict[int, pipeback.Pipeline] = {}
    resident = {}

    def filled(stages: int) -> None:
        pipes[stages] = pipeline(create(name, stages, slack=slack), stages, WIDTH, micro_batch_size=1)
        method = pipes[stages].method
        rounds = 2 if method.copies == "stash" else 1  # with stashing, all versions are kept only after a second round
        for _ in range(0, rounds * max(in_flight(method.schedule, stages)) + 1, TURN):
            pipes[stages].push(x, y)

    filled(2)  # load and create everything that exists only once
    for stages in sizes:
        resident[stages] = peak(partial(filled, stages))
    seconds = interleaved({str(stages): partial(pipes[stages].push, x, y) for stages in sizes}, repeats)
    return [point(pipes[stages], seconds[str(stages)], resident[stages]) for stages in sizes]


def beside_by_hand(rank: int, store: str, slack: int, sizes: list[int], repeats: int) -> dict[str, list[float]]:
    """The seconds of every turn of full pipelines of each size, by hand ("hand N") and with `pb` ("pb N")."""
    x, y = torch.randn(TURN, WIDTH), torch.randint(0, 10, (TURN,))
    runs: dict[str, Callable[[], object]] = {}
    for stages in sizes:
        hand = ByHand(list(network(stages, WIDTH)), cross_entropy, slack)
        pipe = pipeline(create("pb", stages, slack=slack), stages, WIDTH, micro_batch_size=1)
        runs[f"hand {stages}"], runs[f"pb {stages}"] = partial(hand.push, x, y), partial(pipe.push, x, y)
        for _ in range(0, slack * (stages - 1) + 1, TURN):
            hand.push(x, y)
            pipe.push(x, y)
    return interleaved(runs, repeats)


def point(pipe: pipeback.Pipeline, seconds: list[float], resident: float | None) -> Point:
    count = pipe.stages
    found, sizes = pipe.memory(), [sum(p.numel() for p in part.parameters()) for part in pipe.model.children()]
    declared = sum(pipe.method.held(s, count) * size for s, size in enumerate(sizes)) / sum(sizes)
    counted = round(found.weights * (found.copies + found.state)) + found.activations
    flying = sum(in_flight(pipe.method.schedule, count))
    return Point(count, flying, seconds, found.copies, declared, counted, planned(pipe.plan()), resident)


def text_by_hand(slack: int, sizes: Sequence[int], seconds: dict[str, list[float]]) -> str:
    line, rows = f"by hand, slack {slack}", list[list[object]]()
    if len(sizes) > 1:
        line += f": power {power(sizes, [statistics.median(seconds[f'hand {n}']) for n in sizes]):.2f}"
    for n in sizes:
        hand, pb = seconds[f"hand {n}"], seconds[f"pb {n}"]
        ratios = [b / a for a, b in zip(hand, pb, strict=True)]
        flying = f"{slack * n * (n - 1) // 2 + n:,}"
        rows.append([n, flying, spread([1e6 * t / TURN / n for t in hand], ".1f"), spread(ratios)])
    return "\n".join([line, "", table(["stages", "in flight", "µs", "`pb` over that"], rows, left=())])


def planned(plan: Plan) -> int:
    """Bytes of everything that training holds on the device."""
    return plan.device.total + sum(p.optimizer + p.method + p.older for p in plan.facts.stages.values())


def power(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """p of the law cost ∝ size^p that fits best: the slope of the least squares line through their logarithms."""
    xs, ys = [math.log(size) for size in sizes], [math.log(cost) for cost in costs]
    x, y = statistics.fmean(xs), statistics.fmean(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def text(name: str, slack: int, points: Sequence[Point]) -> str:
    lines = [f"`{name}`, slack {slack}"]
    if len(points) > 1:
        sizes = [p.stages for p in points]
        held = [p.resident for p in points if p.resident is not None and p.resident > 0]
        lines[0] += f": power {power(sizes, [p.cost for p in points]):.2f}"
        if len(held) == len(points):
            flying = power([p.flying for p in points], held)
            lines[0] += f"; resident memory by what is in flight: power {flying:.2f}"
    head = ["stages", "in flight", "µs", "copies", "declared", "MB counted", "planned", "resident", "KB in flight"]
    rows: list[list[object]] = []
    for p in points:
        each = [1e6 * seconds / TURN / p.stages for seconds in p.seconds]
        beyond = None if p.resident is None else (p.resident * 1e6 - p.planned) / 1e3 / max(1, p.flying)
        of_memory = (p.copies, p.declared, p.counted / 1e6, p.planned / 1e6)
        told = ["–", "–"] if beyond is None else [f"{p.resident:.1f}", f"{beyond:.2f}"]
        rows.append([p.stages, f"{p.flying:,}", spread(each, ".1f"), *(f"{number:.2f}" for number in of_memory), *told])
    return "\n".join([*lines, "", table(head, rows, left=())])
