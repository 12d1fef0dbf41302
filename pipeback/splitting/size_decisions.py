"""Size decisions: modules whose forward goes by a size or a count that their layers decide, as mixtures of experts do.

How many tokens a router sends to an expert is another number for each micro-batch. A trace that looks into such a
module would fit none but its own. So it is kept whole, unless most layers of the model are in it.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection

from torch import nn

from pipeback.splitting.branches import Branch
from pipeback.splitting.call_origins import decided
from pipeback.splitting.call_trace import Call, CallTrace
from pipeback.splitting.data_sizes import sizes
from pipeback.splitting.module_walk import walked
from pipeback.tensors.structures import parts


def deciding_by_sizes(
    model: nn.Module, record: CallTrace, evaluated: Collection[Branch], fixed: Collection[str]
) -> list[str]:
    """Return the paths of these modules, with all others of their classes, and warn of it.

    evaluated: decisions that can be evaluated before a micro-batch enters. fixed: paths that are not to be kept whole.
    """
    if not any(call.check is not None for call in record.calls):
        return []
    known = {branch.number for branch in evaluated}
    where = {each.call.where for n, each in enumerate(decided(record)) if n not in known and _varies(each.call)}
    layers, found = _layers(model), list[str]()
    for kind in {type(model.get_submodule(path)) for path in where if path}:
        alike = {path: module for path, module in model.named_modules() if type(module) is kind}
        if not any(2 * _layers(module) > layers or _holds(path, fixed) for path, module in alike.items()):
            found += alike
    if found:
        who = f"{type(model.get_submodule(found[0])).__name__} {found[0]!r}"
        warnings.warn(
            f"{who} goes by sizes or counts that its layers decide, so that it is not cut; "
            f"stages=pipeback.Splitting(leaves={found!r}) says so, too",
            stacklevel=2,
        )
    return found


def _varies(call: Call) -> bool:
    """Whether a call gives Python a size that depends on values, or a count: a whole number that is computed."""
    assert call.check is not None
    counts = [x for x in parts(call.check[0]) if isinstance(x, int) and not isinstance(x, bool)]
    return call.target is sizes or bool(counts)


def _layers(module: nn.Module) -> int:
    """How many modules with weights of their own are in a module."""
    return sum(any(p is not None for p in m._parameters.values()) for m in walked(module).values())


def _holds(path: str, others: Collection[str]) -> bool:
    return any(other == path or other.startswith(f"{path}.") for other in others)
