"""Size decisions: modules whose forward goes by a size that their layers decide, as a mixture of experts does.

How many tokens a router sends to an expert is another number for each micro-batch. A trace that looks into such a
module would fit none but its own. So it is kept whole, unless most of the model is in it.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection

from torch import nn

from pipeback.splitting.branches import Branch
from pipeback.splitting.call_trace import CallTrace
from pipeback.splitting.data_sizes import sizes


def deciding_by_sizes(
    model: nn.Module, record: CallTrace, evaluated: Collection[Branch], fixed: Collection[str]
) -> list[str]:
    """Return the paths of these modules, with all of their classes, and warn of it.

    evaluated: decisions that can be evaluated before a micro-batch enters. fixed: paths that are not to be kept whole.
    """
    known, checks = {branch.number for branch in evaluated}, (call for call in record.calls if call.check is not None)
    where = {call.where for n, call in enumerate(checks) if call.target is sizes and n not in known}
    if not where:
        return []
    total = _size(model)
    kinds = {type(model.get_submodule(path)) for path in where if path}
    found = {path: module for path, module in model.named_modules() if path and type(module) in kinds}
    if any(2 * _size(module) > total or _holds(path, fixed) for path, module in found.items()):
        return []
    if found:
        first = next(iter(found))
        warnings.warn(
            f"{type(found[first]).__name__} {first!r} goes by sizes that depend on values of its layers, so that it is "
            f"not cut; stages=pipeback.Splitting(leaves={list(found)!r}) says so, too",
            stacklevel=2,
        )
    return list(found)


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def _holds(path: str, others: Collection[str]) -> bool:
    return any(other == path or other.startswith(f"{path}.") for other in others)
