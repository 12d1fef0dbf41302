"""Schemas: check a config against dataclasses, for its top-level options and for the entries of our own groups.

An entry names a class or function (`name: digits`), so its dataclass is made from the signature of that, and nothing is
written twice. A user's own entry with `_target_` is left to Hydra. Hydra refuses unknown options on the command line;
the check here is of the composed config, with the user's own files, and does not need Hydra's ConfigStore.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass as schema
from dataclasses import field, fields, make_dataclass
from pathlib import Path
from typing import Any, Optional, Union

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import pipeback
from pipeback.recipes.command import in_one_line, no_option, suggestion


@schema
class Train:
    """The options of `pipeback train`; conf/train.yaml says what they mean."""

    name: str
    label: str
    quick: bool
    epochs: int
    max_steps: Optional[int]  # noqa: UP045 (OmegaConf reads these)
    seed: int
    batch_size: int
    micro_batch_size: Optional[int]  # noqa: UP045
    validate_every: Union[int, float]  # noqa: UP007
    threads: int
    ckpt_path: Optional[str]  # noqa: UP045
    out: str
    data: Any
    model: Any
    task: Any
    optimizer: Any
    method: Any
    sparsity: Any
    trainer: Any
    logger: Any
    callbacks: Any
    methods: Any = None  # the methods that an experiment gives to `pipeback compare`

    def __post_init__(self) -> None:
        for name in ("epochs", "max_steps", "batch_size", "micro_batch_size", "threads"):
            at_least_one(name, getattr(self, name))
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be a whole number from 0 to {2**32 - 1}, but is {self.seed}")
        check_folder(self.out)
        check_checkpoint(self.ckpt_path)
        if self.validate_every <= 0 or (isinstance(self.validate_every, float) and self.validate_every > 1):
            raise ValueError(
                f"validate_every={self.validate_every} must be a fraction of an epoch, above 0 and up to 1.0, or a "
                "whole number of batches"
            )


@schema
class Compare(Train):
    """The additional options of `pipeback compare`; conf/compare.yaml says what they mean."""

    seeds: int = 1
    jobs: int = 2
    again: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one("seeds", self.seeds)
        at_least_one("jobs", self.jobs)


@schema
class Sweep(Train):
    """The additional options of `pipeback sweep`; conf/sweep.yaml says what they mean."""

    rates: Any = None
    vary: Any = None
    seeds: int = 1
    jobs: int = 2
    reference: str = "sgd"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ckpt_path is not None:
            raise ValueError(
                f"ckpt_path={self.ckpt_path} is of one run, and each run of a sweep goes on from its own last "
                "checkpoint when the same command is given again; leave ckpt_path= out (ckpt_path=null)"
            )
        at_least_one("seeds", self.seeds)
        at_least_one("jobs", self.jobs)


def at_least_one(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, but is {value}")


def check_folder(out: str) -> None:
    """Raise ValueError if no folder can be made there."""
    if not out.strip():
        raise ValueError("out= names no folder; leave it out, or write for example out=outputs/mine")
    folder = Path(expanded(out))
    there = next((each for each in (folder, *folder.parents) if each.exists()), folder)
    if there.exists() and not there.is_dir():
        raise ValueError(f"out={out}: {there} is a file, and a run needs a folder; give another out=")


def check_checkpoint(ckpt_path: str | None) -> None:
    """Raise ValueError for a file that torch has not saved; whether it is there is asked later."""
    if ckpt_path is None or not Path(expanded(ckpt_path)).is_file():
        return
    with open(expanded(ckpt_path), "rb") as file:
        if not file.read(2).startswith((b"PK", b"\x80")):  # a zip file, or a pickle as torch once wrote
            raise ValueError(f"ckpt_path={ckpt_path} is no checkpoint; give one that a run wrote, as its last.ckpt")


# arguments that the commands pass themselves, and options that are not passed on
GIVEN = {"data": ("batch_size", "seed"), "task": ("model", "optimizer"), "optimizer": ("params",)}
OURS: dict[str, list[tuple[str, Any]]] = {
    "optimizer": [("reference", Optional[int]), ("warmup", Optional[int]), ("decay", Optional[str])]  # noqa: UP045
}


def check(config: DictConfig, options: type[Train] = Train) -> dict[str, Any]:
    """Return the config as plain values of the right types. Raises ValueError, which says what was probably meant."""
    values = typed(options, texts(options, config), "")
    OmegaConf.to_object(values)  # this runs __post_init__
    found = OmegaConf.to_container(values, resolve=True)
    assert isinstance(found, dict)
    result: dict[str, Any] = {str(k): expanded(v) for k, v in found.items()}
    for group in ("data", "model", "task", "optimizer", "method", "sparsity"):
        result[group] = entry(group, result[group])
    for name in ("samples", "val_samples", "pairs"):
        if "_target_" not in result["data"] and isinstance(number := result["data"].get(name), int):
            at_least_one(f"data.{name}", number)
    check_sparsity_reaches(result["trainer"], result["sparsity"])
    return result


def texts(options: type, config: DictConfig) -> DictConfig:
    """The config with the options that are texts as such, out=5 too, also where others refer to them."""
    found = config.copy()
    for name in [f.name for f in fields(options) if f.type in (str, "str")]:
        if not OmegaConf.is_interpolation(found, name) and isinstance(value := found.get(name), int | float):
            found[name] = str(value)
    return found


def expanded(value: Any) -> Any:
    """The value with ~ and environment variables expanded in each text that is a path, also in "disk:~/weights"."""
    if isinstance(value, Mapping):
        return {k: expanded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [expanded(v) for v in value]
    if not isinstance(value, str) or not ("$" in value or value.removeprefix("disk:").startswith("~")):
        return value
    disk = "disk:" if value.startswith("disk:") else ""
    return disk + os.path.expanduser(os.path.expandvars(value.removeprefix("disk:")))


def check_sparsity_reaches(trainer: Any, sparsity: Mapping[str, Any]) -> None:
    """Raise ValueError if the trainer would ignore the chosen sparsity, and so train dense."""
    if sparsity.get("name") == "none":
        return
    chosen = f"sparsity={sparsity.get('name', sparsity.get('_target_'))}"
    strategy = trainer.get("strategy") if isinstance(trainer, Mapping) else None
    if not isinstance(strategy, Mapping):
        raise ValueError(f"{chosen} is of a pipeline, but trainer.strategy={strategy} has none; choose sparsity=none")
    if not str(strategy.get("_target_", "")).endswith(".PipelineStrategy"):
        return  # the user's own, which may pass it on in another way
    store = strategy.get("store")
    if not isinstance(store, Mapping):
        place = "null" if store is None else store
        raise ValueError(
            f"trainer.strategy.store={place} leaves {chosen} out, which stands in the group that it replaces; "
            f"write trainer.strategy.store.store={place}"
        )
    if store.get("_target_") == "pipeback.Streaming" and store.get("sparsity") is None:
        raise ValueError(
            f"trainer.strategy.store has no sparsity, so that {chosen} would train dense; choose sparsity=none"
        )


def entry(group: str, options: Any) -> dict[str, Any]:
    """Return an entry of a group, checked against the signature of what it names; one with `_target_` unchanged."""
    if not isinstance(options, Mapping):
        raise ValueError(f"{group} must be an entry of conf/{group} or name and options, but is {options!r}")
    if "_target_" in options:
        return dict(options)
    if group == "method" and "chain" in options:
        return {"chain": [entry("method", each) for each in options["chain"]]}
    if "name" not in options:
        raise ValueError(f"{group} has no name: write name: and options, or _target_: of your own")
    rest = OmegaConf.create({k: v for k, v in options.items() if k != "name"})
    made = signature_of(group, options["name"])
    found = OmegaConf.to_container(typed(made, rest, f"{group}."), resolve=True) if made else dict(options)
    assert isinstance(found, dict)
    if made and group in ("data", "model", "task"):  # elsewhere null stands for the default
        check_nulls(group, options, inspect.signature(named(group, options["name"])).parameters)
    for name, value in found.items() if group == "model" else ():
        if type(value) is int and value < (least := int(name != "depth")):
            raise ValueError(f"model.{name!s} must be a whole number of at least {least}, but is {value}")
    return {"name": options["name"], **{str(k): v for k, v in found.items() if k in options and k != "name"}}


def check_nulls(group: str, options: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter]) -> None:
    """Raise ValueError for an option of the entry that is null, and must be a number, a text, true or false."""
    for name, each in parameters.items():
        plain = each.annotation in PLAIN or getattr(each.annotation, "__name__", "") in PLAIN
        if plain and each.default is not None and options.get(name, each.default) is None:
            default = "" if each.default is each.empty else f", for example {group}.{name}={each.default}"
            raise ValueError(f"{group}.{name} must not be null; give a value{default}")


def typed(options: type, given: DictConfig, prefix: str) -> DictConfig:
    known = [f.name for f in fields(options)]
    for key in given:
        if key not in known:
            raise ValueError(no_option(f"{prefix}{key!s}", known))
    try:
        # resolved first, so that the value of an interpolation is checked
        plain = OmegaConf.create(OmegaConf.to_container(given, resolve=True))
        merged = OmegaConf.merge(OmegaConf.structured(options), plain)
    except OmegaConfBaseException as error:
        raise ValueError(f"{prefix}{error.full_key}: {in_one_line(error)}") from error
    assert isinstance(merged, DictConfig)
    return merged


def signature_of(group: str, name: Any) -> type | None:
    """Return a dataclass with the parameters of the entry `name` of this group; None if it takes any."""
    if group == "method":
        known(group, pipeback.methods.available(), name)
        parameters: Iterable[inspect.Parameter] = pipeback.methods.options(name).values()
    elif group == "sparsity":
        known(group, ["none", *pipeback.sparsities.available()], name)
        parameters = () if name == "none" else pipeback.sparsities.options(name).values()
    else:
        parameters = inspect.signature(named(group, name)).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    given = GIVEN.get(group, ())
    taken = [(p.name, kind(p.annotation, p.default), field(default=None)) for p in parameters if p.name not in given]
    ours = [(key, hint, field(default=None)) for key, hint in OURS.get(group, [])]
    return make_dataclass(f"{name}", [*taken, *ours])


PLAIN = {"str": str, "bool": bool, "int": int, "float": float}


def kind(annotation: Any, default: Any) -> Any:
    """Return the type as OmegaConf can check it; None is always allowed and stands for the default."""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    if (hint := PLAIN.get(text.removesuffix(" | None"))) is not None:
        return Optional[hint]  # noqa: UP045
    number = Union[int, float]  # noqa: UP007 (a default of 0 may be meant as 0.0)
    guess = {str: str, bool: bool, int: number, float: float}.get(type(default))
    return Any if guess is None else Optional[guess]  # noqa: UP045


def named(group: str, name: Any) -> Callable[..., Any]:
    """Return the class or function that an entry's `name` means. Raises ValueError, which lists the names."""
    things = table(group)
    known(group, things, name)
    return things[name]


def known(group: str, names: Iterable[str], name: Any) -> None:
    if name not in names:
        raise ValueError(f"unknown {group} {name!r}{suggestion(name, names)}; there are {', '.join(names)}")


def table(group: str) -> Mapping[str, Any]:
    """Return the classes or functions of a group by name; they are imported here since they need Lightning."""
    if group == "optimizer":
        from pipeback import optim

        return {k: v for module in (torch.optim, optim) for k, v in vars(module).items() if isinstance(v, type)}
    if group == "data":
        from pipeback.recipes.data import DATA

        return DATA
    if group == "model":
        from pipeback.recipes.models import MODELS

        return MODELS
    from pipeback.recipes.tasks import TASKS

    return TASKS
