"""Measures what delays cost: trains a small model at delays 0, τ/2 and τ in the emulator, and fits the price of each.

    pipeback plan calibrate method=pb,pipedream,cerebras updates=2000 out=slow.json
    pipeback plan calibrate experiment=shakespeare method=pipedream optimizer=adamw model.depth=4 seeds=3
    pipeback plan gpt:13b devices=64xA100 calibrate=slow.json              # and plan with it

method=     flowing methods, at slack 0, 1 and 2, that is, at delays of 0, S − 1 − s and 2(S − 1 − s) at stage s of S
updates=    of the run without delay
most=       a run ends after so many times as many; one that is not there by then counts as if it were
seeds=      runs with so many seeds, whose updates are averaged; seed= is the first, 0
out=        the file for calibrate=

Data, model, task, optimizer and sizes of batches go to Hydra, as in `pipeback train`; the default is experiment=digits
model.depth=8. Rates are those of the experiment for every method; one that is tuned for its delay may pay less. The
target is the lowest smoothed loss of the run without delay, which gets there after so many updates itself; a run
without delay that diverges, or whose loss never falls, is refused.

    slow = updates to the target/updates without delay = 1 + κ·τ'        κ by least squares, τ' the effective delay
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import pipeback
from pipeback.planner.loss import effective_delay
from pipeback.planner.quantities import whole
from pipeback.planner.techniques import technique
from pipeback.recipes.output_files import writable
from pipeback.recipes.planning.hand import Training, configured, training
from pipeback.recipes.provenance import command, provenance

NUMBERS = {"updates": 2000, "most": 6, "seeds": 1}
DEFAULT = ("experiment=digits", "model.depth=8")
# options of `pipeback train` that nothing here would heed
UNHEEDED = ("method.", "epochs=", "max_steps=", "trainer", "callbacks", "logger", "ckpt_path=", "validate_every=",
            "label=", "sparsity", "optimizer.warmup=", "optimizer.decay=", "threads=")  # fmt: skip
SLACKS = (1, 2)
SMOOTH = 20  # a loss is smoothed over a part of so many of the run without delay


class Measured(NamedTuple):
    """A run at some delay. slow: how many times as many updates it took; at least so many, if it did not get there."""

    method: str
    slack: int
    delay: int
    effective: float
    slow: float
    reached: bool


def main(words: list[str], console: Console) -> None:
    """Measure, print and write. Raises ValueError for a mistake."""
    own = (*NUMBERS, "seed", "method", "out")
    ours = {w.partition("=")[0]: w.partition("=")[2] for w in words if w.partition("=")[0] in own}
    if unheeded := [w for w in words if w.lstrip("+~").startswith(UNHEEDED)]:
        raise ValueError(f"calibrate would not heed {unheeded[0]}; leave it out")
    rest = [w for w in words if w.partition("=")[0] not in ours]
    rest = rest if any(w.startswith("experiment=") for w in rest) else [*DEFAULT, *rest]
    numbers = {name: whole(name, ours.get(name, least)) for name, least in NUMBERS.items()}
    first, methods = whole("seed", ours.get("seed", 0), 0), ours.get("method", "pb,pipedream").split(",")
    for name in methods:
        if not technique(name).updates_each:
            raise ValueError(f"method={name} has no delay per micro-batch; give flowing ones, method=pb,pipedream")
    file = Path(ours["out"]).expanduser() if ours.get("out") else None
    if file:
        writable("out", file)
    torch.set_num_threads(1)
    seeds = range(first, first + numbers["seeds"])
    found = [one for name in methods for one in measured(name, rest, numbers, seeds, console)]
    slow = {name: kappa([one for one in found if one.method == name]) for name in methods}
    console.print(table(found))
    for name, price in slow.items():
        all_there = all(one.reached for one in found if one.method == name)
        more = "" if all_there else f", or more: not every run was there in {numbers['most']} times the updates"
        console.print(f"{name}: slow = 1 + {price:.4g}·τ'{more}", highlight=False)
    if file:
        facts = {**provenance(), "command": command(), "hydra": rest, **numbers, "seed": first}
        content = {"slow": slow, "runs": [one._asdict() for one in found], "made": facts}
        file.write_text(json.dumps(content, indent=1), encoding="utf-8")
        console.print(f"written: {file}; plan with calibrate={file}", highlight=False, markup=False, soft_wrap=True)


def measured(
    name: str, words: Sequence[str], numbers: dict[str, int], seeds: range, console: Console
) -> Iterator[Measured]:
    """A method at every delay, beside training without delay."""
    taken: dict[int, list[float]] = {slack: [] for slack in SLACKS}
    facts: dict[int, tuple[int, float]] = {}
    known: dict[int, bool] = {}
    for seed in seeds:
        values = configured([*words, f"seed={seed}"])
        window = max(1, numbers["updates"] // SMOOTH)
        without, _ = losses(training(values), create(name, 0), numbers["updates"], window)
        base, target = lowest(without, values["optimizer"])
        for slack in SLACKS:
            made = training(values)
            curve, delays = losses(made, create(name, slack), numbers["most"] * base, window, target)
            there = curve[-1][1] <= target
            took = curve[-1][0] if there else numbers["most"] * base
            known[slack] = known.get(slack, True) and there
            taken[slack].append(took / base)
            facts[slack] = max(delays), effective_delay(delays)
            ended = f"{took:,} updates" if there else f"not there after {curve[-1][0]:,} updates"
            ended = ended if math.isfinite(curve[-1][1]) else f"diverged within {curve[-1][0]:,} updates"
            told = f"{name}, delay {max(delays)}, seed {seed}: {ended}, {base:,} without delay"
            console.print(told, style="dim", highlight=False)
    for slack, each in taken.items():
        yield Measured(name, slack, *facts[slack], fmean(each), known[slack])


def lowest(curve: Sequence[tuple[int, float]], optimizer: Mapping[str, Any]) -> tuple[int, float]:
    """Updates to the lowest loss of a run without delay, and that loss. Raises ValueError if it does not train."""
    rate = optimizer.get("lr")
    lower = f"optimizer.lr={min(0.01, rate / 10):g}" if isinstance(rate, (int, float)) and rate > 0 else "optimizer.lr="
    if not math.isfinite(curve[-1][1]):
        raise ValueError(
            f"without delay the training diverges within {curve[-1][0]:,} updates, so that there is no loss to reach; "
            f"lower the rate, for example {lower}"
        )
    target = min(loss for _, loss in curve)
    base = next(done for done, loss in curve if loss <= target)
    if base == curve[0][0]:
        raise ValueError(
            f"without delay the loss does not fall below that of the first {base:,} updates, so that there is nothing "
            f"to reach; train longer, with updates={max(NUMBERS['updates'], 4 * base)}, or lower the rate, for example "
            f"{lower}"
        )
    return base, target


def create(name: str, slack: int) -> pipeback.Method:
    given = {"anneal": 100} if name == "pipemare" else {}
    return pipeback.methods.create(name, slack=slack, **given)


def losses(
    made: Training, method: pipeback.Method, most: int, window: int, target: float = -math.inf
) -> tuple[list[tuple[int, float]], list[int]]:
    """Train for so many updates, or until the smoothed loss is at the target, or no number any more.

    Returns updates done with the loss, smoothed over a window of updates, after each push; and the delays.
    """
    curve: list[tuple[int, float]] = []
    with pipeback.Pipeline(
        made.model, loss=made.loss, optimizer=made.optimizer, method=method, micro_batch_size=made.micro_batch_size
    ) as pipe:
        done, mean = 0, math.nan
        for x, y in batches(made):
            count = -(-len(y) // (made.micro_batch_size or len(y)))
            loss = float(pipe.push(x, y))
            done += count
            share = min(1.0, count / min(window, done))
            mean = loss if math.isnan(mean) else mean + share * (loss - mean)
            if done >= window or not math.isfinite(loss):
                curve.append((done, mean if math.isfinite(mean) else math.inf))
            if done >= most or not math.isfinite(loss) or (done >= window and mean <= target):
                break
        return curve, pipe.delays


def batches(made: Training) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Those of one epoch after the other."""
    while True:
        yield from made.loader()


def kappa(some: Sequence[Measured]) -> float:
    """The price per update of effective delay, by least squares through 1."""
    above = sum(one.effective * (one.slow - 1) for one in some)
    return max(0.0, above / sum(one.effective**2 for one in some))


def table(found: Sequence[Measured]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("method", "D at stage 0", "τ'", "updates, of those without delay"):
        shown.add_column(name, justify="left" if name == "method" else "right")
    for one in found:
        slow = f"{one.slow:.2f}" if one.reached else f"more than {one.slow:.2f}"
        shown.add_row(one.method, str(one.delay), f"{one.effective:.1f}", slow)
    return shown
