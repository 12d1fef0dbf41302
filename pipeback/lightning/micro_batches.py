"""Cuts a batch into micro-batches, and averages what `training_step` logs on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from pipeback.lightning import lightning_internals
from pipeback.tensors import batches

Said = tuple[str, Any]  # name and value


def cut(batch: Any, size: int) -> list[tuple[Any, int]]:
    """Cut a batch, in whatever structure it comes, into slices of `size` samples; returns (slice, length)s.

    What is cut, and what every slice gets whole, is said at `batches.cut`.
    """
    lengths = set(batches.samples(batch))
    if len(lengths) != 1:
        found = f"tensors of lengths {sorted(lengths)}" if lengths else "no tensors"
        raise ValueError(
            f"micro_batch_size={size}: the batch has {found}, but it is cut along the first dimension of its tensors, "
            "which must count samples; use micro_batch_size=None, or another collate_fn"
        )
    (length,) = lengths
    sizes = batches.sizes(length, size)
    return list(zip(batches.cut(batch, sizes), sizes, strict=True))


class Passed(torch.autograd.Function):
    """A loss with the value of the mean over a batch, and the gradient of its last micro-batch.

    The backward of the other micro-batches has run already.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, mean: Tensor) -> Tensor:
        return mean.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class Log:
    """Collects what `self.log` gets on the slices of a batch, and logs the mean over its samples once."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[list[Any], list[int], dict[str, Any]]] = {}
        self.samples = 0  # of the present slice
        self.listed: list[Said] | None = None  # names and values as they come, for who wants to see them

    @contextmanager
    def listening(self, module: LightningModule) -> Iterator[None]:
        """Collect what `module.log` gets within this context; log the means at its end."""
        log = module.log
        module.log = self.hear  # type: ignore[method-assign]
        try:
            yield
        finally:
            del module.log
        for name, (values, sizes, options) in self._said.items():
            value = values[0]
            if isinstance(value, Metric):
                # its state counts every slice, and so should the value that it shows for the step
                steps = [step for *_, step in zip(sizes, options.pop("_steps"), strict=True)]
                if all(isinstance(step, Tensor) for step in steps):
                    lightning_internals.set_step_value(value, mean(steps, sizes))
            elif not isinstance(value, (MetricCollection, dict)):
                value = mean(values, sizes)
            log(name, value, **options)

    def hear(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Do what `self.log` does, for the present slice."""
        if self.listed is not None:
            self.listed.append((name, value))
        options.update(zip(("prog_bar", "logger", "on_step", "on_epoch"), args))
        values, sizes, kept = self._said.setdefault(name, ([], [], options))
        values.append(value.detach() if isinstance(value, Tensor) else value)
        sizes.append(self.samples)
        if isinstance(value, Metric):
            kept.setdefault("_steps", []).append(lightning_internals.step_value(value))
        if kept.get("batch_size") is not None and kept is not options:
            kept["batch_size"] += options["batch_size"]


def mean(values: list[Any], sizes: list[int]) -> Any:
    """The mean of the values, weighted by samples, in float32 at least."""
    if len(values) == 1:
        return values[0]
    tensors = [value if isinstance(value, Tensor) else torch.tensor(float(value)) for value in values]
    tensors = [t if t.dtype == torch.float64 else t.float() for t in tensors]
    total, first = sum(sizes), tensors[0]
    weights = [size / total for size in sizes]
    if not first.dim() and all(t.shape == first.shape and t.device == first.device for t in tensors):
        each = torch.stack(tensors)  # in one piece: there may be many
        return (each * torch.tensor(weights, dtype=each.dtype, device=first.device)).sum()
    return sum(weight * tensor for weight, tensor in zip(weights, tensors, strict=True))
