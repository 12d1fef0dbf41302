"""Jobs: the runs of a sweep, and from where each goes on.

A run goes to LABEL-OPTIONS-lrRATE-seedSEED. If another run lies there, or is to, it goes to …-2, -3, and so on. One of
the same configuration is taken over if it is finished, and goes on from its last checkpoint if it was not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from itertools import chain, count, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from pipeback.recipes.live import state
from pipeback.recipes.method_entries import typed
from pipeback.recipes.run_folders import config_in

RATE = "optimizer.lr"
OWN = {  # options that a sweep sets for each run, and what to give instead
    "seed": "use seeds=",
    "seeds": "use seeds= beside vary=",
    "method": "use methods=",
    "methods": "use methods= beside vary=",
    "rates": "use rates= beside vary=",
    **dict.fromkeys(("label", "out", "name", "ckpt_path", "vary", "jobs", "reference"), "leave it out of vary="),
}


class Job(NamedTuple):
    """A run of a sweep. options: what is varied, and its value in this run."""

    label: str
    options: dict[str, Any]
    seed: int
    out: Path
    done: bool
    values: dict[str, Any]  # the composed configuration

    @property
    def name(self) -> str:
        """How it is called where all runs are shown."""
        told = " ".join(f"{short(key)} {written(value)}" for key, value in self.options.items())
        return f"{self.label} [dim]{told} seed {self.seed}[/dim]"


def axes(config: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The options that are varied beside methods and seeds: name -> values. Raises ValueError for what is no list."""
    if not isinstance(config["vary"], Mapping | None):
        raise ValueError(
            f"vary={typed(config['vary'])} must map options to lists of values, for example "
            "'vary={batch_size:[16,32]}'"
        )
    found = dict(config["vary"] or {})
    for key in found:
        if key in OWN:
            raise ValueError(f"vary: {key} is set by the sweep itself, for each run; {OWN[key]}")
    if RATE in found and config["rates"] is not None:
        raise ValueError(f"vary: {RATE} is what rates= varies; leave one of both out, for example rates=null")
    if (rates := config["rates"]) is not None:
        by_method = rates.values() if isinstance(rates, Mapping) and rates else None
        found[RATE] = rates if by_method is None else list(dict.fromkeys(chain.from_iterable(map(_listed, by_method))))
    for key, values in found.items():
        if not isinstance(values, list) or not values:
            one = values or 1
            if key == RATE and config["rates"] is not None:
                raise ValueError(f"rates={values} must be a list of values, for example rates=[{one}]")
            raise ValueError(f"vary: {key} must have a list of values, for example 'vary={{{key}:[{one}]}}'")
    return found


def _listed(rates: Any) -> list[Any]:
    if not isinstance(rates, list) or not rates:
        raise ValueError(f"rates: a method must have a list of values, for example 'rates={{sgd:[{rates or 1}]}}'")
    return rates


def plain(label: str) -> str:
    """pb-slack1 -> pb"""
    return label.partition("-")[0]


def rates_of(label: str, rates: Any) -> list[Any] | None:
    """The rates of a method by its label, or by its name without options; None: those of all methods."""
    if not isinstance(rates, Mapping):
        return None
    for name in (label, plain(label)):
        if name in rates:
            return list(rates[name])
    raise ValueError(
        f"rates has none for {label}; name it, for example 'rates={{{label}:[1]}}', or give one list for all"
    )


def combinations(varied: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(varied, values, strict=True)) for values in product(*varied.values())]


def folder(label: str, options: Mapping[str, Any], seed: int) -> str:
    """The name of a run's folder."""
    parts = [label, *(f"{short(key)}{written(value)}" for key, value in options.items()), f"seed{seed}"]
    return re.sub(r"[^\w.,=+-]+", "_", "-".join(parts))


def short(key: str) -> str:
    """model.width -> width"""
    return key.rpartition(".")[2]


def written(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def placed(home: Path, text: str, taken: Container[Path] = ()) -> tuple[Path, bool]:
    """The folder of a run whose configuration is `text`, and whether it is done there already.

    taken: folders of other runs that are planned, whether or not they have begun.
    """
    for n in count(1):
        out = home if n == 1 else home.with_name(f"{home.name}-{n}")
        if out in taken:
            continue
        if not out.exists() or not any(out.iterdir()):
            return out, False
        if compared(config_in(out)) == compared(yaml.safe_load(text)):
            return out, state(out).get("state") in ("finished", "diverged")
    raise AssertionError


def compared(config: Mapping[str, Any]) -> str:
    """What configurations of one run have in common: all but its folder and the checkpoint that it goes on from."""
    rest = {k: v for k, v in config.items() if k != "ckpt_path"}
    return yaml.safe_dump(rest).replace(str(config.get("out")), "OUT")


def last_checkpoint(out: Path) -> Path | None:
    """The newest whole checkpoint of a run: a kill may have cut the newest one short."""
    files = [file for file in (out / "checkpoints").glob("*.ckpt") if file.stem.isdecimal()]
    for file in sorted(files, key=lambda file: int(file.stem), reverse=True):
        try:
            torch.load(file, map_location="cpu", weights_only=True)
        except Exception:  # whatever a cut file gives
            continue
        return file
    return None


Compose = Callable[..., tuple[dict[str, Any], str]]  # (label, options, seed[, folder]) -> configuration, and as YAML


def planned(options: Mapping[str, Sequence[dict[str, Any]]], seeds: Sequence[int], compose: Compose) -> list[Job]:
    """The runs: all of one seed before those of the next, so that every method is seen once as soon as possible.

    options: the choices of every method, by its label. Choices that one configuration has, as 1 and 1.0, are one run;
    of two runs whose folders would have one name, the second has the one with -2.
    """
    found, taken, told = [], set[Path](), set[str]()
    every = list({str(varied): varied for choices in options.values() for varied in choices}.values())
    for seed, varied, label in product(seeds, every, options):
        if varied not in options[label]:
            continue
        values, text = compose(label, varied, seed)
        if (same := compared(yaml.safe_load(text))) in told:
            continue
        out, done = placed(Path(values["out"]), text, taken)
        told.add(same)
        taken.add(out)
        if str(out) != values["out"]:  # loggers and callbacks write there, too
            values, _ = compose(label, varied, seed, out)
        found.append(Job(label, varied, seed, out, done, values))
    return found
