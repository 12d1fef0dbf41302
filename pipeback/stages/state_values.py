"""Values of a state: tensors and tuples of them, by name, and their forms as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from pipeback.stages.stage import Stage
from pipeback.tensors import copies
from pipeback.tensors.batches import Structure
from pipeback.tensors.written_forms import read, written

Tensors = dict[str, Tensor]
Plain = dict[str, Any]


def put_all(
    tensors: Tensors, prefix: str, values: dict[str, Tensor], taken: Callable[[Tensor], Tensor] = copies.replica
) -> None:
    tensors.update({f"{prefix}/{name}": taken(value) for name, value in values.items()})


def to_device(stage: Stage, tensor: Tensor) -> Tensor:
    return copies.replica(tensor, stage.device)


def to_home(stage: Stage, tensor: Tensor) -> Tensor:
    """A copy of the tensor where the stage's weights live."""
    return copies.replica(tensor, stage.weights[0].device)


def save_value(tensors: Tensors, prefix: str, value: Any) -> Any:
    """Store a tensor or a tuple of tensors and Nones; returns its shape as JSON."""
    if isinstance(value, Tensor):
        tensors[f"{prefix}/0"] = copies.replica(value)
        return "tensor"
    if isinstance(value, tuple):
        for n, part in enumerate(value):
            if isinstance(part, Tensor):
                tensors[f"{prefix}/{n}"] = copies.replica(part)
        return ["tensor" if isinstance(part, Tensor) else _json(part, prefix) for part in value]
    return _json(value, prefix)


def _json(value: Any, where: str) -> Any:
    if value is None or isinstance(value, (bool, int, float)):
        return {"value": value}
    if isinstance(value, Structure):
        return written(value.form)
    raise TypeError(f"{where}: a {type(value).__name__} cannot be saved; targets in flight must be tensors or numbers")


def load_value(stage: Stage, tensors: Mapping[str, Tensor], prefix: str, shape: Any) -> Any:
    def part(n: int, kind: Any) -> Any:
        if kind == "tensor":
            return to_device(stage, tensors[f"{prefix}/{n}"])
        return Structure(read(kind)) if "structure" in kind else kind["value"]

    return tuple(part(n, kind) for n, kind in enumerate(shape)) if isinstance(shape, list) else part(0, shape)
