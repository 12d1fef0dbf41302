"""Whole model: a model that is one stage and is not traced into: leaves=[""], which is its path in named_modules().

Its forward simply runs. So it may decide by values of its own layers, keep numbers in attributes, call other packages
and compute gradients.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from pipeback.splitting.cut_points import Cuts

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


def check_one(cuts: Cuts) -> None:
    """Raise ValueError if the cuts ask for more than one stage."""
    if not isinstance(cuts, str) and cuts != 1:
        raise ValueError(
            f"leaves=[''] keeps the whole model one stage, but stages={cuts!r}; give "
            "stages=pipeback.Splitting(1, leaves=[''])"
        )
