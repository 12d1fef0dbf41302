"""Builds the objects that a config describes: data, model, task, optimizer, method, sparsity."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from hydra.utils import get_object, instantiate
from lightning.pytorch import LightningDataModule, LightningModule
from omegaconf import OmegaConf
from torch import nn

import pipeback
from pipeback.methods.base import Method
from pipeback.recipes.schemas import named
from pipeback.sparsities.base import Sparsity

Entry = Mapping[str, Any]
Optimizers = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def make(group: str, options: Entry, **given: Any) -> Any:
    """Make the object that an entry of a group or its `_target_` names, with its options and the arguments `given`."""
    if "_target_" in options:
        return instantiate(dict(options), **given)
    rest = {k: v for k, v in options.items() if k != "name"}
    return named(group, options["name"])(**rest, **given)


def data(options: Entry, batch_size: int, seed: int) -> LightningDataModule:
    """Make the data module and set it up, so that its facts are known."""
    given = {"batch_size": batch_size, "seed": seed}
    module = make("data", options, **{k: v for k, v in given.items() if k in parameters("data", options)})
    module.prepare_data()
    module.setup("fit")
    return module


def facts(data: LightningDataModule) -> dict[str, Any]:
    """Return the facts of the data that a model builder needs."""
    return getattr(data, "facts", {})


def epoch_samples(data: LightningDataModule, batch_size: int) -> int:
    return getattr(data, "epoch_samples", None) or len(data.train_dataloader()) * batch_size


def parameters(group: str, options: Entry) -> dict[str, inspect.Parameter]:
    """Return the parameters of the function or class that the entry names."""
    target = get_object(options["_target_"]) if "_target_" in options else named(group, options["name"])
    return dict(inspect.signature(target).parameters)


def model(options: Entry, facts: Mapping[str, Any], seed: int) -> nn.Module:
    """Make the model, with the same weights for every method, from its options and the facts of the data."""
    known = parameters("model", options)
    given = {k: v for k, v in facts.items() if options.get(k) is None}
    needed = {p.name for p in known.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    if needed <= {*given, *options} and not any(p.kind is p.VAR_KEYWORD for p in known.values()):
        given = {k: v for k, v in given.items() if k in known}  # a builder raises an error for a missing fact
    torch.manual_seed(seed)
    return make("model", {k: v for k, v in options.items() if k not in given}, **given)


def task(options: Entry, model: nn.Module, optimizer: Callable[[Iterable[nn.Parameter]], Any]) -> LightningModule:
    return make("task", options, model=model, optimizer=optimizer)


def method(options: Entry | Method | str) -> Method:
    """Make a method from its conf entry: a name with options (null: the library's default), or a chain of these."""
    if isinstance(options, Method):
        return options
    if isinstance(options, str):
        return pipeback.methods.create(options)
    if "_target_" in options:
        return instantiate(OmegaConf.create(dict(options)))
    if "chain" in options:
        return pipeback.chain(*(method(entry) for entry in options["chain"]))
    given = {k: v for k, v in options.items() if k != "name" and v is not None}
    return pipeback.methods.create(options["name"], **given)


def sparsity(options: Entry | Sparsity | str | None) -> Sparsity | None:
    """A policy of sparse training from its conf entry: a name with options (null: the library's default); or none."""
    if options is None or isinstance(options, Sparsity):
        return options
    if isinstance(options, str):
        options = {"name": options}
    if "_target_" in options:
        return instantiate(OmegaConf.create(dict(options)))
    given = {k: v for k, v in options.items() if k != "name" and v is not None}
    return None if options["name"] == "none" else pipeback.sparsities.create(options["name"], **given)


def update_size(method: Method | None, batch_size: int, micro_batch_size: int | None) -> int:
    """Return samples per update. batch_size: samples per step of Lightning. method None: one update per step."""
    if method is None or method.flush_each_push:
        return batch_size
    return min(micro_batch_size or batch_size, batch_size) * (getattr(method, "micro_batches", None) or 1)


def optimizer(options: Entry, update_size: int) -> tuple[Optimizers, dict[str, Any]]:
    """Return a function params -> optimizer, and its hyper-parameters, scaled to the update size for momentum SGD."""
    if "_target_" in options:
        found = {k: v for k, v in options.items() if k not in ("_target_", "warmup", "decay", "_partial_")}
        return partial(_instantiated, {**found, "_target_": options["_target_"]}), dict(options)
    given = {k: v for k, v in options.items() if k not in ("name", "reference", "warmup", "decay") and v is not None}
    build, reference = named("optimizer", options["name"]), options.get("reference")
    if reference is not None:
        if "momentum" not in given:
            raise ValueError(
                f"optimizer.reference scales rate and momentum; {options['name']} has none: set it to null"
            )
        if not given["lr"] >= 0:  # as it was typed, since torch would tell the scaled one
            raise ValueError(f"optimizer.lr must be a number of at least 0, but is {given['lr']}")
        given["lr"], given["momentum"] = pipeback.scale_hyperparameters(
            given["lr"], given["momentum"], reference, update_size
        )
    return partial(build, **given), {"name": options["name"], **given}


def _instantiated(entry: Entry, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return instantiate(dict(entry), params)


def scheduled(build: Optimizers, options: Entry, batches: Callable[[], float]) -> Callable[..., Any]:
    """Return a function for `configure_optimizers`: params -> the optimizer, with a rate by `warmup` and `decay`.

    batches: returns the number of batches in the training; it is called when that begins. The result can be pickled.
    """
    warmup, decay = options.get("warmup") or 0, options.get("decay")
    if decay not in (None, "linear", "cosine"):
        raise ValueError(f"optimizer.decay must be linear, cosine or null, but is {decay!r}")
    if warmup < 0:
        raise ValueError(f"optimizer.warmup is a number of batches, 0 or more, but is {warmup}")
    if not warmup and decay is None:
        return build

    return partial(_configured, build, warmup, decay, batches)


def _configured(
    build: Optimizers, warmup: int, decay: str | None, batches: Callable[[], float], params: Iterable[nn.Parameter]
) -> dict[str, Any]:
    optimizer = build(params)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(_factor, warmup, decay, batches()))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rates, "interval": "step"}}


def _factor(warmup: int, decay: str | None, total: float, batch: int) -> float:
    if batch < warmup:
        return (batch + 1) / warmup
    share = min(1.0, (batch - warmup) / max(1, total - warmup))
    return {None: 1.0, "linear": 1 - share, "cosine": (1 + math.cos(math.pi * share)) / 2}[decay]
