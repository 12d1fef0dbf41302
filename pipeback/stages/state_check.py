"""State check: checks that a saved state belongs to this stage, before anything of it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pipeback.counts import counted
from pipeback.stages.masters import HALF
from pipeback.stages.stage import Stage

_MASTERED = [{half, torch.float32} for half in HALF]


class Corrupt(ValueError):
    """A state that does not fit this pipeline; the message says where and what to do."""


def check(stage: Stage, tensors: Mapping[str, Tensor], plain: dict[str, Any]) -> None:
    """Raise `Corrupt` unless the weights and buffers of the state are this stage's, by name and shape, and the same
    weights train. Values that belong to a weight are stored by its number among those that do.
    """
    _check_ranks(stage, plain)
    whole = named(stage)
    if not stage.masters.wanted:
        whole["weight"] = dict(stage.module.named_parameters())  # in a store there may be other shapes
    for kind, mine in whole.items():
        theirs = {k.removeprefix(f"{kind}/"): v for k, v in tensors.items() if k.startswith(f"{kind}/")}
        where = stage.label
        if different := sorted(set(mine) ^ set(theirs)):
            has = "the state lacks" if different[0] in mine else "the model lacks"
            raise Corrupt(
                f"{where}: {has} {kind} {different[0]!r}; this state belongs to another model; build that one"
            )
        for name, value in mine.items():
            if kind == "weight" and name in _sparse(stage) and value.dtype == theirs[name].dtype:
                continue  # there may be more survivors there, or fewer
            piece = kind == "weight" and stage.home.share is not None and stage.home.share.fits(name, theirs[name])
            if piece and value.dtype == theirs[name].dtype:
                continue  # of a store's own folder, which has what this rank keeps
            if value.shape == theirs[name].shape and {value.dtype, theirs[name].dtype} in _MASTERED:
                raise Corrupt(
                    f"{where}: {kind} {name!r} is {value.dtype} here, but {theirs[name].dtype} in the state: one of "
                    "them keeps float32 masters of weights of a half type; build both with the same masters="
                )
            if value.shape != theirs[name].shape or value.dtype != theirs[name].dtype:
                raise Corrupt(
                    f"{where}: {kind} {name!r} is {tuple(value.shape)} {value.dtype} here, but "
                    f"{tuple(theirs[name].shape)} {theirs[name].dtype} in the state, which belongs to another model; "
                    "build that one"
                )
    there, now = plain.get("device"), None if stage.device is None else stage.device.type
    if plain["flights"] and "random" in tensors and there and now and there != now:
        raise Corrupt(
            f"{stage.label}: it draws random numbers (dropout and the like), and micro-batches in flight that have "
            f"drawn on {there} cannot continue on {now}; drain() before state_dict() there, or load where it was saved"
        )
    kinds, before = types(stage), plain.get("types", types(stage))
    if plain["flights"] and kinds != before:  # where one of them has masters, the saved weights may be alike
        raise Corrupt(
            f"{stage.label}: its micro-batches in flight were computed with weights of "
            f"{' and '.join(sorted(set(before)))}, and here they are of {' and '.join(sorted(set(kinds)))}; call "
            "pipe.drain() there before the state is taken, or build the pipeline with weights of that type"
        )
    trains = trained(stage)
    if different := sorted(set(trains) ^ set(plain.get("trained", trains))):
        here, there = ("trains", "frozen") if different[0] in trains else ("is frozen", "trained")
        raise Corrupt(
            f"{stage.label}: weight {different[0]!r} {here} here, but was {there} in the state; set requires_grad as "
            "it was, and build a new Pipeline; what was frozen since it was built can be frozen after that"
        )
    if plain.get("members", members(stage)) != members(stage):
        raise Corrupt(
            f"{stage.label}: the optimizer's parameter groups have other weights than in the state, and would be given "
            "each other's options; build the pipeline with the same groups of weights, in the same order"
        )


def _check_ranks(stage: Stage, plain: dict[str, Any]) -> None:
    """Raise `Corrupt` if micro-batches in flight hold activations that were spread over another number of ranks."""
    shards = stage.home.shards
    here, there = 1 if shards is None else shards.count, plain.get("ranks", 1)
    if plain.get("shards", here) != here:
        raise Corrupt(
            f"{stage.label}: this store has one of {plain['shards']} shards of its weights, but "
            f"{counted(here, 'rank')} would go on here; build the pipeline with tensor_parallel={plain['shards']}, or "
            "load a checkpoint"
        )
    graphs = any(flight.get("again") is None for flight in plain["flights"].values())
    if here != there and ("ranks" in plain or (graphs and shards is not None and shards.cuts)):
        raise Corrupt(
            f"{stage.label}: its micro-batches in flight hold activations as {counted(there, 'rank')} computed them, "
            f"and here {counted(here, 'rank')} would go on; build the pipeline with tensor_parallel={there}, or call "
            "pipe.drain() there before the state is taken"
        )


def trained(stage: Stage) -> list[str]:
    """The names of the weights that train, in the order of their numbers."""
    mine = {id(p) for p in stage.params}
    return [name for name, p in stage.module.named_parameters() if id(p) in mine]


def members(stage: Stage) -> list[list[int]]:
    """The numbers of the weights in each parameter group of the optimizer."""
    numbers = {id(w): n for n, w in enumerate(stage.weights)}
    groups = stage.optimizer.param_groups
    return [sorted(numbers[id(w)] for w in group["params"] if id(w) in numbers) for group in groups]


def types(stage: Stage) -> list[str]:
    """The types that the weights are computed with; masters are of another one."""
    return [str(p.dtype) for p in stage.module.parameters()]


def named(stage: Stage) -> dict[str, dict[str, Tensor]]:
    """The newest weights by name, wherever they live (masters, for those that have them), and the buffers."""
    return {"weight": _weights(stage), "buffer": dict(stage.module.named_buffers())}


def _weights(stage: Stage) -> dict[str, Tensor]:
    mine: dict[str, Tensor] = dict(stage.module.named_parameters())
    if stage.masters.wanted:
        stepped = {id(p): w for p, w in zip(stage.params, stage.weights, strict=True)}
        return {name: stepped.get(id(p), p) for name, p in mine.items()}
    flat = stage.home.flat
    return mine if flat is None else dict(zip(mine, flat.views, strict=True))


def _sparse(stage: Stage) -> list[str]:
    """The names of the weights of which only some entries survive."""
    names = [name for name, p in stage.module.named_parameters() if p.requires_grad]
    return [] if stage.home.sparse is None else [names[n] for n in stage.home.sparse.numbers]
