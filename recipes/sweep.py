"""Sweeps over methods, rates, seeds and any options, and writes one small CSV of all runs.

    pipeback sweep experiment=delay_lm rates=[5e-4,1e-3,2e-3] seeds=3
    pipeback sweep experiment=delay_lm methods=[sgd,{eigendelay:{slack:1}}] vary={model.width:[48,96]} jobs=1

Each run is what `pipeback train` makes of the same options, in a folder of its own under `out`. A run that was stopped
or killed goes on from its last checkpoint when the same command is given again, with the bits of a run that was not.
Finished runs of the same configuration are taken over; their checkpoints go. results.csv has a line per run, and is
written anew whenever one ends; `pipeback results FOLDER` prints and draws it.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console

from pipeback.counts import counted
from pipeback.recipes import build, forks, full_disk
from pipeback.recipes.command import literal, mistakes, quoted, start, suggestion
from pipeback.recipes.compare import ALL
from pipeback.recipes.folder_lock import locked
from pipeback.recipes.interrupts import follow, stoppable
from pipeback.recipes.live import Live, broken
from pipeback.recipes.method_entries import labels_of, typed
from pipeback.recipes.provenance import provenance
from pipeback.recipes.report import console as report_console
from pipeback.recipes.run_checks import check_runs, check_words, unlogged
from pipeback.recipes.schemas import Sweep, check
from pipeback.recipes.sweeps import table
from pipeback.recipes.sweeps.jobs import RATE, Job, axes, combinations, folder, plain, planned, rates_of
from pipeback.recipes.sweeps.places import shortened
from pipeback.recipes.train import as_yaml, batches_of, quiet, task_of, trainer_of
from pipeback.recipes.work import resume

OWN = re.compile(r"(methods|seeds|seed|jobs|rates|vary|reference|out)=")  # options that are not passed on to `train`
OWN_PLACE = re.compile(r"^((?:data\.\w+|out|reference)=).*/([^/]+)/?$")  # a folder, by whatever path


def plan(config: Mapping[str, Any], words: Sequence[str]) -> list[Job]:
    """List the runs. Each method is built once with each choice of options, so that mistakes show before any run."""
    options, labels = combinations(axes(config)), labels_of(config["methods"], ALL, "trains")
    every, out = config["methods"] in (None, "all"), Path(config["out"])

    def compose(
        label: str, varied: Mapping[str, Any], seed: int, home: Path | None = None
    ) -> tuple[dict[str, Any], str]:
        home = home or out / folder(label, varied, seed)
        told = [f"{key}={typed(value)}" for key, value in varied.items()]
        given = [*words, f"method={label}", *told, f"seed={seed}", f"label={label}", f"out={literal(str(home))}"]
        values = check(hydra.compose("train", given))
        return values, as_yaml(values)

    check_reference(config["reference"], labels)
    if isinstance(config["rates"], Mapping) and (unknown := {*config["rates"]} - {*labels, *map(plain, labels)}):
        raise ValueError(
            f"rates: {', '.join(sorted(unknown))}: methods= has no such method; it has {', '.join(labels)}"
        )
    kept: dict[str, list[dict[str, Any]]] = {}
    warned = set[str]()
    read: dict[str, Any] = {}  # the data of every choice of options, since files take seconds
    for label in labels:
        rates = rates_of(label, config["rates"])
        mine = [varied for varied in options if rates is None or varied[RATE] in rates]
        try:
            for varied in mine:
                values, _ = compose(label, varied, config["seed"])
                given = values["data"], values["batch_size"], values["seed"]
                if (data := read.get(str(given))) is None:
                    data = read[str(given)] = build.data(*given)
                trainer = trainer_of({**values, "logger": {}, "callbacks": {}})[0]
                task_of(values, data, trainer)
                warned.add(unlogged(batches_of(trainer, data, values["batch_size"])(), trainer.log_every_n_steps))
        except ValueError as error:
            if every and label != "sgd":  # sgd runs with any optimizer, so its error is one of the config
                continue
            raise ValueError(str(error) if label in str(error) else f"{label}: {error}") from error
        kept[label] = mine
    for text in sorted(filter(None, warned)):
        print(f"pipeback sweep: {text}", file=sys.stderr)
    return planned(kept, range(config["seed"], config["seed"] + config["seeds"]), compose)


def check_reference(reference: str, labels: Sequence[str]) -> None:
    """Raise ValueError if no run can be what slow-downs are related to. sgd is the default, and may be left out."""
    if reference in ("sgd", *labels):
        return
    if not table.elsewhere(reference):
        raise ValueError(
            f"reference={reference} is neither a method of this sweep, which has {', '.join(labels)}, nor a folder "
            f"with {table.FILE}{suggestion(reference, labels)}"
        )
    if not any(row.method == "sgd" for row in table.load(Path(reference) / table.FILE).rows):
        raise ValueError(
            f"reference={reference}: that sweep has no sgd; name one that has it, or a method of this one: "
            f"reference={labels[0]}"
        )


def each(jobs: Sequence[Job], processes: int) -> Iterator[None]:
    """Do the runs, and yield whenever one has ended."""
    if processes == 1 or not jobs:
        for job in jobs:
            resume(job.values)
            yield
        return
    with ProcessPoolExecutor(min(processes, len(jobs)), forks.context(), follow, (os.getpid(),)) as pool:
        try:
            for future in as_completed([pool.submit(resume, job.values) for job in jobs]):
                future.result()
                yield
        except BrokenProcessPool as error:
            raise SystemExit("pipeback sweep: a process died (out of memory?); the same command goes on") from error


def sweep(jobs: Sequence[Job], config: Mapping[str, Any], words: Sequence[str], console: Console) -> None:
    """Do the runs that are not done yet; write the file of all."""
    todo, file = [job for job in jobs if not job.done], Path(config["out"]) / table.FILE
    if len(todo) < len(jobs):
        console.print(f"{counted(len(jobs) - len(todo), 'finished run')} taken over", highlight=False)
    told = shlex.join(["pipeback", "sweep", *map(public, words)])
    facts = {name: str(value) for name, value in provenance().items() if value is not None}
    reference = config["reference"]
    batches = {job.values["batch_size"] for job in jobs if _several(job.values)}
    told_of = "sgd of another sweep" if table.elsewhere(reference) else reference
    notes = table.notes(told_of, sorted(batches))
    with mistakes("sweep"):
        left = table.missing(file, jobs)
    if left:
        console.print(
            f"{file} loses {counted(left, 'line')} of other runs, whose folders stay; out= of its own keeps both",
            highlight=False,
        )

    def write() -> None:
        rows, made = table.rows_of(jobs, reference), table.facts_of(jobs, facts)
        table.save(file, table.Results(told, config["name"], made, notes, rows))

    began = time.perf_counter()
    with Live({job.out: job.name for job in todo}, console):
        for _ in each(todo, config["jobs"]):
            write()
    write()
    console.print(f"{counted(len(todo), 'run')} in {time.perf_counter() - began:.0f} s; {file}", highlight=False)
    if said := broken({job.out: job.out.name for job in jobs}):
        sys.exit("\n".join(said.values()))


def _several(values: Mapping[str, Any]) -> bool:
    """Whether a batch of a run is of several micro-batches."""
    return values["micro_batch_size"] is not None and values["micro_batch_size"] < values["batch_size"]


def public(word: str) -> str:
    """A word of the command without folders of this machine: data.root=/home/me/data -> data.root=data."""
    return shortened(OWN_PLACE.sub(r"\1\2", word))


def main() -> None:
    words = [quoted(word) for word in sys.argv[1:]]
    found: list[tuple[list[Job], dict[str, Any]]] = []

    def task(settings: DictConfig) -> None:
        with mistakes("sweep"):
            quiet()
            config = check(settings, Sweep)
            check_runs(config)
            held.enter_context(locked(Path(config["out"])))
            given = [word for word in HydraConfig.get().overrides.task if not OWN.match(word)]
            callbacks = [] if any(word.startswith("callbacks=") for word in given) else ["callbacks=sweep"]
            found.append((plan(config, [*given, *callbacks]), config))

    with mistakes("sweep"):
        if swept := [w for w in words if w in ("-m", "--multirun") or w.startswith("method=")]:
            raise ValueError(f"{swept[0]}: it sweeps methods=[...] x rates=[...] x vary={{...}} x seeds=")
        check_words(words)
    given, sys.argv[1:] = sys.argv[1:], words
    with stoppable("pipeback sweep: stopped. The same command goes on where each run was"), ExitStack() as held:
        start("sweep", task)
        for jobs, config in found:  # empty if Hydra was asked for something else (--help, --cfg job)
            console = report_console()
            console.file = sys.stdout  # the present one: a run in this process has its own
            with mistakes("sweep"), full_disk.writing(config["out"]):
                sweep(jobs, config, given, console)


if __name__ == "__main__":
    from pipeback.recipes import sweep as module  # not __main__: other processes import what is sent to them

    module.main()
