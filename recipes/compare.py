"""Trains every method on the same data, from the same weights, in the same order; then writes a report.

    pipeback compare experiment=digits
    python recipes/compare.py methods=[sgd,pb,{pb:{slack:1}},cerebras] seeds=3 model.depth=29

This does the same as `pipeback train -m method=sgd,pb,... seed=0,1,2`, but checks everything before it starts, shows
progress bars, and ends with `pipeback report`. `out` holds a folder per run, and report.html. A run that fails
or diverges does not stop the others.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
import traceback
from collections.abc import Mapping
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console

from pipeback.recipes import build
from pipeback.recipes.callbacks import ProgressFile, tell
from pipeback.recipes.command import explained, mistakes, quoted, start
from pipeback.recipes.live import Live, state
from pipeback.recipes.report import console as report_console
from pipeback.recipes.report import literal, report
from pipeback.recipes.schemas import Compare, check
from pipeback.recipes.train import as_yaml, quiet, run, task_of, trainer_of

ALL = ("sgd", "pb", "sc", "lwp", "cerebras", "lwp_w_sc", "pipedream", "spectrain", "pipemare", "gpipe", "one_f_one_b",
       "pipedream_2bw", "pipedream_slack2", "spectrain_slack2")  # fmt: skip
FEW = ("sgd", "pb", "cerebras", "gpipe")
OWN = re.compile(r"(methods|seeds|seed|jobs|keep|out)=")  # options that are not passed on to `train` unchanged


class Run(NamedTuple):
    label: str
    seed: int
    out: Path


def plan(config: Mapping[str, Any], words: list[str]) -> list[Run]:
    """List the runs. Every method is built once here, so that a mistake is reported before anything starts."""
    data = build.data(config["data"], config["batch_size"], config["seed"])
    asked, labels = config["methods"], []
    for label in map(entry, asked or (FEW if config["quick"] else ALL)):
        values = composed(words, label, config["seed"])
        try:
            task_of(values, data, trainer_of({**values, "logger": {}, "callbacks": {}})[0])
        except ValueError as error:
            if asked is None and label != "sgd":  # sgd runs with any optimizer, so its error is an error of the config
                continue
            raise ValueError(str(error) if label in str(error) else f"{label}: {error}") from error
        labels.append(label)
    # longest first would use two processes best, but readers wait for sgd and pb, and seeds belong together
    seeds = range(config["seed"], config["seed"] + config["seeds"])
    return [Run(label, seed, Path(config["out"]) / f"{label}-seed{seed}") for seed in seeds for label in labels]


def composed(words: list[str], label: str, seed: int) -> dict[str, Any]:
    """Return the config of one run, as `pipeback train` composes it."""
    return check(hydra.compose("train", [*words, f"method={label}", f"seed={seed}", f"label={label}"]))


def done(run: Run, words: list[str]) -> bool:
    """Whether the run was finished earlier with this very configuration."""
    config = run.out / "config.yaml"
    return (
        state(run.out).get("state") in ("finished", "diverged")
        and config.is_file()
        and config.read_text() == as_yaml(composed(words, run.label, run.seed))
    )


def entry(method: Any) -> str:
    """Return the name of an entry of the group method; for {pb: {slack: 1}} an entry pb-slack1 is made."""
    if isinstance(method, str):
        return method
    if not isinstance(method, Mapping) or not all(isinstance(options, Mapping) for options in method.values()):
        raise ValueError(f"methods: {method!r} is neither a name nor {{name: {{option: value}}}}")
    ((name, options),) = method.items()
    label = "-".join([name, *(f"{k}{v}" for k, v in options.items())])
    ConfigStore.instance().store(group="method", name=label, node={"defaults": [name, "_self_"], **options})
    return label


def train_words(words: list[str], out: Path) -> list[str]:
    """Return the options as `pipeback train` takes them."""
    kept = [word for word in words if not OWN.match(word)]
    callbacks = [] if any(word.startswith("callbacks=") for word in kept) else ["callbacks=minimal"]
    return [*kept, *callbacks, f"out={literal(f'{out}/${{label}}-seed${{seed}}')}"]


def launcher(words: list[str], jobs: int, console: Console) -> list[str]:
    """Choose the launcher of Hydra: the user's, or joblib for several processes if it is installed."""
    if any(word.startswith("hydra/launcher=") for word in words) or jobs == 1:
        return []
    if find_spec("hydra_plugins") is None or find_spec("hydra_plugins.hydra_joblib_launcher") is None:
        console.print("one run after the other: several at a time need `pip install hydra-joblib-launcher`")
        return []
    return ["hydra/launcher=joblib", f"hydra.launcher.n_jobs={jobs}"]


def work(values: dict[str, Any]) -> None:
    """Do one run. It writes its progress to progress.json, and its output to log.txt."""
    out = Path(values["out"])
    file = out / "progress.json"
    tell(file, state="running")
    with open(out / "log.txt", "w") as log, redirect_stdout(log), redirect_stderr(log):
        quiet()
        try:
            found = run(values, [ProgressFile(file)])
        except Exception as error:
            traceback.print_exc()
            tell(file, state="failed", error=explained(error))
        else:
            tell(file, state="diverged" if found["diverged"] else "finished", **found)


def compare(runs: list[Run], kept: set[str], config: Mapping[str, Any], words: list[str], console: Console) -> None:
    """Do the runs that are not in a kept folder, then write the report."""
    out = Path(config["out"])
    planned = {each.out for each in runs}
    todo = [each for each in runs if str(each.out) not in kept]
    for each in todo:
        (each.out / "progress.json").unlink(missing_ok=True)
    for old in out.glob("*/progress.json"):
        if old.parent not in planned and not config["keep"]:
            shutil.rmtree(old.parent)  # a run of an earlier comparison, which would enter this one's tables
    if kept:
        console.print(f"{len(kept)} of {len(runs)} runs are there already", highlight=False)

    def job(settings: DictConfig) -> None:
        values = check(settings)
        if values["out"] not in kept:
            work(values)

    began = time.perf_counter()
    if todo:
        seeds = ",".join(dict.fromkeys(str(run.seed) for run in runs))
        labels = ",".join(dict.fromkeys(run.label for run in runs))
        sweep = [f"seed={seeds}", f"method={labels}", f"hydra.sweep.dir={literal(str(out))}"]
        sys.argv[1:] = ["-m", *train_words(words, out), *sweep, *launcher(words, config["jobs"], console)]
        with Live({run.out: f"{run.label} [dim]seed {run.seed}[/dim]" for run in todo}, console):
            try:
                start("compare", job, "train")
            except BrokenProcessPool as error:
                raise SystemExit("pipeback compare: a process died (out of memory?); try jobs=1") from error
    seconds, plural = time.perf_counter() - began, "" if len(todo) == 1 else "s"
    console.print(f"{len(todo)} run{plural} in {seconds:.0f} s\n", highlight=False)
    sys.argv[1:] = words  # as typed, for the report
    failed = [run for run in runs if state(run.out).get("state") == "failed"]
    if len(failed) < len(runs):
        report([out], out / "report.html", console)
    if failed:
        sys.exit("\n".join(f"{run.label}, seed {run.seed} failed; {run.out / 'log.txt'} tells how" for run in failed))


def main() -> None:
    words = [quoted(word) for word in sys.argv[1:]]
    planned: list[tuple[list[Run], set[str], dict[str, Any]]] = []

    def task(settings: DictConfig) -> None:
        with mistakes("compare"):
            quiet()
            config = check(settings, Compare)
            given = train_words(list(HydraConfig.get().overrides.task), Path(config["out"]))
            runs = plan(config, given)
            planned.append((runs, {str(r.out) for r in runs if config["keep"] and done(r, given)}, config))

    with mistakes("compare"):
        if swept := [w for w in words if w in ("-m", "--multirun") or w.startswith("method=")]:
            raise ValueError(
                f"{swept[0]}: it compares methods=[...] x seeds=; `pipeback train -m` sweeps over anything"
            )
    sys.argv[1:] = words
    start("compare", task)
    for runs, kept, config in planned:  # empty if Hydra was asked for something else (--help, --cfg job)
        with mistakes("compare"):
            console = report_console()
            console.file = sys.stdout  # the present one: a run in this process has its own
            compare(runs, kept, config, words, console)


if __name__ == "__main__":
    from pipeback.recipes import compare as module  # not __main__: other processes import what is sent to them

    module.main()
