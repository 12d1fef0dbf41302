"""Whole model: a model that is not looked into at all, as one stage: leaves=[""], its path in named_modules().

Nothing is traced within it, so that whatever it does it does: decisions by values of its own layers, numbers that it
keeps in attributes, other packages, gradients of its own.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from pipeback.splitting.cut_points import Cuts

PATH = "model"


class WholeModel(nn.Module):
    """The model as the one module of another one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def training(self) -> bool:
        """The user sets the mode of the model itself."""
        inner = vars(self).get("_modules", {}).get(PATH)
        return inner is None or inner.training

    @training.setter
    def training(self, mode: bool) -> None:
        pass

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


def check_one(cuts: Cuts) -> None:
    """Raise ValueError where more than one stage is asked for."""
    if not isinstance(cuts, str) and cuts != 1:
        raise ValueError(
            f"leaves=[''] keeps the whole model one stage, but stages={cuts!r}; give "
            "stages=pipeback.Splitting(1, leaves=[''])"
        )
