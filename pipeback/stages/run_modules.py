"""Run modules: the modules that run in the forward (F) of a stage: its own, and on the last stage those of the loss."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from pipeback.splitting import module_restore
from pipeback.splitting.module_walk import walked
from pipeback.stages.stage import Stage

LOSS = "(loss)"  # begins the paths of modules of the loss, and is no name of a module


def run_modules(stage: Stage) -> Mapping[str, nn.Module]:
    """The modules by their paths."""
    if not isinstance(stage.loss, nn.Module):
        return walked(stage.module)
    of_loss = {f"{LOSS}.{path}".rstrip("."): module for path, module in walked(stage.loss).items()}
    return {**walked(stage.module), **of_loss}


def buffers_around(stage: Stage, name: str) -> dict[str, Tensor | None]:
    """The buffers of the module that has the one of this name."""
    path, root = name.rpartition(".")[0], stage.module
    if isinstance(stage.loss, nn.Module) and (path == LOSS or path.startswith(f"{LOSS}.")):
        path, root = path.removeprefix(LOSS).removeprefix("."), stage.loss
    return root.get_submodule(path)._buffers


def untouched(stage: Stage) -> module_restore.Untouched:
    """Return a context that restores these modules on exit."""
    return module_restore.Untouched(stage.module, within=run_modules(stage))
