"""Every method on the same data, from the same weights, in the same order; then tables, pictures and one page.

    pipeback compare experiment=digits
    python recipes/compare.py methods=[sgd,pb,cerebras] seeds=3 method.pb.slack=1 model.depth=29

Two processes run side by side, one torch thread each (`jobs=`). Everything is written under `out`: config.yaml,
runs/*.jsonl, the tables, the pictures and report.html; `pipeback report <out>` makes the last three anew.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import hydra
import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

import pipeback
from pipeback.recipes import report
from pipeback.recipes.data import DATA
from pipeback.recipes.train import Record, build, choose, fail, pipeline, resolved, store, suggestion, train
from pipeback.timeline import delays


class Run(NamedTuple):
    label: str
    options: Mapping[str, Any]  # the method's conf entry
    seed: int

    @property
    def file(self) -> str:
        return f"{self.label}-seed{self.seed}".replace(" ", "-").replace("=", "") + ".jsonl"


def plan(config: Record) -> list[Run]:
    """What is to be run; every pipeline is built once here, so that a mistake shows before anything starts."""
    entries = config["method"]
    chosen: dict[str, Mapping[str, Any]] = {}
    for name in config["methods"]:
        if name not in entries and name not in pipeback.methods.available():
            known = sorted({*entries, *pipeback.methods.available()})
            raise ValueError(f"unknown method {name!r}{suggestion(name, known)}; there are {', '.join(known)}")
        chosen[name] = entries.get(name, {"name": name})
    if config["equal_delay"]:
        for name in list(chosen):
            if (equal := at_slack(chosen[name], 2)) is not None:
                chosen[f"{name} slack=2"] = equal
    data = choose(DATA, "data", config["data"])()
    for name, options in chosen.items():
        try:
            pipeline(config, options, data, config["seed"])
        except ValueError as error:
            raise ValueError(str(error) if name in str(error) else f"{name}: {error}") from error
    # the longest first would fill two processes best; but a reader waits for sgd and pb, and seeds belong together
    return [
        Run(label, options, config["seed"] + n) for n in range(config["seeds"]) for label, options in chosen.items()
    ]


def at_slack(options: Mapping[str, Any], slack: int) -> Mapping[str, Any] | None:
    """The same method at another slack; None where its delay, in updates, is no other there."""
    changed = copy.deepcopy(dict(options))
    for entry in changed.get("chain", [changed]):
        if "slack" not in entry:
            return None
        entry["slack"] = slack
    before, after = (delays(build(o).schedule, 8) for o in (options, changed))
    return None if before == after else changed


def work(run: Run, config: Record, tell: Callable[[Run, Record], None]) -> list[Record]:
    """One run; `tell` hears every record at once, the live loss included. Returns what is to be kept."""
    torch.set_num_threads(1)
    kept = []
    for record in train(config, run.options, run.label, run.seed):
        tell(run, record)
        if record["kind"] != "step":
            kept.append(record)
    return kept


_queue: Any = None  # of a child process: where its records go


def _connect(queue: Any) -> None:
    global _queue
    _queue = queue


def _work_in_child(run: Run, config: Record) -> list[Record]:
    return work(run, config, lambda run, record: _queue.put((run, record)))


class Live:
    """Progress bars: one for everything, one for each run that is under way, with its loss."""

    def __init__(self, progress: Progress, runs: list[Run]) -> None:
        self.progress = progress
        self.tasks: dict[str, TaskID] = {}
        self.done: dict[str, Record] = {}
        self.all = progress.add_task(f"[bold]{len(runs)} runs", total=len(runs), note="")

    def __call__(self, run: Run, record: Record) -> None:
        if record["kind"] == "run":
            name = f"{run.label} [dim]seed {run.seed}"
            self.tasks[run.file] = self.progress.add_task(name, total=record["samples"], note="")
        elif record["kind"] == "step":
            self.progress.update(self.tasks[run.file], completed=record["samples"], note=f"loss {record['loss']:6.3f}")
        elif record["kind"] == "test":
            self.done[run.file] = record
        else:
            self.progress.remove_task(self.tasks.pop(run.file))
            self.progress.advance(self.all)
            end = "[red]diverged" if record["diverged"] else f"accuracy {self.done[run.file]['accuracy']:6.1%}"
            rate = "" if record["diverged"] else f"   {record['samples_per_second']:5,.0f} samples/s"
            self.progress.console.print(f"  {run.label:<22} seed {run.seed}   {end}{rate}", highlight=False)


def run_all(runs: list[Run], config: Record, live: Live, keep: Callable[[Run, list[Record]], None]) -> None:
    if min(config["jobs"], len(runs)) == 1:
        for run in runs:
            keep(run, work(run, config, live))
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the children when they import torch
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()

    def listen() -> None:
        for run, record in iter(queue.get, None):
            live(run, record)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    with ProcessPoolExecutor(config["jobs"], context, initializer=_connect, initargs=(queue,)) as pool:
        futures = {pool.submit(_work_in_child, run, config): run for run in runs}
        try:
            for future in as_completed(futures):
                keep(futures[future], future.result())
        except BrokenProcessPool as error:
            raise SystemExit("pipeback compare: a process died (out of memory?); try jobs=1") from error
        finally:
            pool.shutdown(cancel_futures=True)
            queue.put(None)
            listener.join()


def compare(config: Record, console: Console) -> None:
    runs, out = plan(config), Path(config["out"])
    for old in (out / "runs").glob("*.jsonl"):
        old.unlink()  # of an earlier comparison: they would mix into this one's tables
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    began = time.perf_counter()
    with Progress(*columns, console=console) as progress:
        run_all(runs, config, Live(progress, runs), lambda run, records: store(out / "runs" / run.file, records))
    OmegaConf.save(OmegaConf.create(config), out / "config.yaml")
    console.print(f"{len(runs)} runs in {time.perf_counter() - began:.0f} s\n", highlight=False)
    report.report([out], out / "report.html", console)


@hydra.main(config_path="pkg://pipeback.conf", config_name="compare", version_base="1.3")
def main(config: DictConfig) -> None:
    try:
        compare(resolved(config), report.console())
    except (ValueError, TypeError, OmegaConfBaseException) as error:
        fail("compare", error)


if __name__ == "__main__":
    main()
