"""Tables, pictures and one self-contained page from the files of finished runs.

    pipeback report outputs/compare/digits
    python recipes/report.py outputs/compare/digits outputs/train/digits out=both.html title="Two folders"

Beside the page: accuracy.png, final.png, schedules.png, and the tables in Markdown (tables.md).
"""

from __future__ import annotations

import base64
import importlib.resources
import os
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import hydra
import jinja2
import torch
from matplotlib import pyplot as plt
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

import pipeback
from pipeback.draw import grid
from pipeback.recipes.plots import MICRO_BATCHES, STAGES, STYLE, draw_accuracy, draw_final, draw_schedules, schedules
from pipeback.recipes.runs import Method, load
from pipeback.recipes.tables import markdown, tables, terminal
from pipeback.recipes.train import Record, fail, resolved


def report(sources: Sequence[Path], out: Path, console: Console, title: str | None = None) -> None:
    """Write the page, the pictures and the tables, and print the tables."""
    methods, configs = load(sources)
    found = tables(methods)
    out.parent.mkdir(parents=True, exist_ok=True)
    for table in found:
        console.print(terminal(table))
        console.print()
    out.with_name("tables.md").write_text("\n".join(map(markdown, found)))
    source = importlib.resources.files("pipeback.recipes").joinpath("templates", "report.html.jinja").read_text()
    page = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(source)
    out.write_text(
        page.render(
            title=title or f"Pipelined backpropagation on {experiment(configs)}",
            head=methods[0].head, epochs=methods[0].epochs, seeds=max(len(m.results) for m in methods), tables=found,
            pictures=pictures(methods, out), grids=[(t, grid(s, STAGES, MICRO_BATCHES)) for t, s in schedules()],
            configs=configs, made=made(sources, methods),
        )
    )  # fmt: skip
    console.print(f"{out}: the whole report; beside it the pictures and tables.md", highlight=False, soft_wrap=True)


def pictures(methods: list[Method], out: Path) -> dict[str, str]:
    """Written beside the page; returned as what stands in the page, by name."""
    drawn = {
        "accuracy": partial(draw_accuracy, methods),
        "final": partial(draw_final, methods),
        "schedules": draw_schedules,
    }
    found = {}
    with plt.rc_context(STYLE):
        for name, draw in drawn.items():
            file, figure = out.with_name(f"{name}.png"), draw()
            figure.savefig(file)
            plt.close(figure)
            found[name] = "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode()
    return found


def experiment(configs: list[Record]) -> str:
    names = {str(OmegaConf.create(c["text"]).get("name", "")) for c in configs}
    return ", ".join(sorted(names - {""})) or "finished runs"


def made(sources: Sequence[Path], methods: list[Method]) -> Record:
    """How the page was made: by which command, from what, where."""
    return {
        "command": command(sources),
        "from": f"{sum(len(m.results) for m in methods)} runs in {', '.join(map(str, sources))}",
        "machine": f"{processor()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "runs": "on the CPU, one torch thread each",
        "torch": torch.__version__,
        "pipeback": pipeback.__version__,
        "python": platform.python_version(),
    }


def command(sources: Sequence[Path]) -> str:
    """As it was typed: of the paths, `main` made the list `runs`."""
    name, *words = sys.argv
    typed = [part for word in words for part in (map(str, sources) if word.startswith("runs=") else [word])]
    return f"{'python ' if name.endswith('.py') else ''}{name} {shlex.join(typed)}"


def processor() -> str:
    """Its model, where the system tells it (Linux on x86)."""
    info = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*: (.+)$", info.read_text(), re.MULTILINE) if info.is_file() else None
    return model[1] if model else platform.processor() or "unknown processor"


def console() -> Console:
    """Wide enough for a table when the output goes to a file."""
    wide = Console()
    return wide if wide.is_terminal else Console(width=150)


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
        sys.argv = [sys.argv[0], f"runs=[{quoted}]", *(a for a in sys.argv[1:] if a not in paths)]
    elif not any(a.startswith(("runs=", "-")) for a in sys.argv[1:]):
        sys.exit("pipeback report: which runs? Give folders or .jsonl files: pipeback report outputs/compare/digits")
    _main()


if __name__ == "__main__":
    main()
