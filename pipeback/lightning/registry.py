"""The name "pipeback" of `Trainer(strategy=...)`, and a clear word to the other distribution of Lightning."""

from __future__ import annotations

import sys
from typing import Any

from lightning.pytorch.strategies import Strategy, StrategyRegistry

NAME = "pipeback"


def register(strategy: type[Strategy]) -> None:
    StrategyRegistry.register(NAME, strategy, description="pipelined backpropagation", override=True)
    # `pytorch_lightning` has a registry of its own. Where it is imported already, the name is given to it, so that
    # its Trainer says what is wrong instead of listing strategies.
    other: Any = sys.modules.get("pytorch_lightning.strategies")
    if other is not None:
        other.StrategyRegistry.register(NAME, _refuse, description="use lightning.pytorch", override=True)


def _refuse(**options: Any) -> None:
    raise TypeError(
        "pipeback works with lightning.pytorch, but this Trainer is of pytorch_lightning, another distribution with "
        "classes of its own; write `import lightning.pytorch as pl` instead of `import pytorch_lightning as pl`"
    )
