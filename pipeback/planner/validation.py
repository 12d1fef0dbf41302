"""Validation: published numbers beside predictions, row by row, and the error by source.

Nothing in it is fitted but where `fitted` says so; then the error of rows that were left out of the fit is told apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeback.planner.measured_runs import MeasuredRun, errors, measured_runs
from pipeback.planner.models import Model
from pipeback.planner.options import Option
from pipeback.planner.precisions import precision
from pipeback.planner.published import rows
from pipeback.planner.routines import routine
from pipeback.planner.simulation import simulate
from pipeback.planner.sweeps import StageTimes
from pipeback.planner.techniques import technique
from pipeback.planner.timing import kept

GIB = 2**30
NAMES = {"one_f_one_b": "1F1B", "zb_h1": "ZB-H1", "zb_h2": "ZB-H2", "interleaved": "interleaved"}
FITTED = {  # what of a table the constants were fitted on: rows of it
    "vtrain_multi": slice(None), "vtrain_single": slice(0, None, 10), "foundry_a100": slice(0, None, 2),
    "foundry_h100": slice(0, None, 2),
}  # fmt: skip


class Compared(NamedTuple):
    """A published number beside the predicted one."""

    what: str
    published: float
    predicted: float

    @property
    def off(self) -> float:
        """The relative error."""
        return self.predicted / self.published - 1


class Summary(NamedTuple):
    """The errors of a source; goal: what the planner claims."""

    source: str
    rows: int
    mean: float
    worst: float
    told: str
    goal: str
    met: bool | None  # None: nothing is claimed


def bubbles() -> list[Compared]:
    """Bubble rates of the zero-bubble paper, by the simulation at its measured times."""
    found = []
    for row in rows("zero_bubble"):
        f, b, w, comm = (float(row[name]) for name in ("f_ms", "b_ms", "w_ms", "comm_ms"))
        stages, m, chunks = int(row["stages"]), int(row["micro_batches"]), int(row["chunks"])
        for name, title in NAMES.items():
            v = chunks if name == "interleaved" else 1
            one = StageTimes(f / v, b / v, w / v, 0, comm, comm)
            rate = simulate(routine(name, stages, m, chunks=v), one).bubble
            what = f"{row['model']}, {stages} stages, {m} micro-batches, {title}"
            found.append(Compared(what, float(row[name]), rate))
    return found


def bubble_summaries(some: Sequence[Compared]) -> list[Summary]:
    """1F1B, ZB-H1 and ZB-H2 to 1e-4, interleaved to 0.004."""
    found = []
    for chunked, limit in ((False, 1e-4), (True, 0.004)):
        mine = [abs(one.predicted - one.published) for one in some if one.what.endswith("interleaved") == chunked]
        name = "zero bubble, interleaved" if chunked else "zero bubble, 1F1B, ZB-H1, ZB-H2"
        told = f"rates differ by {max(mine):.2g} at most"
        found.append(Summary(name, len(mine), sum(mine) / len(mine), max(mine), told, f"{limit:g}", max(mine) <= limit))
    return found


def described(run: MeasuredRun) -> str:
    """A run in a few words."""
    option = run.option
    chunks = f", {option.chunks} chunks" if option.chunks > 1 else ""
    return (
        f"{run.name}, {option.data} × {option.pipeline} × {option.tensor}{chunks}, {option.micro_batches} × "
        f"{option.micro_batch} of {run.model.context}, recompute={option.recompute}"
    )


def steps(table: str) -> list[Compared]:
    """Seconds per step of a table."""
    return [Compared(described(run), run.seconds, run.predicted()) for run in measured_runs(table)]


GOALS: dict[str, tuple[float, float]] = {  # largest mean error, largest error of a row
    "vtrain_multi": (0.08, 1.0), "vtrain_single": (0.08, 1.0), "megatron_a100": (0.05, 0.12),
}  # fmt: skip
CHOICE = 0.08  # what the predicted best option may cost beyond the best measured one, of vTrain's models


def step_summary(table: str, some: Sequence[Compared]) -> list[Summary]:
    """The error of a table, of rows that were left out of a fit, and of choosing by the prediction."""
    fitted = FITTED.get(table)
    inside = set(range(len(some))[fitted]) if fitted else set()
    outside = [one for n, one in enumerate(some) if n not in inside]
    found = []
    for mine, told in (
        (list(some), "all rows" if inside else "no row was fitted on"),
        (outside, "rows left out of the fit"),
    ):
        if not mine or (mine is outside and not inside):
            continue
        mean, worst = sum(abs(one.off) for one in mine) / len(mine), max(abs(one.off) for one in mine)
        limits = GOALS.get(table)
        goal = "" if limits is None else f"{limits[0]:.0%}" + (f", {limits[1]:.0%}" if limits[1] < 1 else "")
        met = None if limits is None else mean <= limits[0] and worst <= limits[1]
        found.append(Summary(table, len(mine), mean, worst, told, goal, met))
    if table == "vtrain_multi":
        runs = measured_runs(table)
        choices = errors(runs, [one.predicted for one in some]).choices
        told = "choosing costs " + ", ".join(f"{name} {cost:.1%}" for name, cost in choices.items())
        worst = max(choices.values())
        mean = sum(choices.values()) / len(choices)
        found.append(Summary(f"{table}, choices", len(choices), mean, worst, told, f"{CHOICE:.0%}", worst <= CHOICE))
    return found


def memory() -> list[Compared]:
    """Korthikanti's GiB per device: blocks' parameters and optimizer, and activations of the first worker."""
    found = []
    for row in rows("korthikanti_memory"):
        layers, width, heads, t, p, v, b, batch = (
            int(row[name])
            for name in ("layers", "width", "heads", "tensor", "pipeline", "chunks", "micro_batch", "batch")
        )
        block = Model.gpt(layers, width, heads).layers[1]
        option = Option(technique("interleaved" if v > 1 else "one_f_one_b"), 1, p, t, v, b, batch // b)
        flying = option.technique.routine(p, option.micro_batches, v).in_flight(0)
        states = block.parameters * layers / (p * t) * precision().total
        found.append(Compared(f"{row['name']}, parameters and optimizer", float(row["gib_parameters"]), states / GIB))
        for how in ("none", "selective"):
            size = b * flying * layers / (p * v) * kept(block, t, how)
            what = f"{row['name']}, activations, recompute={how}"
            found.append(Compared(what, float(row[f"gib_{how}"]), size / GIB))
    return found


def memory_summary(some: Sequence[Compared]) -> Summary:
    mean, worst = sum(abs(one.off) for one in some) / len(some), max(abs(one.off) for one in some)
    return Summary("korthikanti_memory", len(some), mean, worst, "GiB per device", "5% per row", worst <= 0.05)
