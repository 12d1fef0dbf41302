"""Trains every method on the same data, from the same weights, in the same order; then writes a report.

    pipeback compare experiment=digits
    python recipes/compare.py methods=[sgd,pb,{pb:{slack:1}},cerebras] seeds=3 model.depth=29

This does the same as `pipeback train -m method=sgd,pb,... seed=0,1,2`, but checks everything before it starts, shows
progress bars, and ends with `pipeback report`. `out` holds a folder per run, and report.html. A run that fails
or diverges does not stop the others. Finished runs of the same configuration are taken over; nothing is deleted.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, nullcontext
from functools import partial
from importlib.util import find_spec
from itertools import dropwhile
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console

from pipeback.counts import counted
from pipeback.recipes import build, forks, full_disk
from pipeback.recipes.command import literal, mistakes, ordered, quoted, start
from pipeback.recipes.folder_lock import locked
from pipeback.recipes.interrupts import follow, stoppable
from pipeback.recipes.live import Live, broken
from pipeback.recipes.method_entries import labels_of
from pipeback.recipes.report import console as report_console
from pipeback.recipes.report import report
from pipeback.recipes.run_checks import check_runs, check_words
from pipeback.recipes.run_folders import Run, beside, place
from pipeback.recipes.schemas import Compare, check
from pipeback.recipes.train import as_yaml, quiet, task_of, trainer_of
from pipeback.recipes.work import work

ALL = (
    "sgd", "pb", "sc", "lwp", "lwp_w", "cerebras", "lwp_w_sc", "pipedream", "spectrain", "pipemare", "gpipe",
    "one_f_one_b", "zb_h1", "zb_h2", "interleaved", "looped_bfs", "zb_v", "pipedream_2bw", "pipedream_slack2",
    "spectrain_slack2", "ef", "pipeoptim", "xpipe", "msnag", "gap_aware", "dc_asgd", "dc_asgd_a", "braking",
    "staleness_lr", "eigendelay",
)  # fmt: skip
FEW = ("sgd", "pb", "cerebras", "gpipe")
OWN = re.compile(r"(methods|seeds|seed|jobs|again|out)=")  # options that are not passed on to `train` unchanged


def plan(config: Mapping[str, Any], words: list[str]) -> list[Run]:
    """List the runs. Every method is built once here, so that a mistake is reported before anything starts."""
    every = FEW if config["quick"] and config["methods"] is None else ALL
    labels = labels_of(config["methods"], every, "compares")
    chosen = config["methods"] not in (None, "all")
    data = build.data(config["data"], config["batch_size"], config["seed"])
    first: dict[str, str] = {}  # the configurations of the first seed, by label
    for label in labels:
        values = composed(words, label, config["seed"])
        written = as_yaml(values)
        try:
            task_of(values, data, trainer_of({**values, "logger": {}, "callbacks": {}})[0])
        except ValueError as error:
            if not chosen and label != "sgd":  # sgd runs with any optimizer, so its error is an error of the config
                continue
            raise ValueError(str(error) if label in str(error) else f"{label}: {error}") from error
        first[label] = written
    # longest first would use two processes best, but readers wait for sgd and pb, and seeds belong together
    out, runs = Path(config["out"]), []
    for seed in range(config["seed"], config["seed"] + config["seeds"]):
        for label in first:
            written = first[label] if seed == config["seed"] else text(words, label, seed)
            runs.append(place(label, seed, out / f"{label}-seed{seed}", written, config["again"]))
    return runs


def composed(words: list[str], label: str, seed: int) -> dict[str, Any]:
    """Return the config of one run, as `pipeback train` composes it."""
    return check(hydra.compose("train", [*words, f"method={label}", f"seed={seed}", f"label={label}"]))


def text(words: list[str], label: str, seed: int) -> str:
    """The configuration of one run, as it is written beside the run."""
    return as_yaml(composed(words, label, seed))


def train_words(words: list[str], out: Path) -> list[str]:
    """Return the options as `pipeback train` takes them."""
    kept = [word for word in words if not OWN.match(word)]
    callbacks = [] if any(word.startswith("callbacks=") for word in kept) else ["callbacks=minimal"]
    return [*kept, *callbacks, f"out={literal(f'{out}/${{label}}-seed${{seed}}')}"]


def of_hydra(words: list[str]) -> list[str]:
    """The words of a command that are Hydra's own: its options, and where it looks for configs (--config-dir my)."""
    flags = list(dropwhile(lambda word: not word.startswith("-"), ordered(words)))
    return [*(word for word in words if re.match(r"\+*hydra[./]", word)), *flags]


def launcher(words: list[str], jobs: int, console: Console) -> list[str]:
    """Choose the launcher of Hydra: the user's, or joblib for several processes if it is installed."""
    if any(word.startswith("hydra/launcher=") for word in words) or jobs == 1:
        return []
    if find_spec("hydra_plugins") is None or find_spec("hydra_plugins.hydra_joblib_launcher") is None:
        console.print("one run after the other: several at a time need `pip install hydra-joblib-launcher`")
        return []
    return ["hydra/launcher=joblib", f"hydra.launcher.n_jobs={jobs}"]


def compare(
    runs: list[Run], others: list[Path], config: Mapping[str, Any], given: list[str], words: list[str], console: Console
) -> None:
    """Do the runs that are not done yet, then write the report of all and of `others`.

    given: the options as `pipeback train` takes them. words: as they were typed.
    """
    out, done = Path(config["out"]), [run for run in runs if run.done]
    todo = [run for run in runs if not run.done]
    if others:
        console.print(
            f"{counted(len(others), 'earlier run')} of other methods or seeds in the report, too", highlight=False
        )
    if done:
        console.print(f"{counted(len(done), 'finished run')} of this configuration taken over", highlight=False)
    for each in todo:
        if each.out != each.home:
            held = "an unfinished run" if each.stopped else "another run"
            console.print(f"{each.home} holds {held}, which stays: this one goes to {each.out}", highlight=False)
    place_of, parent = {str(run.home): str(run.out) for run in todo}, os.getpid()

    def job(settings: DictConfig) -> None:
        if settings.out in place_of:
            follow(parent)
            settings.out = place_of[settings.out]
            work(check(settings))

    began = time.perf_counter()
    if todo:
        seeds = ",".join(dict.fromkeys(str(run.seed) for run in todo))
        labels = ",".join(dict.fromkeys(run.label for run in todo))
        label = "label='${hydra:runtime.choices.method}'"  # an experiment of the user's may set another
        sweep = [f"seed={seeds}", f"method={labels}", label, f"hydra.sweep.dir={literal(str(out))}"]
        chosen = launcher(words, config["jobs"], console)
        sys.argv[1:] = ["-m", *given, *of_hydra(words), *sweep, *chosen]
        with (
            Live({run.out: f"{run.label} [dim]seed {run.seed}[/dim]" for run in todo}, console),
            forks.of_joblib() if chosen else nullcontext(),
        ):
            try:
                start("compare", job, "train")
            except BrokenProcessPool as error:
                raise SystemExit("pipeback compare: a process died (out of memory?); try jobs=1") from error
    console.print(f"{counted(len(todo), 'run')} in {time.perf_counter() - began:.0f} s\n", highlight=False)
    sys.argv[1:] = words  # as typed, for the report
    said = broken({run.out: f"{run.label}, seed {run.seed}" for run in runs})
    if len(said) < len(runs):
        report([*(run.out for run in runs if run.out not in said), *others], out / "report.html", console)
    if said:
        sys.exit("\n".join(said.values()))


def main() -> None:
    words = [quoted(word) for word in sys.argv[1:]]
    planned: list[tuple[list[Run], list[Path], dict[str, Any], list[str]]] = []

    def task(settings: DictConfig) -> None:
        with mistakes("compare"):
            quiet()
            config = check(settings, Compare)
            check_runs(config, offline=True)
            held.enter_context(locked(Path(config["out"])))
            given = train_words(list(HydraConfig.get().overrides.task), Path(config["out"]))
            runs = plan(config, given)
            others = beside(Path(config["out"]), runs, partial(text, given))
            planned.append((runs, others, config, given))

    with mistakes("compare"):
        if swept := [w for w in words if w in ("-m", "--multirun") or w.startswith("method=")]:
            raise ValueError(
                f"{swept[0]}: it compares methods=[...] x seeds=; `pipeback train -m` sweeps over anything"
            )
        check_words(words)
    sys.argv[1:] = words
    said = "pipeback compare: stopped. The same command goes on: finished runs are taken over"
    with stoppable(said), ExitStack() as held:
        start("compare", task)
        for runs, others, config, given in planned:  # empty if Hydra was asked for something else (--help, --cfg job)
            with mistakes("compare"), full_disk.writing(config["out"]):
                console = report_console()
                console.file = sys.stdout  # the present one: a run in this process has its own
                compare(runs, others, config, given, words, console)


if __name__ == "__main__":
    from pipeback.recipes import compare as module  # not __main__: other processes import what is sent to them

    module.main()
