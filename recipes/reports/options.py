"""Options: the options of runs by flat names, and the options in which runs or methods differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipeback.recipes.reports.sources import Run, canonical

# the options of a config that define a run; the rest says where and how it was run
CHOSEN = ("model", "data", "task", "optimizer", "method", "trainer",
          "batch_size", "micro_batch_size", "epochs", "max_steps")  # fmt: skip
# the same for runs without a config
FACTS = ("method_options", "optimizer", "batch_size", "micro_batch_size", "epochs", "stages")
# options that do not change the numbers; the strategy repeats the method
ASIDE = ("seed", "root", "default_root_dir", "strategy", "accelerator", "log_every_n_steps", "enable_progress_bar")


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}; options without a value are left out."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name in ASIDE or value is None:
            continue
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def chosen(run: Run, config: bool) -> dict[str, Any]:
    """Return the options that define this run, from its config or else from its facts."""
    source, names = (run.config, CHOSEN) if config else (run.facts, FACTS)
    return flat({name: source[name] for name in names if name in source})


def differing(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names whose values differ between the dictionaries."""
    names = dict.fromkeys(name for each in found for name in each)
    return [name for name in names if len({canonical(each.get(name)) for each in found}) > 1]


def told_apart(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return label -> runs that differ in the seed alone. A label has the method and the options that differ."""
    experiments = {run.facts.get("experiment") for run in runs}
    by_label: dict[str, list[Run]] = {}
    for run in runs:
        label = str(run.facts.get("method") or run.origin.replace("\\", "/").rpartition("/")[2])
        if len(experiments) > 1 and run.facts.get("experiment"):
            label += f", {run.facts['experiment']}"
        by_label.setdefault(label, []).append(run)
    found: dict[str, list[Run]] = {}
    for label, some in by_label.items():
        known = [chosen(run, all(run.config for run in some)) for run in some]
        names = differing(known)
        for run, each in zip(some, known, strict=True):
            told = " ".join(f"{name.rpartition('.')[2]}={text(each[name])}" for name in names if name in each)
            found.setdefault(f"{label} {told}".strip(), []).append(run)
    return found


def text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


def table(groups: Mapping[str, Sequence[Run]]) -> tuple[list[str], list[list[str]]]:
    """Return the names of the options in which methods differ, and their values, a row per method.

    Options that differ within a method (by seed) are left out, and so are those that others determine.
    """
    known = {label: [_all(run) for run in runs] for label, runs in groups.items()}
    within = {name for each in known.values() for name in differing(each)}
    firsts = [each[0] for each in known.values()]
    names = [name for name in differing(firsts) if name not in within]
    rows = [[label, *(text(each[0].get(name, "–")) for name in names)] for label, each in known.items()]
    return ["method", *names], rows


def _all(run: Run) -> dict[str, Any]:
    """Return the options of a run: the method's as one text, the rates as the optimizer got them, and the rest."""
    given = {**run.config, **{name: run.facts[name] for name in ("optimizer", *FACTS[2:5]) if name in run.facts}}
    listed = flat({name: given[name] for name in CHOSEN if name in given and name != "method"})
    return {"options": written(run.facts.get("method_options") or {}), **listed}


def written(method: Mapping[str, Any]) -> str:
    """{"name": "pipedream", "slack": 2} -> slack=2; a chain is written part by part."""
    if "chain" in method:
        return " + ".join(f"{part.get('name', '')} {written(part)}".strip() for part in method["chain"])
    return (
        " ".join(f"{k}={text(v)}" for k, v in method.items() if v is not None and k not in ("name", "_target_")) or "–"
    )


def shared(runs: Sequence[Run], names: Iterable[str]) -> dict[str, str]:
    """Return the facts of these names; if runs differ, all values that were found."""
    found = {}
    for name in names:
        values = dict.fromkeys(text(run.facts[name]) for run in runs if run.facts.get(name) is not None)
        if values:
            found[name] = ", ".join(values)
    return found
