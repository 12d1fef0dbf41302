"""Layers that are cut over the ranks: by columns (their outputs are spread) or by rows (their inputs are).

    columns   y_r = f(x) W_rᵀ + b_r          each rank has some of the outputs
    rows      y = g(Σ_r x_r W_rᵀ) + b        each rank has some of the inputs; the bias is added once, after the sum

A layer keeps its object, so that hooks, names and traces of it stay; its class gains the forward that is written here.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from pipeback.tensor_parallel.collectives import assemble, reduce, replicate
from pipeback.tensor_parallel.cuts import Cut
from pipeback.tensor_parallel.group import TensorGroup


class CutByColumns:
    """Mixed into the class of a layer whose outputs are spread over the ranks."""

    tensor_group: TensorGroup
    assembled: bool  # whether its output is whole on every rank

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(replicate(x, self.tensor_group))  # type: ignore[misc]
        return assemble(y, self.tensor_group) if self.assembled else y


class CutByRows:
    """Mixed into the class of a layer whose inputs are spread over the ranks."""

    tensor_group: TensorGroup
    transposed: bool  # whether the weight is (inputs, outputs)
    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        product = x @ self.weight if self.transposed else nn.functional.linear(x, self.weight)
        y = reduce(product, self.tensor_group)
        return y if self.bias is None else y + self.bias


def transposed(module: nn.Module) -> bool | None:
    """Whether the weight of a layer is (inputs, outputs), as that of GPT-2's Conv1D; None: it is no such layer."""
    if type(module) is nn.Linear:
        return False
    if type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils":
        return True
    return None


def cuts_of(module: nn.Module, *, columns: bool, parts: int = 1) -> dict[str, Cut]:
    """Which weights of a layer are cut, and how."""
    across = bool(transposed(module))
    if not columns:
        return {"weight": Cut(0 if across else 1)}
    found = {"weight": Cut(1 if across else 0, parts)}
    if getattr(module, "bias", None) is not None:
        found["bias"] = Cut(0, parts)
    return found


def attributes(module: nn.Module, count: int, *, columns: bool) -> dict[str, int]:
    """Numbers of a layer that its shard has others of."""
    name = "nf" if transposed(module) and columns else "nx" if transposed(module) else ""
    name = name or ("out_features" if columns else "in_features")
    value: Any = getattr(module, name, None)
    return {} if value is None else {name: value // count}
