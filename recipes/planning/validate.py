"""Prints published measurements beside the planner's predictions, and what this machine measures beside them.

    pipeback plan validate                       # all sections, in some minutes
    pipeback plan validate published             # those that measure nothing here
    pipeback plan validate ranks repeats=25      # sections: those below
    pipeback plan validate steps rows=mine.csv   # runs of your own (columns: pipeback/planner/measured_runs.py)

bubbles     rates of the zero-bubble paper, by the simulation
steps       seconds per step, by the cost model
memory      GiB per device of Korthikanti et al.
search      CPU seconds of a search over 1,024 devices
simulation  CPU seconds of a simulation of 1,000 stages and 10,000 micro-batches
pipelines   bytes of real pipelines, for every method whose backward is whole, beside the planner's
ranks       gpipe, one_f_one_b and pb on two processes, beside the simulation of costs that one process has
streaming   from how many micro-batches on streaming hides here, beside the edge that is predicted

Constants were fitted on vTrain's rows (`default`) and on every second row of llm-foundry's (`fsdp_a100`, `fsdp_h100`).
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from pipeback.planner.candidates import Fixed
from pipeback.planner.measured_runs import TABLES
from pipeback.planner.published import source
from pipeback.planner.quantities import whole
from pipeback.planner.routines import routine
from pipeback.planner.search import search
from pipeback.planner.simulation import simulate
from pipeback.planner.sweeps import StageTimes
from pipeback.planner.validation import (
    Compared,
    Summary,
    bubble_summaries,
    bubbles,
    described,
    memory,
    memory_summary,
    step_summary,
    steps,
)
from pipeback.recipes.benches.turns import spread
from pipeback.recipes.markdown import table
from pipeback.recipes.provenance import command, heading, load, provenance

PUBLISHED = ("bubbles", "steps", "memory", "search", "simulation")
LARGE = 1000, 10_000  # stages, micro-batches
HERE = ("pipelines", "ranks", "streaming")
LONG = "vtrain_single"  # has too many rows to be printed one by one
SEARCHED = (
    ("gpt:13b", "1024xA100"), ("gpt:175b", "1024xA100"), ("gpt:1t", "1024xA100"), ("llama:405b", "1024xH100"),
)  # fmt: skip


def main(words: list[str], console: Console) -> None:
    """Print Markdown. Raises ValueError for a mistake."""
    chosen, repeats, rows = parsed(words)
    print(heading(command(), {**provenance(), "threads": 1, "load": load()}))
    sections: dict[str, Callable[[], list[Summary]]] = {
        "bubbles": of_bubbles, "steps": lambda: of_steps(rows), "memory": of_memory, "search": of_search,
        "simulation": of_simulation, "pipelines": of_pipelines,
        "ranks": lambda: of_ranks(repeats), "streaming": of_streaming,
    }  # fmt: skip
    found = []
    for name in chosen:
        print(flush=True)
        found += sections[name]()
    print("\n### In short\n")
    head = ["source", "rows", "mean error", "worst", "of what", "goal", "met"]
    print(table(head, [summed(one) for one in found], left=(0, 4)), flush=True)


def parsed(words: Sequence[str]) -> tuple[list[str], int, str]:
    chosen: list[str] = []
    repeats, rows = 15, ""
    for word in words:
        name, given, value = word.partition("=")
        if name == "repeats" and given:
            repeats = whole("repeats", value)
        elif name == "rows" and given:
            rows = value
        elif word == "published":
            chosen += PUBLISHED
        elif word == "here":
            chosen += HERE
        elif word in (*PUBLISHED, *HERE):
            chosen.append(word)
        else:
            raise ValueError(f"{word!r} is no section; there are {', '.join((*PUBLISHED, *HERE))}, published and here")
    return list(dict.fromkeys(chosen)) or [*PUBLISHED, *HERE], repeats, rows


def summed(one: Summary) -> list[str]:
    met = "" if one.met is None else "yes" if one.met else "no"
    form = ".1e" if one.source.startswith("zero bubble") else ".1%"
    off = ["", ""] if one.source in ("search", "simulation") else [f"{one.mean:{form}}", f"{one.worst:{form}}"]
    return [one.source, f"{one.rows:,}", *off, one.told, one.goal, met]


def compared(some: Sequence[Compared], form: str) -> str:
    rows = [[one.what, f"{one.published:{form}}", f"{one.predicted:{form}}", f"{one.off:+.1%}"] for one in some]
    return table(["", "published", "predicted", "error"], rows)


# -- published ---------------------------------------------------------------------------------------------------------


def of_bubbles() -> list[Summary]:
    print(f"### Bubbles\n\n{source('zero_bubble')}\n")
    found = bubbles()
    rows = []
    for one in found:
        difference = f"{one.predicted - one.published:+.1e}"
        rows.append([one.what, f"{one.published:.4f}", f"{one.predicted:.4f}", difference])
    print(table(["", "published", "simulated", "difference"], rows))
    return bubble_summaries(found)


def of_steps(own: str = "") -> list[Summary]:
    if own:
        from pipeback.recipes.planning.fit import own as runs_in

        mine = [Compared(described(one), one.seconds, one.predicted()) for one in runs_in(own)]
        print(f"### Steps: {Path(own).name}\n\n{compared(mine, '.4g')}")
        return step_summary(Path(own).name, mine)
    found = []
    for name in TABLES:
        some = steps(name)
        print(f"### Steps: {name}\n\n{source(name)}\n")
        print(compared(some, ".4g") if name != LONG else grouped(some))
        print(flush=True)
        found += step_summary(name, some)
    return found


def grouped(some: Sequence[Compared]) -> str:
    """A row per width and way to share the devices out, where there are too many rows."""
    groups: dict[str, list[float]] = {}
    for one in some:
        width, ways = one.what.split(", ")[:2]
        groups.setdefault(f"{width}, {ways}", []).append(one.off)
    rows = [
        [name, str(len(off)), f"{statistics.fmean(map(abs, off)):.1%}", f"{statistics.fmean(off):+.1%}",
         f"{max(map(abs, off)):.1%}"]
        for name, off in sorted(groups.items())
    ]  # fmt: skip
    return table(["data × pipeline × tensor", "rows", "mean error", "bias", "worst"], rows)


def of_memory() -> list[Summary]:
    print(f"### Memory\n\n{source('korthikanti_memory')}\n")
    found = memory()
    print(compared(found, ".2f"))
    return [memory_summary(found)]


def of_search() -> list[Summary]:
    print("### Search\n\nAll options of 1,024 devices, with every store; CPU seconds of one process.\n")
    rows, longest, asked = [], 0.0, Fixed(stores=("device", "host", "disk"))
    for model, devices in SEARCHED:
        begin = time.process_time()
        found = search(model, devices, tokens=300e9, fixed=asked)
        took = time.process_time() - begin
        longest = max(longest, took)
        rows.append([f"{model} on {devices}", str(len(found)), f"{took:.2f}"])
    print(table(["", "options ranked", "seconds"], rows))
    return [Summary("search", len(rows), 0.0, 0.0, f"{longest:.2f} s at most", "2 s", longest < 2)]


def of_simulation() -> list[Summary]:
    stages, micro_batches = LARGE
    told = f"{stages:,} stages, no two of them alike, and {micro_batches:,} micro-batches; CPU seconds of one process."
    print(f"### Simulation\n\n{told}\n")
    times = [StageTimes(1 + n % 7 / 10, 1 + n % 5 / 10, 1 + n % 3 / 10, 5, n % 11 / 100, 0.05) for n in range(stages)]
    rows, longest = [], 0.0
    for name in ("fill_drain", "one_f_one_b", "zb_h1", "zb_h2", "interleaved", "flowing"):
        chunks = 2 if name == "interleaved" else 1
        begin = time.process_time()
        simulate(routine(name, stages // chunks, micro_batches, chunks=chunks), times)
        took = time.process_time() - begin
        longest = max(longest, took)
        rows.append([f"`{name}`", f"{took:.2f}"])
    print(table(["schedule", "seconds"], rows))
    return [Summary("simulation", len(rows), 0.0, 0.0, f"{longest:.2f} s at most", "5 s", longest < 5)]


# -- measured here -----------------------------------------------------------------------------------------------------


def of_pipelines() -> list[Summary]:
    from pipeback.recipes.planning.pipelines import measured

    told = "Bytes of five stages of three kinds, trained in one process, and the planner's; of whole backwards alone."
    print(f"### Pipelines\n\n{told}\n")
    found = measured()
    rows = []
    for one in found:
        copies = [f"{number:.3f}" for number in (one.copies, one.planned_copies)]
        states = [f"{number:g}" for number in (one.state, one.planned_state)]
        sizes = [f"{number:,.0f}" for number in (one.activations, one.planned_activations)]
        rows.append([f"`{one.method}`", *copies, *states, *sizes])
    print(table(["method", "copies", "planned", "state", "planned", "activations", "planned"], rows))
    off = [abs(one.planned_activations / one.activations - 1) for one in found]
    off += [abs(one.planned_copies / one.copies - 1) for one in found]
    mean, worst = statistics.fmean(off), max(off)
    return [Summary("pipelines", len(found), mean, worst, "bytes of these methods", "1%", worst <= 0.01)]


def of_ranks(repeats: int) -> list[Summary]:
    from pipeback.recipes.planning.ranks import CASE, FLUSH, METHODS, measured, middle, ratios

    told = (
        f"{CASE.layers} transformer layers of width {CASE.width} on two processes, micro-batches of {CASE.samples} × "
    )
    told += f"{CASE.length}, flushes of {FLUSH}; medians, in brackets the smallest and the largest."
    print(f"### Ranks\n\n{told}", flush=True)
    rounds = measured(repeats)
    others = max(one.others for one in rounds)
    print(
        f"Of {len(rounds) // len(METHODS)} rounds, in which other processes took at most {others:.0%} of the cores.\n"
    )
    over = ratios(rounds)
    rows = []
    for name in METHODS:
        guess, took = (f"{middle(rounds, name, what):.2f}" for what in ("predicted", "measured"))
        rows.append([f"`{name}`", guess, took, spread(over[name])])
    print(table(["method", "predicted ms/micro-batch", "measured", "measured/predicted"], rows))
    off = [abs(statistics.median(over[name]) - 1) for name in METHODS]
    mean, worst = statistics.fmean(off), max(off)
    return [Summary("ranks", len(off), mean, worst, "time on two processes", "10%", worst <= 0.1)]


def of_streaming() -> list[Summary]:
    from pipeback.recipes.planning.edges import SAMPLES, STAGES, WIDTH, measured

    print(f"### Streaming\n\n{STAGES} linear stages of width {WIDTH} and AdamW, micro-batches of {SAMPLES}: the fewest "
          "micro-batches per push with at most 5 % of waiting.\n")  # fmt: skip
    found = measured()
    rows = [[one.store, str(one.lanes), str(one.dry_run), str(one.measured)] for one in found]
    print(table(["store", "planner", "dry run", "measured"], rows))
    off = [abs(one.lanes / one.measured - 1) for one in found if one.lanes and one.measured]
    if not off:
        return []
    return [Summary("streaming", len(off), statistics.fmean(off), max(off), "lower edge of the window", "", None)]


if __name__ == "__main__":
    main(sys.argv[1:], Console())
