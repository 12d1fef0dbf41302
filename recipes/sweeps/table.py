"""Table: the CSV file of a sweep: a line per run, below lines that say where the numbers come from.

    # COMMAND
    # experiment: NAME, runs: N, seeds: 0 to 2, updates: N
    # date: …, commit: …, pipeback: …, machine: …, torch: …
    # what the columns are
    method,OPTIONS…,seed,state,updates,MEASURES…,train_loss,slow_down,held_out_slow_down,@50,@75,…

@N is the smoothed training loss after N updates (`curves`). Where runs are of several commits, each line has its own.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from pipeback.recipes.live import state
from pipeback.recipes.run_folders import config_in, facts_in
from pipeback.recipes.sweeps.curves import SMOOTHED, Curve, curve, held_out, held_out_slow_down, slow_down
from pipeback.recipes.sweeps.jobs import RATE, Job, short
from pipeback.recipes.sweeps.places import here, named, parts_of, shortened, spellings

POINTS = (50, 75, 100, 150, 200, 300, 400, 600, 800, 1000, 1500, 2000, 3000, 5000, 8000, 12000, 20000, 50000, 100000)
FILE = "results.csv"  # in the folder of a sweep
FIXED = ("method", "seed", "state", "commit", "time", "updates", "train_loss", "slow_down", "held_out_slow_down")
DIGITS = 5  # of a measured number
SEVERAL = "rows of several commits, each with its own"


class Row(NamedTuple):
    """A run, as a line of the file has it.

    commit: at which it was done; empty if the file tells one for all. time: of an update, where every stage has a
    worker; its unit is the forward and backward of a sample at one stage, alike everywhere. NaN if it is unknown.
    """

    method: str
    options: dict[str, str]
    seed: int
    state: str
    updates: int
    measures: dict[str, float]
    train_loss: float
    slow_down: float
    held_out_slow_down: float
    points: dict[int, float]
    commit: str = ""
    time: float = math.nan


class Results(NamedTuple):
    """A file. facts: date, commit, versions and machine."""

    command: str
    experiment: str
    facts: dict[str, str]
    notes: list[str]
    rows: list[Row]


class _Run(NamedTuple):
    """A run that has ended."""

    label: str
    options: Mapping[str, Any]
    seed: int
    state: str
    curve: Curve
    held_out: Curve

    @property
    def end(self) -> float:
        """The last training loss; infinite if it diverged or has logged none."""
        return self.curve.end if self.state == "finished" and math.isfinite(self.curve.end) else math.inf


def rows_of(jobs: Sequence[Job], reference: str) -> list[Row]:
    """A row for each job that has ended.

    reference: what slow-downs are related to: a method of these jobs at its best rate, or sgd in the folder of another
    sweep, with the same options as far as one of both sweeps has varied them, but for those of methods.
    """
    ended = [job for job in jobs if _ended(job.out)]
    runs = [_Run(job.label, job.options, job.seed, state(job.out)["state"], *_curves(job.out)) for job in ended]
    if foreign := elsewhere(reference):
        varied = {key for row in load(Path(reference) / FILE).rows for key in row.options}
        keys = [key for key in sorted({*jobs[0].options, *varied} - {RATE}) if key.split(".")[0] != "method"]
        others = _runs_in(Path(reference), keys)
        parts = _parts([job.values for job in jobs], others, keys)
        others = [run._replace(options=_shortened(run.options, parts)) for run in others]
    else:
        keys = [key for key in jobs[0].options if key != RATE]
        others = [run for run in runs if run.label == reference]
    mine_of = [_options(job.values, keys) if foreign else {key: job.options[key] for key in keys} for job in ended]
    options_of = [_shortened(options, parts) for options in mine_of] if foreign else mine_of
    first = _shortened(_options(jobs[0].values, keys), parts) if foreign else jobs[0].options
    first = {key: first[key] for key in keys if key.startswith("optimizer")}
    called = _called(jobs)
    found = []
    for job, run, asked in zip(ended, runs, options_of, strict=True):
        told, mine = state(job.out), run.curve
        measures = {name.removeprefix("val/"): float(value) for name, value in told.get("measures", {}).items()}
        wanted = {**asked, **first}
        against = _reference([other for other in others if _same(other.options, wanted)], job.seed)
        slow = held = math.nan
        if against is not None and told["state"] == "finished":
            slow, held = slow_down(mine, against.curve), held_out_slow_down(run.held_out, against.held_out)
        last = mine.updates[-1] if mine.updates else 0
        points = {at: mine.at(at) for at in POINTS if at <= last and math.isfinite(mine.at(at))}
        options = {key: called[key][str(value)] for key, value in job.options.items()}
        facts = facts_in(job.out)
        found.append(
            Row(
                job.label, options, job.seed, told["state"], last, measures, mine.end, slow, held, points,
                str(facts.get("commit") or ""), _time(facts),
            )
        )  # fmt: skip
    return found


def _called(jobs: Sequence[Job]) -> dict[str, dict[str, str]]:
    """What each value of an option is called in the file, without folders of this machine."""
    keys = dict.fromkeys(key for job in jobs for key in job.options)
    return {key: named([*dict.fromkeys(str(job.options[key]) for job in jobs)]) for key in keys}


def _parts(mine: Sequence[Mapping[str, Any]], others: Sequence[_Run], keys: Iterable[str]) -> dict[str, int]:
    """How many last parts of folders tell the values of an option apart within each of two sweeps.

    Between both it is the last part that counts, for they may be of two machines, unless both folders are here.
    """
    found = {}
    for key in keys:
        values = [_options(each, [key])[key] for each in mine], [str(run.options[key]) for run in others]
        found[key] = max(map(parts_of, (*values, filter(here, chain(*values)))))
    return found


def _shortened(options: Mapping[str, Any], parts: Mapping[str, int]) -> dict[str, Any]:
    return {key: shortened(value, parts[key]) if key in parts else value for key, value in options.items()}


def _time(facts: Mapping[str, Any]) -> float:
    """The time of what counts as an update, a batch if it is of several, by the bubble of the schedule."""
    try:
        return float(max(facts["update_size"], facts["batch_size"]) / (1 - facts["bubble"]))
    except (KeyError, TypeError):  # plain Lightning has no stages
        return math.nan


def facts_of(jobs: Sequence[Job], now: Mapping[str, str]) -> dict[str, str]:
    """Where and when the jobs that have ended were done, maybe at several commits. now: where none of them tells."""
    each = [facts_in(job.out) for job in jobs if _ended(job.out)]
    return {name: once(str(facts.get(name) or "") for facts in each) or value for name, value in now.items()}


def once(values: Iterable[str | None]) -> str:
    """a and b; what is missing or the same is named once."""
    parts = (part for value in values if value for part in value.split(" and "))
    return " and ".join(dict.fromkeys(parts))


def elsewhere(reference: str) -> bool:
    """Whether a reference is the folder of another sweep, and no method."""
    return (Path(reference) / FILE).is_file()


def _ended(out: Path) -> bool:
    return state(out).get("state") in ("finished", "diverged")


def _curves(out: Path) -> tuple[Curve, Curve]:
    """The training and the held-out losses of a run that has ended."""
    return _read(out.resolve(), (out / "progress.json").stat().st_mtime_ns)


@cache
def _read(out: Path, ended: int) -> tuple[Curve, Curve]:
    """The curves in a folder. ended: when its run ended, for another run may come to lie there."""
    return curve(out), held_out(out)


def _options(config: Mapping[str, Any], keys: Iterable[str]) -> dict[str, str]:
    """These options of a configuration, groups of them without the rate; one that it does not have is None, as null."""
    found = {}
    for key in keys:
        value: Any = config
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if isinstance(value, Mapping):
            value = {name: value[name] for name in sorted(value) if f"{key}.{name}" != RATE}
        found[key] = str(value)
    return found


def _same(options: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether a run of the reference has these options."""
    return all(str(options[key]) == str(value) for key, value in wanted.items())


def _runs_in(folder: Path, keys: Iterable[str]) -> list[_Run]:
    """The runs of sgd in the folder of a sweep, each with its rate and these options."""
    found = []
    for out in sorted(file.parent for file in folder.glob("*/progress.json")):
        told = config_in(out)
        if told.get("label") == "sgd" and _ended(out):
            options = {**_options(told, keys), RATE: told["optimizer"].get("lr")}
            found.append(_Run("sgd", options, int(told["seed"]), state(out)["state"], *_curves(out)))
    return found


def _reference(runs: Sequence[_Run], seed: int) -> _Run | None:
    """The run with this seed, at the rate at which the mean loss over the seeds ends lowest."""
    ends: dict[str, list[float]] = {}
    for run in runs:
        if run.state == "finished" and not run.curve.updates:
            continue  # no loss was logged
        ends.setdefault(str(run.options.get(RATE)), []).append(run.end)
    if not ends:
        return None
    best = min(ends, key=lambda rate: (-len(ends[rate]), sum(ends[rate]) / len(ends[rate])))
    of_seed = [run for run in runs if str(run.options.get(RATE)) == best and run.seed == seed]
    return of_seed[0] if of_seed else None


def save(file: Path, found: Results) -> None:
    """Write the file as a whole."""
    keys = list(dict.fromkeys(key for row in found.rows for key in row.options))
    measures = list(dict.fromkeys(name for row in found.rows for name in row.measures))
    points = sorted({at for row in found.rows for at in row.points})
    text = io.StringIO()
    for line in (found.command, *_told(found)):
        text.write(f"# {line}\n")
    lines = csv.writer(text, lineterminator="\n")
    of = ["commit"] if _several(found) else []
    of += ["time"] if any(math.isfinite(row.time) for row in found.rows) else []
    names = "method", *keys, "seed", "state", *of, "updates", *measures, "train_loss", "slow_down", "held_out_slow_down"
    lines.writerow([*names, *(f"@{at}" for at in points)])
    for row in found.rows:
        told = {"commit": row.commit, "time": _number(row.time)}
        lines.writerow([
            row.method, *(row.options.get(key, "") for key in keys), row.seed, row.state, *(told[name] for name in of),
            row.updates, *(_number(row.measures.get(name)) for name in measures), _number(row.train_loss),
            _number(row.slow_down, 4), _number(row.held_out_slow_down, 4),
            *(_number(row.points.get(at), 4) for at in points),
        ])  # fmt: skip
    part = file.with_suffix(".part")
    part.write_text(text.getvalue(), "utf-8")
    part.replace(file)


def _told(found: Results) -> list[str]:
    seeds = sorted({row.seed for row in found.rows})
    updates = max((row.updates for row in found.rows), default=0) or "none logged"
    told = [f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else str(seeds[0])] if seeds else ["none"]
    return [
        f"experiment: {found.experiment}, runs: {len(found.rows)}, seeds: {told[0]}, updates: {updates}",
        ", ".join(f"{name}: {value}" for name, value in found.facts.items()),
        *(note for note in found.notes if note != SEVERAL),
        *([SEVERAL] if _several(found) else []),
    ]


def _several(found: Results) -> bool:
    """Whether runs of several commits stand in one file."""
    return len({row.commit for row in found.rows}) > 1


def _number(value: float | None, digits: int = DIGITS) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.{digits}g}"


BATCHES = "updates are counted in batches"  # so begins the note that they are


def notes(reference: str, batches: Sequence[int] = ()) -> list[str]:
    """What the columns are. batches: samples of batches of several updates, if there are: their mean loss is logged."""
    sizes = " or ".join(map(str, batches))
    counted = [f"{BATCHES} of {sizes} samples, of several updates each"] if batches else []
    return [
        f"train_loss and @N: the mean training loss of {SMOOTHED} updates, at the end and after N updates; slow_down: "
        f"updates until such a loss over those of {reference} at its best rate; held_out_slow_down: all updates over "
        "those until the reference has the held-out loss of the end, at least 1; time: of an update where every stage "
        "has a worker, in forwards and backwards of a sample at one stage",
        *counted,
    ]


def missing(file: Path, jobs: Sequence[Job]) -> int:
    """How many runs of a file of before are none of these; one of another configuration is not done."""
    if not file.is_file():
        return 0
    done = [(job.label, {k: spellings(str(v)) for k, v in job.options.items()}, job.seed) for job in jobs if job.done]
    return sum(not any(_is(row, *each) for each in done) for row in load(file).rows)


def _is(row: Row, label: str, options: Mapping[str, Collection[str]], seed: int) -> bool:
    """Whether a line is of this run. options: whatever its values may be called."""
    same = (row.method, row.seed, row.options.keys()) == (label, seed, options.keys())
    return same and all(value in options[key] for key, value in row.options.items())


def load(file: Path) -> Results:
    """Read a file. Raises ValueError, naming it, if it is none of a sweep."""
    return read(file.read_text("utf-8"), str(file))


def read(text: str, file: str) -> Results:
    """Read the text of a file. Raises ValueError, naming the file, if it is none of a sweep."""
    lines = text.splitlines()
    head = [line.removeprefix("# ") for line in lines if line.startswith("# ")]
    try:
        command, about, told, *more = head
        facts = dict(part.split(": ", 1) for part in re.split(r", (?=\w[\w -]*: )", told))
        experiment = re.match(r"experiment: ([^,]+),", about)[1]  # type: ignore[index]
        rows = [_row(line) for line in csv.DictReader(lines[len(head) :])]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is no file of `pipeback sweep`: {error}") from error
    return Results(command, experiment, facts, more, rows)


def _row(line: dict[str, str]) -> Row:
    rest = {key: value for key, value in line.items() if key not in FIXED}
    points = {int(key[1:]): float(value) for key, value in rest.items() if key.startswith("@") and value}
    names = list(line)
    options = {key: line[key] for key in names[1 : names.index("seed")]}
    between = names[names.index("updates") + 1 : names.index("train_loss")]
    measures = {key: float(line[key]) for key in between if line[key]}
    loss, slow, held = (float(line[name] or "nan") for name in ("train_loss", "slow_down", "held_out_slow_down"))
    return Row(
        line["method"], options, int(line["seed"]), line["state"], int(line["updates"]), measures, loss, slow, held,
        points, line.get("commit") or "", float(line.get("time") or "nan"),
    )  # fmt: skip


def reference_of(found: Results) -> str:
    """What the slow-downs of a file are related to."""
    about = next((note for note in found.notes if "slow_down" in note), "")
    return about.partition("over those of ")[2].partition(" at its best rate")[0] or "sgd"


def caption(options: Mapping[str, str]) -> str:
    """width 48, depth 15, without root"""
    return ", ".join(
        f"without {short(key)}" if value == "None" else f"{short(key)} {value}" for key, value in options.items()
    )
