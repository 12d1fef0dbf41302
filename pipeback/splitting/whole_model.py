"""Whole model: a model that is one stage and is not traced into: leaves=[""], which is its path in named_modules().

Its forward simply runs. So it may decide by values of its own layers, keep numbers in attributes, call other packages
and compute gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from pipeback.splitting.cut_points import Cuts
from pipeback.splitting.partition import plain

PATH = "model"


class WholeModel(nn.Module):
    """A module whose only child is the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def training(self) -> bool:
        """The mode of the model itself, which the user sets."""
        inner = vars(self).get("_modules", {}).get(PATH)
        return inner is None or inner.training

    @training.setter
    def training(self, mode: bool) -> None:
        pass

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


def warn_of_one(model: nn.Module, cuts: Cuts, leaves: Sequence[str]) -> None:
    """Warn that the modules which `leaves` keep whole make the whole model one stage, if nobody asked for one."""
    kept = [model.get_submodule(path) for path in leaves]
    layers = [m for top in kept for m in top.modules() if any(True for _ in m.parameters(recurse=False))]
    if not isinstance(cuts, str) or len(layers) < 2:
        return
    inner = [path for top in leaves for path in _called(model, top)]
    cuts = "layer" if cuts == "auto" and isinstance(model, nn.Sequential) else cuts  # "auto" keeps its children whole
    finer = "layer" if plain(model) else cuts  # "auto" keeps the children of a sequence whole
    first = "" if finer == "auto" else f"{finer!r}, "
    warnings.warn(
        f"leaves={list(leaves)!r} keep {len(layers)} layers of {type(model).__name__} whole, so that it is one stage "
        f"and nothing is pipelined; keep less whole: stages=pipeback.Splitting({first}leaves={inner!r}), or ask for "
        f"one: stages=pipeback.Splitting(1, leaves={list(leaves)!r})",
        stacklevel=2,
    )


def _called(model: nn.Module, path: str) -> Iterator[str]:
    """The paths of the modules in this one that can be called; lists of modules are not."""
    for name, child in model.get_submodule(path).named_children():
        inside = f"{path}.{name}"
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _called(model, inside)
        else:
            yield inside


def check_one(cuts: Cuts) -> None:
    """Raise ValueError if the cuts ask for more than one stage."""
    if not isinstance(cuts, str) and cuts != 1:
        raise ValueError(
            f"leaves=[''] keeps the whole model one stage, but stages={cuts!r}; give "
            "stages=pipeback.Splitting(1, leaves=[''])"
        )
