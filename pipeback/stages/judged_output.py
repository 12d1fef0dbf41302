"""Judged output: what the loss gets of a model, and what to give for loss= where it can do nothing with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from pipeback.splitting.segment import Segment

OWN_LOSS = "loss=lambda output, _: output.loss"  # for a model that computes its loss itself, from labels in x


def structured(module: nn.Module, given: Any, output: Any) -> Any:
    """Return what the model returns, from the output of its last stage.

    A traced model knows the structure, while boundaries carry only the tensors.
    """
    return module.__structured__(given, output) if isinstance(module, Segment) else output


def cure(output: Any, target: Any = None) -> str:
    """What to give for loss= or y if the model returns this, after a semicolon; nothing if both are tensors."""
    if isinstance(output, Tensor):
        numbers = isinstance(target, (list, tuple)) and target and all(isinstance(y, (int, float)) for y in target)
        return f"; y is a {type(target).__name__} of numbers: push torch.tensor(y)" if numbers else ""
    has = f"; the model's output, of type {type(output).__name__},"
    names = [*_names(output)]
    own = next((name for name in (".loss", "['loss']") if name in names), None)
    if own is not None:
        return f"{has} has a loss of its own: give {OWN_LOSS.replace('.loss', own)}"
    if not names:
        return f"{has} is nothing that the loss can take: let the model return a tensor"
    first = next((name for name in names if "logits" in name), names[0])
    labels = (
        f"; or push the labels with x, as the model's forward calls them, and give {OWN_LOSS}"
        if hasattr(output, "loss")
        else ""
    )
    example = f"loss=lambda output, target: torch.nn.functional.cross_entropy(output{first}, target)"
    return f"{has} has tensors of which the loss must take one, for example {example}{labels}"


def _names(output: Any) -> list[str]:
    """How the tensors of an output are reached from it."""
    named = {f".{name}": value for name, value in getattr(output, "__dict__", {}).items()}
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        named = {f".{name}": getattr(output, name) for name in output._fields}
    elif isinstance(output, (tuple, list)):
        named = {f"[{n}]": value for n, value in enumerate(output)}
    elif isinstance(output, Mapping):
        named.update({f"[{key!r}]": value for key, value in output.items()})
    return [name for name, value in named.items() if isinstance(value, Tensor)]
