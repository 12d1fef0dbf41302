"""The files of finished runs, read and gathered by method; means and spreads of their numbers."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from pipeback.recipes.train import Record

# the order of the rows; a family shares a panel of the picture, the references stand in every one
REFERENCES = ("sgd", "pb")
FAMILIES = {
    "Spike compensation, weight prediction": ("sc", "lwp", "cerebras", "lwp_w_sc"),
    "Stashing, prediction, rescheduling": ("pipedream", "spectrain", "pipemare"),
    "Update size above one": ("gpipe", "one_f_one_b", "pipedream_2bw"),
}
KNOWN = (*REFERENCES, *(name for family in FAMILIES.values() for name in family))


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
        """The label without its slack."""
        return self.label.split(" ")[0]

    @property
    def epochs(self) -> int:
        return self.head["samples"] // self.head["epoch_samples"]

    @property
    def diverged(self) -> int:
        """How many seeds."""
        return sum(result["diverged"] for result in self.results)

    @property
    def unstable(self) -> bool:
        """Whether its loss ends well above that of guessing, if it is not yet infinite."""
        losses = self.after(self.epochs, "loss")
        return bool(losses) and statistics.fmean(losses) > 2 * math.log(self.head["classes"])

    @property
    def fate(self) -> str:
        """In a word, where there is no accuracy worth a place in a picture."""
        if self.diverged and (self.unstable or not self.after(self.epochs)):
            return "diverged"
        return "unstable" if self.unstable else ""

    @property
    def equal_slack(self) -> bool:
        """Whether the run was made to compare at slack 2."""
        return self.label.endswith("slack=2")

    @property
    def equal_delay(self) -> bool:
        """Whether it runs at slack 2: by its counted delay, or because the run was made for that."""
        return self.equal_slack or self.head["delays"][0] == 2 * (self.head["stages"] - 1)

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
    for file in files:
        try:
            records = [json.loads(line) for line in file.read_text().splitlines() if line]
            head = next(r for r in records if r["kind"] == "run")
        except (json.JSONDecodeError, KeyError, TypeError, StopIteration, UnicodeDecodeError) as error:
            raise ValueError(f"{file} is not a file of a run") from error
        runs.setdefault(head["label"], []).append(records)
    methods = [Method(label, runs[label]) for label in sorted(runs)]
    return sorted(methods, key=lambda m: KNOWN.index(m.base) if m.base in KNOWN else len(KNOWN)), configs


def spread(values: Sequence[float], form: str, scale: float = 1.0) -> str:
    """Mean, and standard deviation over seeds where there are several."""
    if not values:
        return "–"
    if max(values) * scale >= 1000:
        form = ".0e"
    text = format(scale * statistics.fmean(values), form)
    return f"{text} ±{format(scale * statistics.stdev(values), form)}" if len(values) > 1 else text
