"""Stages: the stages of a model as a table in the terminal or as a picture, for `pipeback draw model=...`."""

from __future__ import annotations

import csv
import inspect
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn
from torch.nn.functional import cross_entropy

import pipeback
from pipeback.byte_sizes import written
from pipeback.counts import counted
from pipeback.draw.worker_bands import COLOURS, INK
from pipeback.pipeline.breakdown import StageRow
from pipeback.recipes.foreign import WHERE, build
from pipeback.recipes.foreign.case import Case
from pipeback.recipes.markdown import table as in_markdown
from pipeback.recipes.provenance import command, load, provenance

TEXTS = (".txt", ".md", ".csv")
REPEATS = 31  # of F and B, in rounds over all stages
BAR = 8  # characters of the largest bar
# facts of data for the models of conf/model, by a parameter that such models take
FACTS: dict[str, dict[str, int]] = {
    "inputs": {"inputs": 64, "classes": 10},
    "channels": {"channels": 3, "classes": 10, "size": 32},
    "vocabulary": {"vocabulary": 65, "context": 64},
}


def names() -> list[str]:
    """Return the names of the models of recipes/foreign and of conf/model."""
    ours = (file.name for file in (resources.files("pipeback.conf") / "model").iterdir())
    return [*WHERE, *sorted(name.removesuffix(".yaml") for name in ours if name.endswith(".yaml"))]


def case(name: str) -> Case:
    """Return a model of either kind, with its default options, and micro-batches for it."""
    if name in WHERE:
        return build(name)
    if name not in names():
        from pipeback.recipes.command import suggestion

        raise ValueError(f"model={name} is unknown{suggestion(name, names())}; there are {', '.join(names())}")
    from omegaconf import OmegaConf

    from pipeback.recipes.schemas import named

    text = (resources.files("pipeback.conf") / "model" / f"{name}.yaml").read_text(encoding="utf-8")
    options: Any = OmegaConf.to_container(OmegaConf.create(text))
    make = named("model", options.pop("name"))
    taken = inspect.signature(make).parameters
    kind = next(kind for kind in FACTS if kind in taken)
    facts = {key: value for key, value in FACTS[kind].items() if key in taken}
    torch.manual_seed(0)
    model: nn.Module = make(**{key: value for key, value in options.items() if key not in facts}, **facts)

    def batch(generator: torch.Generator) -> tuple[Any, Any]:
        if kind == "vocabulary":
            tokens = torch.randint(facts["vocabulary"], (1, facts["context"] + 1), generator=generator)
            return tokens[:, :-1], tokens[:, 1:]
        shape = (3, facts["size"], facts["size"]) if kind == "channels" else (facts["inputs"],)
        return torch.randn(1, *shape, generator=generator), torch.randint(facts["classes"], (1,), generator=generator)

    return Case(model, batch, lambda output, y: cross_entropy(output.flatten(0, -2), y.flatten()))


def show(name: str, stages: Any, method: pipeback.Method, out: Sequence[str]) -> None:
    """Split the model, rehearse a micro-batch and print the table; files get it, too, as text or as a picture."""
    torch.set_num_threads(1)
    chosen = case(name)
    x, y = chosen.batch(torch.Generator().manual_seed(0))
    pipe = pipeback.Pipeline(
        chosen.model, loss=chosen.loss, optimizer=lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
        method=method, stages=stages, example=x,
    )  # fmt: skip
    rows = pipe.breakdown(x, y, repeats=REPEATS)
    title = f"{name}: {counted(len(rows), 'stage')} by {pipe.split.rung}; D of {method!r}"
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 150
    console.print(title, style="bold")
    console.print(table(rows))
    for letter, reason in pipe.split.reasons.items():
        console.print(f"not {letter}: {escape(reason)}", style="dim")
    for file in out:
        save(rows, title, Path(file))
        console.print(f"written: {file}")


def save(rows: Sequence[StageRow], title: str, path: Path) -> None:
    if path.suffix.lower() == ".md":
        path.write_text(f"{title}\n\n{markdown(rows)}\n", encoding="utf-8")
    elif path.suffix.lower() == ".csv":
        numbers(rows, title, path)
    elif path.suffix.lower() in TEXTS:
        with path.open("w", encoding="utf-8") as file:
            console = Console(file=file, width=150, highlight=False)
            console.print(title)
            console.print(table(rows))
    else:
        picture(rows, title, path)


def numbers(rows: Sequence[StageRow], title: str, path: Path) -> None:
    """Write the numbers as CSV, after lines with # that say how they came about."""
    facts = {**provenance(), "intra-op threads": torch.get_num_threads(), "load": load()}
    wide = sum(1 for row in rows if spread(row)[1] - spread(row)[0] > 0.1 * row.seconds)
    with path.open("w", newline="", encoding="utf-8") as file:
        file.write(f"# {command()}\n# {title}\n")
        told = ", ".join(f"{name}: {value}" for name, value in facts.items() if value is not None)
        file.write(f"# {told}\n")
        file.write(f"# seconds: the median of {REPEATS} repeats of F and B; quartiles of {wide} of {len(rows)} stages "
                   "lie more than 10 % of it apart\n")  # fmt: skip
        lines = csv.writer(file)
        lines.writerow([name for name in StageRow._fields if name != "times"] + ["first_quartile", "third_quartile"])
        for row in rows:
            lines.writerow([f"{n:.4g}" if isinstance(n, float) else n for n in (*row[:-1], *spread(row))])


def spread(row: StageRow) -> tuple[float, float]:
    """Return the first and the third quartile of the seconds."""
    if len(row.times) < 2:
        return row.seconds, row.seconds
    low, _, high = quantiles(row.times, n=4, method="inclusive")
    return low, high


HEADS = ("stage", "name", "layers", "parameters", "FLOPs F", "FLOPs B", "ms F+B", "quartiles", "", "activations", "D")


def cells(row: StageRow, most: float) -> list[str]:
    low, high = spread(row)
    return [
        str(row.stage), row.name, row.layers, f"{row.parameters:,}", flops(row.forward_flops),
        flops(row.backward_flops), f"{row.seconds * 1e3:.2f}", f"{low * 1e3:.2f}–{high * 1e3:.2f}",
        "▇" * round(BAR * row.seconds / most), written(row.activations), str(row.delay),
    ]  # fmt: skip


def total(rows: Sequence[StageRow]) -> list[str]:
    return [
        "", "all", "", f"{sum(r.parameters for r in rows):,}", flops(sum(r.forward_flops for r in rows)),
        flops(sum(r.backward_flops for r in rows)), f"{sum(r.seconds for r in rows) * 1e3:.2f}", "", "",
        written(sum(r.activations for r in rows)), "",
    ]  # fmt: skip


def flops(number: int) -> str:
    """1234567 -> 1.23 M; 0 -> a dash."""
    if not number:
        return "–"
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size:
            return f"{f'{number / size:#.3g}'.rstrip('.')} {unit}"
    return str(number)


def table(rows: Sequence[StageRow]) -> Table:
    shown, most = Table(box=box.SIMPLE_HEAD, pad_edge=False), max(row.seconds for row in rows)
    for head in HEADS:
        shown.add_column(head, justify="left" if head in ("name", "layers", "") else "right", no_wrap=head != "layers")
    for row in rows:
        shown.add_row(*map(escape, cells(row, most)), end_section=row is rows[-1])
    shown.add_row(*total(rows), style="bold")
    return shown


def markdown(rows: Sequence[StageRow]) -> str:
    most, kept = max(row.seconds for row in rows), [n for n, head in enumerate(HEADS) if head]
    lines = [[line[n] for n in kept] for line in (*(cells(row, most) for row in rows), total(rows))]
    return in_markdown([HEADS[n] for n in kept], lines, left=(1, 2))


def picture(rows: Sequence[StageRow], title: str, path: Path) -> None:
    """Draw a bar per stage in every panel; the first stage is on top."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import EngFormatter, MaxNLocator

    kept = [r.activations for r in rows]
    unit, size = ("MiB", 2**20) if max(kept) >= 2**20 else ("KiB", 2**10)
    grey, blue, orange = COLOURS["U"], COLOURS["F"], COLOURS["B"]
    panels: list[tuple[str, list[tuple[Sequence[float], str, str]]]] = [
        ("parameters", [([r.parameters for r in rows], grey, "")]),
        ("FLOPs", [([r.forward_flops for r in rows], blue, "F"), ([r.backward_flops for r in rows], orange, "B")]),
        (f"ms, F+B: median of {REPEATS}", [([r.seconds * 1e3 for r in rows], grey, "")]),
        (f"activations, {unit}", [([number / size for number in kept], blue, "")]),
        ("D, updates", [([r.delay for r in rows], orange, "")]),
    ]
    places = range(len(rows))
    figure, axes = plt.subplots(
        1, len(panels) + 1, sharey=True, figsize=(13.5, 1.3 + 0.24 * len(rows)), layout="constrained",
        width_ratios=[1.25, *[1] * len(panels)],
    )  # fmt: skip
    for place, row in zip(places, rows, strict=True):
        axes[0].text(0, place, short(row.layers, 32, end=False), va="center", fontsize=8.5, color="#66707A")
    axes[0].set_title("layers with weights", loc="left", fontsize=10, color=INK)
    axes[0].set_xticks([])
    axes[0].spines[:].set_visible(False)
    for ax, (head, series) in zip(axes[1:], panels, strict=True):
        left = [0.0] * len(rows)
        for values, colour, name in series:
            ax.barh(places, values, left=left, color=colour, label=name or None, height=0.72)
            left = [a + b for a, b in zip(left, values, strict=True)]
        if head.startswith("ms"):  # whiskers, from the first quartile to the third
            for place, row in zip(places, rows, strict=True):
                ax.plot([1e3 * end for end in spread(row)], [place] * 2, color="white", lw=3.2, solid_capstyle="butt")
                ax.plot([1e3 * end for end in spread(row)], [place] * 2, color=INK, lw=1.3, solid_capstyle="butt")
        if len(series) > 1:
            ax.legend(loc="lower right", bbox_to_anchor=(1, 0.99), borderaxespad=0, frameon=False, fontsize=8.5,
                      ncols=len(series), handlelength=1)  # fmt: skip
        ax.set_title(head, loc="left", fontsize=10, color=INK)
        ax.xaxis.set_major_locator(MaxNLocator(3))
        if head in ("parameters", "FLOPs"):
            ax.xaxis.set_major_formatter(EngFormatter(sep=" "))
        ax.tick_params(labelsize=8.5, colors=INK, length=3)
        ax.grid(axis="x", color="#E6E9ED", linewidth=0.8)
        ax.set_axisbelow(True)
        ax.spines[["top", "right", "left"]].set_visible(False)
    for ax in axes:
        ax.tick_params(axis="y", length=0, labelsize=8.5, colors=INK)
    axes[0].set_yticks(places, [f"{short(row.name)}  {row.stage}" for row in rows])
    axes[0].set_ylim(len(rows) - 0.5, -0.5)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11.5, color=INK)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def short(text: str, most: int = 34, end: bool = True) -> str:
    """Return the end of a text that is too long (of a path it says most), or its beginning."""
    if len(text) <= most:
        return text
    return f"…{text[-most + 1 :]}" if end else f"{text[: most - 1]}…"
