"""Run folders: where a comparison puts its runs, and which runs it takes over. Nothing that a run wrote is deleted.

A run of (label, seed) goes to LABEL-seedSEED. If another run lies there, it goes to LABEL-seedSEED-2, -3, and so on. A
finished run of the same configuration is taken over, wherever it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from pipeback.recipes.live import state

Compose = Callable[[str, int], str]  # (label, seed) -> the configuration of that run as YAML


class Run(NamedTuple):
    """A run of a comparison. home: the folder that its configuration names. out: where it goes, or lies already.

    stopped: whether `home` holds a run of this configuration that did not end.
    """

    label: str
    seed: int
    home: Path
    out: Path
    done: bool
    stopped: bool = False


def place(label: str, seed: int, home: Path, text: str, again: bool) -> Run:
    """The folder of a run whose configuration is `text`. again: it is not taken over, but done once more."""
    for n in count(1):
        out = home if n == 1 else home.with_name(f"{home.name}-{n}")
        if not _written(out):
            return Run(label, seed, home, out, done=False, stopped=alike(home, text) and not same(home, text))
        if not again and same(out, text):
            return Run(label, seed, home, out, done=True)
    raise AssertionError


def beside(out: Path, runs: list[Run], compose: Compose) -> list[Path]:
    """Finished runs in `out` that are not among these, but differ from what is compared in method and seed alone."""
    found = []
    for folder in sorted(each.parent for each in out.glob("*/progress.json")):
        told = config_in(folder)
        if folder in {run.out for run in runs} or not {"label", "seed"} <= set(told):
            continue
        try:
            text = compose(str(told["label"]), int(told["seed"]))
        except Exception:  # a label that this command does not make
            continue
        if same(folder, text) and not any((r.label, r.seed) == (told["label"], told["seed"]) for r in runs):
            found.append(folder)
    return found


def same(folder: Path, text: str) -> bool:
    """Whether a finished run of this configuration lies there."""
    return state(folder).get("state") in ("finished", "diverged") and alike(folder, text)


def alike(folder: Path, text: str) -> bool:
    """Whether a run of this configuration lies there; its own folder is not part of a configuration."""
    return _plain(config_in(folder)) == _plain(yaml.safe_load(text))


def _written(folder: Path) -> bool:
    return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))


def config_in(folder: Path) -> Mapping[str, Any]:
    """The configuration of the run in a folder; {} if there is none."""
    return _read(folder / "config.yaml")


def facts_in(folder: Path) -> Mapping[str, Any]:
    """The facts of the run in a folder; {} if there are none."""
    return _read(folder / "hparams.yaml")


def _read(file: Path) -> Mapping[str, Any]:
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (yaml.YAMLError, UnicodeDecodeError):
        found = {}
    return found if isinstance(found, Mapping) else {}


def _plain(config: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(config)).replace(str(config.get("out")), "OUT")
