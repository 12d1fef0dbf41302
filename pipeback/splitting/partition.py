"""Partition: cuts a model into stages, one per layer, and distributes stages over workers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from pipeback.counts import counted


class StagePart(NamedTuple):
    """One stage's module and the name it has in the user's model."""

    name: str
    module: nn.Module


def split(model: nn.Module | Sequence[nn.Module]) -> list[StagePart]:
    """Return the children of an nn.Sequential, or the modules of a list, as one stage each.

    Raises TypeError for any other model, and ValueError for an empty model, for weights that two stages share and for
    a stage of which only a part is on the meta device. The model is not changed.
    """
    if isinstance(model, nn.Sequential):
        # not named_children(), which gives a module that occurs twice (one ReLU, say) only once
        parts = [StagePart(name, module) for name, module in zip(model._modules, model, strict=True)]
    elif isinstance(model, (list, tuple, nn.ModuleList)):
        parts = [StagePart(str(n), module) for n, module in enumerate(model)]
    else:
        raise TypeError(
            f"model must be an nn.Sequential or a list of modules, one stage each, but is {type(model).__name__}; "
            "write it as nn.Sequential(...)"
        )
    if not parts:
        raise ValueError("the model is empty: it needs at least one module, and each becomes a stage")
    if isinstance(model, nn.Sequential) and type(model).forward is not nn.Sequential.forward:
        raise TypeError(
            f"{type(model).__name__} has a forward of its own, which stages one after the other would not follow; "
            "give its modules as a list, in the order in which they run"
        )
    owner: dict[int, tuple[int, str]] = {}
    for s, (name, module) in enumerate(parts):
        if not isinstance(module, nn.Module):
            raise TypeError(f"stage {s} must be a module, but is {type(module).__name__}; wrap a function in a module")
        for key, parameter in module.named_parameters():
            if isinstance(parameter, UninitializedParameter):
                raise ValueError(f"stage {s} ({name}): {key} has no shape yet; run a lazy module once before training")
            if parameter.is_inference():
                raise ValueError(
                    f"stage {s} ({name}): {key} was made in inference mode, which forbids training it; build the model "
                    "outside torch.inference_mode()"
                )
        parameters, buffers = list(module.named_parameters()), list(module.named_buffers())
        if len({tensor.is_meta for _, tensor in (*parameters, *buffers)}) > 1:
            raise ValueError(f"stage {s} ({name}) is on the meta device in part; build all of it there, or nothing")
        for n, (key, tensor) in enumerate([*parameters, *buffers]):
            kind = "parameter" if n < len(parameters) else "buffer"
            if not tensor.numel():
                continue
            # memory, not identity: views share too; on the meta device there is no memory, and sparse ones have several
            alone = tensor.is_meta or tensor.layout is not torch.strided
            place = id(tensor) if alone else tensor.data_ptr()
            first, other = owner.setdefault(place, (s, key))
            if first != s:
                raise ValueError(
                    f"stages {first} and {s} share a {kind} ({parts[first].name}.{other} is {name}.{key}); "
                    "a stage changes its own alone, so give each its own or put both layers into one stage"
                )
    return parts


def plain(model: nn.Module) -> bool:
    """Whether it is an nn.Sequential that runs its children one after the other."""
    return isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward


def declared(name: str, module: nn.Module) -> list[nn.Module]:
    """Return the stages that a module's pipeline_stages() gives.

    Raises TypeError if one is not a module, and ValueError if a trainable weight is in none of them.
    """
    method: Any = module.pipeline_stages
    parts = list(method())
    known = {id(p) for p in module.parameters() if p.requires_grad}
    held: set[int] = set()
    for n, part in enumerate(parts):
        if not isinstance(part, nn.Module):
            raise TypeError(
                f"{name}.pipeline_stages() gave a {type(part).__name__} as stage {n}; return modules, and wrap a "
                "function in one"
            )
        held |= {id(p) for p in part.parameters() if p.requires_grad}
    if missing := [n for n, p in module.named_parameters() if id(p) in known - held]:
        raise ValueError(
            f"{name}.pipeline_stages() leaves out {missing[0]}, which would not be trained; add it to a stage"
        )
    return parts


def join(parts: list[StagePart], count: int | None) -> list[StagePart]:
    """Return `count` stages of neighbouring modules, balanced by the bytes of their weights; None keeps all stages."""
    if count is None or count == len(parts):
        return parts
    if count > len(parts):
        raise ValueError(
            f"stages={count}, but the model has {counted(len(parts), 'module')} to share out; use that or less, or "
            '"auto"'
        )
    owner = balance([float(sum(p.numel() for p in part.module.parameters())) + 1e-3 for part in parts], count)
    found = []
    for n in range(count):
        group = [part for part, s in zip(parts, owner, strict=True) if s == n]
        if len(group) == 1:
            found.append(group[0])
            continue
        both = nn.Sequential(OrderedDict((part.name, part.module) for part in group))
        found.append(StagePart(f"{group[0].name}…{group[-1].name}", both))
    return found


def balance(times: Sequence[float], workers: int) -> list[int]:
    """Return the worker of each of S stages: neighbours go together, and the slowest worker is as fast as possible.

    times: seconds of each stage. workers: their number, at most S. It is the exact optimum over contiguous groups, by
    dynamic programming in O(S²·workers); every worker gets at least one stage. Raises ValueError for other `workers`.
    """
    n = len(times)
    if not 1 <= workers <= n:
        raise ValueError(f"workers must lie between 1 and the number of stages, {n}, but is {workers}")
    total = [0.0]
    for time in times:
        total.append(total[-1] + time)
    # best[k][j]: (time of the slowest of k workers on the first j stages, where the last of them begins)
    best = [[(float("inf"), 0)] * (n + 1) for _ in range(workers + 1)]
    best[0][0] = (0.0, 0)
    for k in range(1, workers + 1):
        for j in range(k, n + 1):
            best[k][j] = min((max(best[k - 1][i][0], total[j] - total[i]), i) for i in range(k - 1, j))
    owner = [0] * n
    end = n
    for k in range(workers, 0, -1):
        begin = best[k][end][1]
        owner[begin:end] = [k - 1] * (end - begin)
        end = begin
    return owner
