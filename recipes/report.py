"""Makes tables, pictures and one self-contained page from finished runs, wherever they were logged.

    pipeback report outputs/compare/digits
    pipeback report outputs/train/digits/pb-seed0 wandb/offline-run-20260101_120000-abcdefgh -o both.html
    pipeback report wandb:entity/project/group target=90% title="From the API" -o report.html

It takes run folders (with metrics.csv of CSVLogger or an offline W&B run) and folders of such folders. Beside
report.html, report_files holds every picture as PNG, every table as CSV, all tables in tables.md, and curves.csv and
stages.csv.
"""

from __future__ import annotations

import importlib.resources
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
import jinja2
import yaml
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig
from rich.console import Console

import pipeback
from pipeback.counts import counted
from pipeback.recipes import full_disk
from pipeback.recipes.command import literal, mistakes, plain, raising
from pipeback.recipes.command import quoted as quoted_option
from pipeback.recipes.provenance import command as typed
from pipeback.recipes.provenance import heading
from pipeback.recipes.reports import curves, options
from pipeback.recipes.reports.figures import Picture, pictures
from pipeback.recipes.reports.heat_maps import MOST, fields
from pipeback.recipes.reports.histories import WINDOWS
from pipeback.recipes.reports.kinds import grids
from pipeback.recipes.reports.runs import Method, gather
from pipeback.recipes.reports.seeds import once
from pipeback.recipes.reports.sheet import Sheet, markdown, save, terminal
from pipeback.recipes.reports.sources import Run, read
from pipeback.recipes.reports.style import Paint
from pipeback.recipes.reports.summary import divergence, glance, lead, unfinished
from pipeback.recipes.reports.tables import differences, tables
from pipeback.recipes.reports.target import Target
from pipeback.recipes.reports.target import target as to_reach
from pipeback.recipes.usage import usage

FACTS = ("date", "commit", "machine", "threads", "torch", "python", "pipeback")  # of a run: where it ran


def report(
    sources: Sequence[Path | str], out: Path, console: Console, title: str | None = None, target: Any = None
) -> None:
    """Write the page and, in <page>_files beside it, its pictures and numbers; print the tables.

    target: the value of the metric for the time to target, such as 0.9 or "90%"; None: 5 % short of the last value of
    the reference.
    """
    runs, notes = read(sources)
    runs, repeated = once(runs)
    methods = gather(runs)
    notes += [*repeated, *unfinished(methods)]
    goal = to_reach(methods, target)
    found = tables(methods, goal)
    if (differ := differences(methods)) is not None:
        found.append(differ)
    folder = out.with_name(f"{out.stem}_files")
    folder.mkdir(parents=True, exist_ok=True)
    for table in found:
        console.print(terminal(table))
        console.print(table.notes + "\n", style="dim", highlight=False, markup=False)
    for note in notes:
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
    head = heading(command(sources), options.shared(runs, FACTS))
    (folder / "tables.md").write_text("\n".join([head, *map(markdown, found)]), encoding="utf-8")
    for table in found:
        save(table, folder / f"{table.name}.csv")
    curves.save(methods, folder)
    paint = Paint(methods)
    shown = pictures(methods, goal, folder, paint)
    out.write_text(page(sources, methods, goal, found, shown, paint, notes, title), encoding="utf-8")
    last = f"{out}: the whole report; pictures and numbers in {folder}"
    console.print(last, highlight=False, markup=False, soft_wrap=True)


def page(
    sources: Sequence[Path | str], methods: Sequence[Method], goal: Target | None, found: Sequence[Sheet],
    shown: dict[str, Picture], paint: Paint, notes: Sequence[str], title: str | None,
) -> str:  # fmt: skip
    runs = [run for m in methods for run in m.runs]
    experiments = ", ".join(sorted({str(run.facts["experiment"]) for run in runs if run.facts.get("experiment")}))
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, loader=jinja2.FunctionLoader(template)
    )
    return environment.get_template("report.html.jinja").render(
        title=title or f"Pipelined backpropagation on {experiments or 'finished runs'}", lead=lead(methods),
        glance=glance(methods, goal), divergence=divergence(methods), metric=methods[0].metric, goal=goal,
        several=max(len(m.runs) for m in methods) > 1, tables={table.name: table for table in found},
        dotted=next((m.label for m in methods if m.label == "sgd" and not m.fate), ""),
        scheme=paint.scheme, windows=WINDOWS, pictures=shown,
        same_batches=len({run.facts.get("batch_size") for run in runs}) == 1,
        fresh=fields(methods, "gap")[1], unshown=max(0, len(fields(methods, "gap")[0]) - MOST), grids=grids(methods),
        made=made(sources, runs), notes=notes, config=config(runs),
    )  # fmt: skip


def template(name: str) -> str:
    return importlib.resources.files("pipeback.recipes").joinpath("templates", name).read_text("utf-8")


def made(sources: Sequence[Path | str], runs: Sequence[Run]) -> dict[str, str]:
    """Return facts of the page: the command, the sources, and where the runs ran, as they recorded it."""
    facts = options.shared(runs, ("runtime", *FACTS))
    names = {"threads": "torch threads", "pipeback": "pipeback of the runs"}
    return {
        "command": command(sources),
        "from": f"{counted(len(runs), 'run')} in {', '.join(map(str, sources))}",
        **{names.get(name, name): value for name, value in facts.items()},
        "pipeback of this page": pipeback.__version__,
    }


def config(runs: Sequence[Run]) -> dict[str, str] | None:
    """Return the resolved config of one run; a table shows what differs in the others."""
    run = next((run for run in runs if run.config), None)
    if run is None:
        return None
    return {"of": run.origin, "text": yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True)}


def command(sources: Sequence[Path | str]) -> str:
    """Return the command as it was typed, with the paths that `main` has put into the list `runs`."""
    return typed(part for word in sys.argv[1:] for part in (map(str, sources) if word.startswith("runs=") else [word]))


def console() -> Console:
    """Return a console that is wide enough for a table if the output goes to a file."""
    wide = Console()
    return wide if wide.is_terminal else Console(width=170)


def run(settings: DictConfig) -> None:
    with mistakes("report"):
        values = plain(settings)
        given = values["runs"]
        sources = [str(source) for source in (given if isinstance(given, list) else [given])]
        out = Path(values["out"]).expanduser() if values["out"] else beside(sources[0])
        if out.suffix != ".html":
            raise ValueError(f"out must name a page, such as report.html, but is {str(out)!r}")
        try:
            with full_disk.writing(out):
                report(sources, out, console(), values["title"], values["target"])
        except OSError as error:
            raise ValueError(full_disk.told(error)) from error


def beside(source: str) -> Path:
    """Return the default folder of the page: the first source, or the current folder for runs from the API."""
    if source.startswith("wandb:"):
        return Path("report.html")
    folder = Path(source).expanduser()
    return (folder if folder.is_dir() else folder.parent) / "report.html"


def main() -> None:
    """Run the command. Hydra has no positional arguments, so paths become the list `runs`, and -o becomes `out=`."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(usage(__doc__, "report"))
        return
    with mistakes("report"):
        sys.argv[1:] = as_options(sys.argv[1:])
    GlobalHydra.instance().clear()
    with mistakes("report"), raising():
        hydra.main(config_path="pkg://pipeback.conf", config_name="report", version_base="1.3")(run)()


def as_options(words: list[str]) -> list[str]:
    left, paths, rest = iter(words), [], []
    for word in left:
        if word in ("-o", "--out"):
            if (out := next(left, None)) is None:
                raise ValueError("-o names no file; write for example -o report.html")
            rest.append(f"out={literal(out)}")
        elif word.startswith("-") or ("=" in word and not Path(word).exists()):
            rest.append(quoted_option(word))
        else:
            paths.append(word)
    if not paths and not any(word.startswith(("runs=", "-")) for word in rest):
        raise ValueError(
            "which runs? Give run folders, or folders that hold them: pipeback report outputs/compare/digits"
        )
    return [*([f"runs=[{','.join(map(literal, paths))}]"] if paths else []), *rest]


if __name__ == "__main__":
    main()
