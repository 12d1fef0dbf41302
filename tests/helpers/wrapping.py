"""An optimizer around another one, as Lookahead and its like are: groups and state are those of the one inside."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch


class Wrapping(torch.optim.Optimizer):
    param_groups = property(lambda self: self.inside.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.inside.state)  # type: ignore[assignment]

    def __init__(self, inside: torch.optim.Optimizer) -> None:  # that of the base would set both
        self._optimizer_step_pre_hooks: Any = OrderedDict()
        self._optimizer_step_post_hooks: Any = OrderedDict()
        self._patch_step_function()
        self.inside, self.defaults = inside, inside.defaults

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.inside.step(closure)
