"""Prints and draws results again: those that came with pipeback, or your own.

    pipeback results                                    # the names of those that came with pipeback
    pipeback results delay_lm                           # every method at its best rate
    pipeback results delay_lm out=delay_lm.png          # losses, slow-downs, and how much depends on the rate
    pipeback results outputs/sweep/delay_lm out=tables.md,picture.svg
    pipeback results delay_lm_texts outputs/sweep/more out=all.csv    # sweeps of one experiment, joined

Results are a name, a results.csv of `pipeback sweep`, its folder, or a file of `pipeback bench stability`. out= names
files that end in .md, in .csv (of sweeps), or in an ending of pictures (.png, .svg, .pdf); several are separated by
commas.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console

from pipeback.counts import counted
from pipeback.recipes import full_disk, measured
from pipeback.recipes.draw import picturable
from pipeback.recipes.provenance import heading
from pipeback.recipes.report import console as report_console
from pipeback.recipes.reports.sheet import Sheet, markdown, terminal
from pipeback.recipes.stability import limits
from pipeback.recipes.stability.limits import Limits
from pipeback.recipes.sweeps import summary, table
from pipeback.recipes.sweeps.joined import joined
from pipeback.recipes.sweeps.table import Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Asked(NamedTuple):
    """sweeps: as they were named; without any, a list of all. out: files to write."""

    sweeps: list[str]
    out: list[str]


def parsed(arguments: Sequence[str]) -> Asked:
    """Read the command line. Raises ValueError for what is no option."""
    sweeps, out = [], list[str]()
    for word in arguments:
        name, given, value = word.partition("=")
        if given and name == "out":
            out += value.split(",")
        elif word.startswith("-") or (given and not Path(word).exists()):
            raise ValueError(f"{word!r} is not an option; write out=FILE, for example out=results.png")
        else:
            sweeps.append(word)
    if out and not sweeps:
        raise ValueError(f"out={','.join(out)}: of which sweep? `pipeback results` lists those that came with pipeback")
    for file in out:
        picturable(file, (".md", ".csv"))
    return Asked(sweeps, out)


def found(name: str) -> Results | Limits:
    """Results by their name, file or folder. Raises ValueError if there are none."""
    if name in measured.names():
        return _read(measured.text(name), name)
    path = Path(name).expanduser()
    file = path / table.FILE if path.is_dir() else path
    if file.is_file():
        return _read(file.read_text("utf-8"), str(file))
    near = get_close_matches(name, measured.names(), n=1)
    hint = f"did you mean {near[0]!r}?" if near else "`pipeback results` lists the names"
    raise ValueError(f"{name!r} is neither a results.csv of `pipeback sweep`, nor its folder, nor a known name; {hint}")


def together(names: Sequence[str]) -> Results | Limits:
    """What was named, as one. Raises ValueError for what cannot be joined."""
    read = {name: found(name) for name in names}
    for name, results in read.items():
        if isinstance(results, Limits):
            if len(names) > 1:
                raise ValueError(f"{name} is no sweep; name it alone")
            return results
        if not results.rows:
            raise ValueError(f"{name}: no run of it has ended yet")
    return joined({name: results for name, results in read.items() if isinstance(results, Results)})


def _read(text: str, name: str) -> Results | Limits:
    return limits.read(text) if limits.holds(text) else table.read(text, name)


def sheets(results: Results | Limits) -> list[Sheet]:
    return limits.sheets(results) if isinstance(results, Limits) else summary.sheets(results)


def _counted(results: Results | Limits) -> str:
    return counted(len(results.rows), "limit" if isinstance(results, Limits) else "run")


def text(results: Results | Limits) -> str:
    """The tables in Markdown, below the command, the date, the commit and the machine."""
    head = heading(results.command, results.facts)
    return "\n".join([f"{head.rstrip()} {_counted(results)}.\n", *map(markdown, sheets(results))]).rstrip() + "\n"


def figure(results: Results | Limits) -> Figure:
    """The picture of the results."""
    if isinstance(results, Limits):
        from pipeback.recipes.stability import figure as pictures
    else:
        from pipeback.recipes.sweeps import pictures
    return pictures.draw(results)


def show(asked: Asked, console: Console) -> None:
    if not asked.sweeps:
        for name in measured.names():
            results = _read(measured.text(name), name)
            told = f"{_counted(results)}, {results.facts.get('date', '')}"
            console.print(f"[bold]{name}[/bold]  {told}", highlight=False)
            console.print(f"    {results.command}", style="dim", highlight=False, markup=False, soft_wrap=True)
        return
    results = together(asked.sweeps)
    if isinstance(results, Limits) and (csv := [file for file in asked.out if Path(file).suffix.lower() == ".csv"]):
        raise ValueError(f"out={csv[0]}: only sweeps are written as .csv; write .md or a picture")
    for sheet in sheets(results):
        console.print(terminal(sheet))
        console.print(sheet.notes + "\n", style="dim", highlight=False, markup=False)
    told = ", ".join(f"{name}: {value}" for name, value in results.facts.items())
    console.print(f"{results.command}\n{told}", style="dim", highlight=False, markup=False, soft_wrap=True)
    for file in map(Path, asked.out):
        with full_disk.writing(file):
            if file.suffix.lower() == ".md":
                file.write_text(text(results), "utf-8")
            elif file.suffix.lower() == ".csv" and isinstance(results, Results):
                table.save(file, results)
            else:
                figure(results).savefig(file)
        console.print(f"written: {file}", highlight=False, markup=False, soft_wrap=True)


def main() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return
    try:
        show(parsed(sys.argv[1:]), report_console())
    except (ValueError, OSError) as error:
        sys.exit(f"pipeback results: {full_disk.told(error)}")


if __name__ == "__main__":
    main()
