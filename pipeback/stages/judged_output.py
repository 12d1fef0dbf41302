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


def shown(returned: Any) -> str:
    """What a loss has returned, in words."""
    if not isinstance(returned, Tensor):
        return type(returned).__name__
    if returned.dim():
        return f"shape {tuple(returned.shape)}"
    return str(returned.dtype)


def loss_cure(returned: Any, loss: Any) -> str:
    """What to change of a loss that has returned this of its own, after a semicolon."""
    if isinstance(returned, Tensor):
        if returned.dim():
            return '; reduce it, for example with reduction="mean"'
        return "; compute it with operations that have a gradient, such as torch.nn.functional.cross_entropy"
    if returned is None:
        return "; return it; a model that computes output.loss itself needs its labels in x for that"
    if isinstance(returned, (int, float)):
        return "; return the tensor itself, without .item() or float(), since its gradient is needed"
    names = [name for name, part in _parts(returned) if not part.dim() and part.is_floating_point()]
    if not names:
        return "; return the loss alone, a tensor, and keep what else is computed in a list of your own"
    which = next((name for name in names if name in (".loss", "['loss']")), names[0])
    known = getattr(loss, "__name__", "")
    name = known if known.isidentifier() else "my_loss"
    return f"; give the loss alone: loss=lambda output, target: {name}(output, target){which}"


def _names(output: Any) -> list[str]:
    """How the tensors of an output are reached from it."""
    return [name for name, _ in _parts(output)]


def _parts(output: Any) -> list[tuple[str, Tensor]]:
    """The tensors of a value, and how they are reached from it."""
    named = {f".{name}": value for name, value in getattr(output, "__dict__", {}).items()}
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        named = {f".{name}": getattr(output, name) for name in output._fields}
    elif isinstance(output, (tuple, list)):
        named = {f"[{n}]": value for n, value in enumerate(output)}
    elif isinstance(output, Mapping):
        named.update({f"[{key!r}]": value for key, value in output.items()})
    return [(name, value) for name, value in named.items() if isinstance(value, Tensor)]
