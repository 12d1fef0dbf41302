"""Own memory: what a stage sends on lies neither in its weights nor in buffers that forwards change.

A stage may return one of its weights or a view of one (`weight.T`, `table[:n]`) for a later stage to compute with. That
stage keeps it for its backward. By then an update may have written into the weight, or a store may have taken it away.
So the stage sends a copy, whose gradient goes to the weight.
"""

from __future__ import annotations

from torch import Tensor, nn

from pipeback.stages.flight import Value
from pipeback.stages.learnt import Changing
from pipeback.tensors.copies import lies_among, storages, tensors_in


def borrowed(module: nn.Module, changing: Changing, output: Value) -> bool:
    """Whether a part of the output lies in the module's weights, or in buffers that forwards change."""
    memory = _memory(module, changing)
    return any(lies_among(part, memory) for part in tensors_in(output))


def apart(module: nn.Module, changing: Changing, output: Value) -> Value:
    """Return the output with copies of these parts, which autograd follows."""
    memory = _memory(module, changing)

    def own(part: Tensor) -> Tensor:
        return part.clone() if isinstance(part, Tensor) and lies_among(part, memory) else part

    return tuple(map(own, output)) if isinstance(output, tuple) else own(output)


def _memory(module: nn.Module, changing: Changing) -> set[int]:
    buffers = [b for owner, key in changing if (b := owner.get(key)) is not None]
    return storages([*module.parameters(), *buffers])
