"""Uncompiled: a model as it was before torch.compile.

What is compiled cannot be traced, and its graph may keep functions of weights, which a delayed backward must not use.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from pipeback import private
from pipeback.splitting.control_flow import as_written
from pipeback.splitting.module_walk import walked


def uncompiled(model: nn.Module | Sequence[nn.Module], where: str = "model") -> nn.Module | Sequence[nn.Module]:
    """Return the modules that torch.compile was given; compiled submodules are put back into their places in the model.

    where: the name of the model in the warning that says what was compiled. The weights are the same tensors.
    """
    found: list[str] = []
    for n, part in enumerate([model] if isinstance(model, nn.Module) else model):
        for path, module in walked(part).items() if isinstance(part, nn.Module) else ():
            if isinstance(module, torch.jit.ScriptModule):
                own = where if isinstance(model, nn.Module) else f"{where}[{n}]"
                raise TypeError(
                    f"{'.'.join(name for name in (own, path) if name)} was made by torch.jit, which keeps its weights "
                    "out of Python's reach; give the module of which torch.jit.script or torch.jit.trace has made it"
                )
    if isinstance(model, nn.Module):
        taken: nn.Module | Sequence[nn.Module] = _without(model, where, found)
    else:
        taken = [_without(m, f"{where}[{n}]", found) if isinstance(m, nn.Module) else m for n, m in enumerate(model)]
    if not found:
        return model
    warnings.warn(
        f"torch.compile has compiled {', '.join(found[:3])}{', …' if len(found) > 3 else ''}. The stages train without "
        "it, since its graphs may keep functions of old weights; compile=True compiles each stage",
        stacklevel=2,
    )
    return taken


@contextmanager
def eagerly() -> Iterator[None]:
    """A context within which what torch would compile runs as it is written, and is traced."""
    compiles = "torch._dynamo" in sys.modules  # else nothing is compiled, and it would take seconds to import
    with as_written(), torch.compiler.set_stance("force_eager") if compiles else nullcontext():
        yield


def _without(module: nn.Module, name: str, found: list[str]) -> nn.Module:
    inner = private.uncompiled(module)
    if inner is not None:
        found.append(name)
        return _without(inner, name, [])
    for path, parent in walked(module).items():
        for key, child in list(parent._modules.items()):
            if child is not None and (inner := private.uncompiled(child)) is not None:
                found.append(".".join(part for part in (name, path, key) if part))
                setattr(parent, key, _without(inner, key, []))
    return module
