"""Registers names for `Trainer(strategy=...)`, and a clear error for the other distribution of Lightning."""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from typing import Any

from lightning.pytorch.strategies import Strategy, StrategyRegistry

NAMES: dict[str, dict[str, Any]] = {  # and their options
    "pipeback": {},
    "pipeback_streaming": {"method": "gpipe", "store": "host"},
}
OTHER = "pytorch_lightning.strategies"


def register(strategy: type[Strategy]) -> None:
    for name, options in NAMES.items():
        StrategyRegistry.register(name, strategy, description="pipelined backpropagation", override=True, **options)
    # `pytorch_lightning` has a registry of its own. The name is given to that, too, so that its Trainer says what is
    # wrong instead of listing strategies.
    if OTHER in sys.modules:
        _tell(sys.modules[OTHER])
    elif not any(isinstance(finder, _Late) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Late())


class _Late(MetaPathFinder):
    """Acts once when the other distribution is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != OTHER:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            original = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                original(module)
                _tell(module)

            spec.loader.exec_module = exec_module
        return spec


def _tell(strategies: Any) -> None:
    for name in NAMES:
        strategies.StrategyRegistry.register(name, _refuse, description="use lightning.pytorch", override=True)


def _refuse(**options: Any) -> None:
    raise TypeError(
        "pipeback works with lightning.pytorch, but this Trainer is of pytorch_lightning, another distribution with "
        "classes of its own; write `import lightning.pytorch as pl` instead of `import pytorch_lightning as pl`"
    )
