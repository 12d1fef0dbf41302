"""Tables, pictures and one self-contained page from the files of finished runs.

    pipeback report outputs/compare/digits
    python recipes/report.py outputs/compare/digits outputs/train/digits out=both.html title="Two folders"

Beside the page: accuracy.png, final.png, schedules.png, and the tables in Markdown (tables.md).
"""

from __future__ import annotations

import base64
import importlib.resources
import json
import math
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import hydra
import jinja2
import matplotlib
import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich import box
from rich.console import Console
from rich.table import Table

import pipeback
from pipeback.draw import grid, picture
from pipeback.recipes.train import Record, build, fail, resolved
from pipeback.timeline import bubble, timeline

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # the backend is chosen first
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, PercentFormatter

# Okabe and Ito's colours, told apart by colour-blind readers; within a panel no two methods share one
PANELS = {
    "Spike compensation and weight prediction": {
        "sc": "#E69F00",
        "lwp": "#56B4E9",
        "cerebras": "#D55E00",
        "lwp_w_sc": "#009E73",
    },
    "Stashing, prediction, rescheduling": {
        "pipedream": "#0072B2",
        "spectrain": "#CC79A7",
        "pipemare": "#B8860B",
    },
    "Update size above one": {
        "gpipe": "#0072B2",
        "one_f_one_b": "#E69F00",
        "pipedream_2bw": "#009E73",
    },
}
REFERENCES = {"sgd": "#000000", "pb": "#8C8C8C"}  # in every panel
SPARE = ["#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]


class Method:
    """The runs of one method, over seeds."""

    def __init__(self, label: str, runs: list[list[Record]]) -> None:
        self.label = label
        self.heads = [next(r for r in run if r["kind"] == "run") for run in runs]
        self.tests = [[r for r in run if r["kind"] == "test"] for run in runs]
        self.results = [next((r for r in run if r["kind"] == "result"), {"diverged": False}) for run in runs]
        self.head = self.heads[0]

    @property
    def base(self) -> str:
        return self.label.split(" ")[0]

    @property
    def diverged(self) -> int:
        return sum(result["diverged"] for result in self.results)

    @cached_property
    def is_equal_delay(self) -> bool:
        """Whether it runs at slack 2: by its counted delay, or because the run was made for that."""
        return self.label.endswith("slack=2") or self.head["delays"][0] == 2 * (self.head["stages"] - 1)

    def after(self, epoch: int, key: str = "accuracy") -> list[float]:
        """Held-out accuracy (or loss) after that epoch, one a seed that got there."""
        at = epoch * self.head["epoch_samples"]
        return [r[key] for tests in self.tests for r in tests if r["samples"] == at]

    def curve(self) -> tuple[list[int], list[list[float]]]:
        """Samples seen, and the accuracies measured there, one a seed."""
        seen: dict[int, list[float]] = {}
        for tests in self.tests:
            for r in tests:
                seen.setdefault(r["samples"], []).append(r["accuracy"])
        return sorted(seen), [seen[n] for n in sorted(seen)]

    def number(self, key: str) -> list[float]:
        return [result[key] for result in self.results if key in result]


def load(sources: Sequence[Path]) -> tuple[list[Method], list[Record]]:
    """The runs of these folders or files by method, and the configs found beside them."""
    files: list[Path] = []
    configs = []
    for source in sources:
        found = sorted(source.glob("runs/*.jsonl") or source.glob("*.jsonl")) if source.is_dir() else [source]
        if not source.exists():
            raise ValueError(f"there is no folder or file {source}; `pipeback compare out={source}` would make it")
        if not found:
            raise ValueError(f"there are no runs in {source}: neither runs/*.jsonl nor *.jsonl")
        files += found
        folder = found[0].parent
        for config in (folder / "config.yaml", folder.parent / "config.yaml"):
            if config.is_file():
                configs.append({"file": config.name, "text": config.read_text()})
                break
    runs: dict[str, list[list[Record]]] = {}
    order: dict[str, int] = {}
    for file in files:
        try:
            records = [json.loads(line) for line in file.read_text().splitlines() if line]
            head = next(r for r in records if r["kind"] == "run")
        except (json.JSONDecodeError, KeyError, TypeError, StopIteration, UnicodeDecodeError) as error:
            raise ValueError(f"{file} is not a file of a run") from error
        runs.setdefault(head["label"], []).append(records)
    known = [*REFERENCES, *(name for panel in PANELS.values() for name in panel)]
    for label in runs:
        base = label.split(" ")[0]
        order[label] = known.index(base) if base in known else len(known)
    return [Method(label, runs[label]) for label in sorted(runs, key=lambda name: (order[name], name))], configs


# -- tables ----------------------------------------------------------------------------------------------------------


def spread(values: Sequence[float], form: str, scale: float = 1.0) -> str:
    """Mean, and standard deviation over seeds where there are several."""
    if not values:
        return "–"
    if max(values) * scale >= 1000:
        form = ".0e"
    text = format(scale * statistics.fmean(values), form)
    return f"{text} ±{format(scale * statistics.stdev(values), form)}" if len(values) > 1 else text


class Column(NamedTuple):
    name: str
    cell: Callable[[Method], str]


def columns(methods: list[Method], equal: bool) -> list[Column]:
    def accuracy(m: Method, epoch: int) -> str:
        if m.diverged and epoch == epochs:
            return "diverged" if len(m.results) == 1 else f"{m.diverged} of {len(m.results)} diverged"
        return spread(m.after(epoch), ".1f", 100)

    epochs = max(m.head["samples"] // m.head["epoch_samples"] for m in methods)
    found = [
        Column("method", lambda m: m.label + (" †" if lost(m) else "")),
        Column("update\nsize", lambda m: str(m.head["update_size"])),
        Column("D at\nstage 0", lambda m: str(m.head["delays"][0])),
        *(Column(f"accuracy %\nepoch {e}", partial(accuracy, epoch=e)) for e in range(1, epochs + 1)),
        Column("loss", lambda m: spread(m.after(epochs, "loss"), ".3f" if len(m.results) == 1 else ".2f")),
    ]
    if equal:
        found.append(Column("weight\ncopies", lambda m: spread(m.number("copies")[:1], ".3g")))
        found.append(Column("activations\nMB", lambda m: spread(m.number("activations")[:1], ".3f", 1e-6)))
        return found
    return [
        *found,
        Column("samples/s", lambda m: format(statistics.fmean(m.number("samples_per_second") or [math.nan]), ",.0f")),
        Column("weight\ncopies", lambda m: spread(m.number("copies")[:1], ".3g")),
        Column("method\nstate", lambda m: spread(m.number("state")[:1], ".3g")),
        Column("activations\nMB", lambda m: spread(m.number("activations")[:1], ".3f", 1e-6)),
        Column("bubble\n%", lambda m: spread(m.number("bubble")[:1], ".1f", 100)),
    ]


def lost(method: Method) -> bool:
    """Whether its loss ends well above that of guessing: unstable, if not yet infinite."""
    losses = method.after(method.head["samples"] // method.head["epoch_samples"], "loss")
    return bool(losses) and statistics.fmean(losses) > 2 * math.log(method.head["classes"])


class Sheet(NamedTuple):
    name: str
    title: str
    head: list[str]
    rows: list[list[str]]
    notes: str


def tables(methods: list[Method]) -> list[Sheet]:
    seeds = max(len(m.results) for m in methods)
    over = f" Mean ± standard deviation over {seeds} seeds." if seeds > 1 else ""
    micro = next((int(n) for m in methods for n in m.number("bubble_micro_batches")), 0)
    stages = methods[0].head["stages"]
    notes = (
        f"Accuracy and loss on held-out data.{over} D: own updates between forward and gradient, at the first of "
        f"{stages} stages. Weight copies: live and kept versions or scratch, at the peak; method state, "
        f"in copies of the weights, is counted apart. Activations: of micro-batches in flight, at the peak. Bubble: "
        f"idle share of the schedule over {micro:,} micro-batches, one worker a stage, F and B of equal length. "
        f"Samples/s: in one process on one thread, two at a time unless jobs=1; they compare methods, not schedules."
    )
    main = [m for m in methods if not m.label.endswith("slack=2")]
    equal = [m for m in methods if m.is_equal_delay or m.base == "sgd"]
    found = [_table("methods", "Every method at its own delay", main or methods, False, notes)]
    if any(m.label.endswith("slack=2") for m in methods):
        text = f"All flowing methods at slack 2, that is, at the delay of pb; sgd for reference.{over}"
        found.append(_table("equal_delay", "At equal delay", equal, True, text))
    return found


def _table(name: str, title: str, methods: list[Method], equal: bool, notes: str) -> Sheet:
    shown = columns(methods, equal)
    if any(map(lost, methods)):
        notes += " † held-out loss ends above that of guessing: unstable at this rate with this delay."
    return Sheet(name, title, [c.name for c in shown], [[c.cell(m) for c in shown] for m in methods], notes)


def terminal(table: Sheet) -> Table:
    shown = Table(title=table.title, box=box.SIMPLE_HEAD, caption=table.notes, caption_justify="left", pad_edge=False)
    for n, name in enumerate(table.head):
        shown.add_column(name, justify="right" if n else "left", style="" if n else "bold", vertical="bottom",
                         overflow="fold", no_wrap=not n)  # fmt: skip
    for row in table.rows:
        shown.add_row(*(f"[red]{cell}" if "diverged" in cell else cell for cell in row))
    return shown


def markdown(table: Sheet) -> str:
    lines = [f"## {table.title}", "", "| " + " | ".join(table.head).replace("\n", " ") + " |"]
    lines.append("| --- |" + " ---: |" * (len(table.head) - 1))
    lines += ["| " + " | ".join(row) + " |" for row in table.rows]
    return "\n".join([*lines, "", table.notes, ""])


def console() -> Console:
    """Wide enough for a table when the output goes to a file."""
    wide = Console()
    return wide if wide.is_terminal else Console(width=150)


# -- pictures --------------------------------------------------------------------------------------------------------


def panels(methods: list[Method]) -> dict[str, dict[str, str]]:
    """Panel -> label -> colour, of the methods there are; those of no known family get a panel of their own."""
    there = {m.label for m in methods}
    found = {title: {k: c for k, c in panel.items() if k in there} for title, panel in PANELS.items()}
    known = {*REFERENCES, *(k for panel in PANELS.values() for k in panel)}
    others = [m.label for m in methods if m.label not in known and not m.label.endswith("slack=2")]
    found["Other methods"] = {k: SPARE[n % len(SPARE)] for n, k in enumerate(others)}
    found = {title: panel for title, panel in found.items() if panel}
    return found or {"": {}}


def colour(label: str) -> str:
    for panel in (REFERENCES, *PANELS.values()):
        if label in panel:
            return panel[label]
    return SPARE[sum(map(ord, label)) % len(SPARE)]


def draw_accuracy(methods: list[Method]) -> plt.Figure:
    """Accuracy over samples seen: a panel a family, sgd and pb in each, the band from the worst seed to the best."""
    shown = panels(methods)
    by_label = {m.label: m for m in methods}
    figure, axes = plt.subplots(1, len(shown), figsize=(4.6 * len(shown) + 0.6, 4.6), sharey=True, squeeze=False)
    lowest = 1.0
    for ax, (title, panel) in zip(axes[0], shown.items(), strict=True):
        both = {**{k: c for k, c in REFERENCES.items() if k in by_label}, **panel}
        for n, (label, line) in enumerate(both.items()):
            seen, values = by_label[label].curve()
            if not seen:
                continue
            mean = [statistics.fmean(v) for v in values]
            # dashes let a curve show through another that runs over it
            dash = (0, (4, 2)) if label == "one_f_one_b" else "-"
            ax.plot(seen, mean, color=line, lw=1.6 if label in REFERENCES else 2.0, ls=dash, label=label, zorder=2 + n)
            if any(len(v) > 1 for v in values) and not lost(by_label[label]):
                ax.fill_between(seen, [min(v) for v in values], [max(v) for v in values], color=line, alpha=0.13, lw=0)
            if lost(by_label[label]):  # it would flatten all others
                text = f"{label} is unstable"
                ax.text(0.98, 0.03, text, color=line, fontsize=9, ha="right", transform=ax.transAxes)
                continue
            lowest = min(lowest, *(m for m, at in zip(mean, seen, strict=True) if at >= 500 or at == seen[-1]))
        ax.set_title(title, fontsize=11, loc="left")
        ax.set_xlabel("samples seen")
        if ax.lines:
            ax.legend(loc="upper left", bbox_to_anchor=(0, -0.15), ncols=3, frameon=False, fontsize=9, handlelength=1.8)
        head = methods[0].head
        for epoch in range(1, head["samples"] // head["epoch_samples"] + 1):
            ax.axvline(epoch * head["epoch_samples"], color="#BBBBBB", lw=0.8, ls=":", zorder=0)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        ax.set_xlim(left=0)
        tidy(ax)
    axes[0][0].set_ylim(math.floor(10 * lowest) / 10 if lowest < 1 else 0.0, 1.0)
    axes[0][0].set_ylabel("held-out accuracy")
    axes[0][0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    figure.tight_layout()
    return figure


def draw_final(methods: list[Method]) -> plt.Figure:
    """From the accuracy after the first epoch (ring) to the last (dot), best first; whiskers are one deviation."""
    epochs = max(m.head["samples"] // m.head["epoch_samples"] for m in methods)
    kept = [m for m in methods if m.after(epochs) and not lost(m)]
    kept.sort(key=lambda m: statistics.fmean(m.after(epochs)))
    fallen = [m for m in methods if m not in kept]
    rows = fallen + kept
    figure, ax = plt.subplots(figsize=(8.6, 0.36 * len(rows) + 1.5))
    for y, m in enumerate(rows):
        line = colour(m.base)
        if m in fallen:
            text = "diverged" if m.diverged else "unstable"
            ax.text(0.01, y, text, color="#B00020", va="center", transform=ax.get_yaxis_transform())
            continue
        last, first = m.after(epochs), m.after(1)
        mean = statistics.fmean(last)
        deviation = statistics.stdev(last) if len(last) > 1 else 0.0
        if first and epochs > 1:
            start = statistics.fmean(first)
            ax.plot([start, mean], [y, y], color=line, lw=2.5, alpha=0.35, solid_capstyle="butt")
            ax.plot(start, y, "o", mfc="white", mec=line, mew=1.6, ms=6.5)
        ax.errorbar(mean, y, xerr=deviation or None, fmt="o", color=line, ms=7.5, capsize=3, lw=1.3)
        ax.text(1.01, y, spread(last, ".1f", 100), va="center", fontsize=9.5, transform=ax.get_yaxis_transform())
    reference = [m for m in kept if m.label == "sgd"]
    if reference:
        ax.axvline(statistics.fmean(reference[0].after(epochs)), color="black", lw=0.9, ls=":", zorder=0)
    ax.set_yticks(range(len(rows)), [m.label for m in rows])
    ax.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.set_ylim(-0.6, len(rows) - 0.4)
    after = "after epoch 1 (ring) and " if epochs > 1 else ""
    ax.set_title(f"Held-out accuracy {after}after epoch {epochs} (dot and number)", fontsize=11, loc="left")
    tidy(ax, grid="x")
    figure.tight_layout()
    return figure


def tidy(ax: Axes, grid: str = "y") -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis=grid, color="#E5E5E5", lw=0.8)  # type: ignore[arg-type]
    ax.set_axisbelow(True)


SHAPES = ("gpipe", "one_f_one_b", "pipedream", "pb")  # one method of each kind of schedule


def schedules(stages: int = 4, micro_batches: int = 8) -> list[tuple[str, Any]]:
    """The kinds of schedule, small enough to draw; flushes of `stages` micro-batches."""
    options: dict[str, Record] = {"gpipe": {"micro_batches": stages}, "one_f_one_b": {"micro_batches": stages}}
    titles = {
        "gpipe": "gpipe: fill, drain, update",
        "one_f_one_b": "one_f_one_b: early backwards, the same bubble",
        "pipedream": "slack 1 (pipedream, spectrain): never flushed, D = S − 1 − s",
        "pb": "slack 2 (pb, sc, lwp, cerebras, pipemare): never flushed, D = 2(S − 1 − s)",
    }
    return [(titles[name], build({"name": name, **options.get(name, {})}).schedule) for name in SHAPES]


def draw_schedules(stages: int = 4, micro_batches: int = 8) -> plt.Figure:
    found = schedules(stages, micro_batches)
    figure, axes = plt.subplots(len(found), 1, figsize=(10, 1.75 * len(found) + 0.4), squeeze=False)
    timelines = [list(timeline(schedule, stages, micro_batches)) for _, schedule in found]
    span = max(float(slot.end) for slots in timelines for slot in slots)
    for n, (ax, (title, _), slots) in enumerate(zip(axes[:, 0], found, timelines, strict=True)):
        picture(slots, ax=ax, until=span)
        ax.set_title(f"{title}   (bubble here {bubble(slots):.0%})", fontsize=10.5, loc="left")
        ax.set_xlabel("")
        ax.set_xticks(range(0, int(span) + 1, 4))
        if n and (legend := ax.get_legend()):
            legend.remove()  # one for all
    axes[-1, 0].set_xlabel("time, in forwards")
    figure.tight_layout()
    return figure


# -- the page --------------------------------------------------------------------------------------------------------


def machine() -> Record:
    return {
        "pipeback": pipeback.__version__ if hasattr(pipeback, "__version__") else "from source",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "threads": "one torch thread a run",
    }


def report(sources: Sequence[Path], out: Path, console: Console, title: str | None = None) -> None:
    """Write the page, the pictures and the tables, and print the tables."""
    methods, configs = load(sources)
    found = tables(methods)
    out.parent.mkdir(parents=True, exist_ok=True)
    for table in found:
        console.print(terminal(table))
        console.print()
    out.with_name("tables.md").write_text("\n".join(map(markdown, found)))
    pictures = {}
    with plt.rc_context({"font.family": "DejaVu Sans", "figure.dpi": 110, "savefig.dpi": 150}):
        for name, draw in (
            ("accuracy", lambda: draw_accuracy(methods)),
            ("final", lambda: draw_final(methods)),
            ("schedules", draw_schedules),
        ):
            file, figure = out.with_name(f"{name}.png"), draw()
            figure.savefig(file, bbox_inches="tight")
            plt.close(figure)
            pictures[name] = "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode()
    grids = [(name, grid(schedule, 4, 8)) for name, schedule in schedules()]
    source = importlib.resources.files("pipeback.recipes").joinpath("templates", "report.html.jinja").read_text()
    page = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(source)
    head = methods[0].head
    out.write_text(
        page.render(
            title=title or f"Pipelined backpropagation on {experiment(configs)}",
            head=head, seeds=max(len(m.results) for m in methods), tables=found, pictures=pictures, grids=grids,
            configs=configs, machine=machine(), sources=[str(s) for s in sources],
        )
    )  # fmt: skip
    console.print(f"{out}: the whole report; beside it the pictures and tables.md", highlight=False, soft_wrap=True)


def experiment(configs: list[Record]) -> str:
    names = {str(OmegaConf.create(c["text"]).get("name", "")) for c in configs}
    return ", ".join(sorted(names - {""})) or "finished runs"


@hydra.main(config_path="pkg://pipeback.conf", config_name="report", version_base="1.3")
def _main(config: DictConfig) -> None:
    try:
        values = resolved(config)
        sources = [Path(run).expanduser() for run in values["runs"]]
        beside = sources[0] if sources[0].is_dir() else sources[0].parent
        out = Path(values["out"]) if values["out"] else beside / "report.html"
        report(sources, out, console(), values["title"])
    except (ValueError, OmegaConfBaseException) as error:
        fail("report", error)


def main() -> None:
    """Hydra knows no positional arguments: paths become the list `runs`."""
    paths = [a for a in sys.argv[1:] if "=" not in a and not a.startswith("-")]
    if paths:
        quoted = ",".join("'" + path.replace("\\", "\\\\").replace("'", "\\'") + "'" for path in paths)
        sys.argv = [a for a in sys.argv if a not in paths] + [f"runs=[{quoted}]"]
    elif not any(a.startswith(("runs=", "-")) for a in sys.argv[1:]):
        sys.exit("pipeback report: which runs? Give folders or .jsonl files: pipeback report outputs/compare/digits")
    _main()


if __name__ == "__main__":
    main()
