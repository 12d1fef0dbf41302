"""Cuts a batch into micro-batches, and joins what `training_step` logs on them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
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
    """Collects what `self.log` gets on the slices of a batch, and logs it once: the mean over the samples, or the sum,
    the largest or the smallest value, as `reduce_fx` says.
    """

    def __init__(self) -> None:
        self._said: dict[tuple[str | None, str], _Values] = {}  # by the hook of Lightning that runs, and the name
        self._module: LightningModule | None = None
        self.samples = 0  # of the present slice
        self.losses: list[Tensor] = []  # one per slice that has come to its end
        self.listed: list[Said] | None = None  # names and values as they come, for who wants to see them

    @contextmanager
    def listening(self, module: LightningModule) -> Iterator[None]:
        """Collect what `module.log` gets within this context; what `training_step` has given is logged at its end."""
        self._module = module
        with _logging(module, self.hear) as log:
            yield
        hook = lightning_internals.running_hook(module)
        for key in [key for key in self._said if key[0] == hook]:
            self._tell(log, key)

    @contextmanager
    def last(self, module: LightningModule) -> Iterator[None]:
        """Within this context, a hook that has run for the other slices runs for the last: it is logged once, too."""

        def hear(name: str, *rest: Any, **options: Any) -> None:
            self.hear(name, *rest, **options)
            self._tell(log, (lightning_internals.running_hook(module), name))

        with _logging(module, hear) as log:
            yield

    def hear(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Do what `self.log` does, for the present slice."""
        if self.listed is not None:
            self.listed.append((name, value))
        if args:
            options.update(zip(_OPTIONS, args))
        hook = None if self._module is None else lightning_internals.running_hook(self._module)
        values, sizes, kept = self._said.setdefault((hook, name), ([], [], options))
        sizes.append(self.samples)
        tensor = isinstance(value, Tensor)
        values.append(value.detach() if tensor else value)
        if not tensor and isinstance(value, Metric):
            kept.setdefault("_steps", []).append(lightning_internals.step_value(value))
        if kept.get("batch_size") is not None and kept is not options:
            kept["batch_size"] += options["batch_size"]

    def _tell(self, log: Callable[..., None], key: tuple[str | None, str]) -> None:
        values, sizes, options = self._said.pop(key)
        value = values[0]
        if isinstance(value, Metric):
            # its state counts every slice, and so should the value that it shows for the step
            steps = [step for *_, step in zip(sizes, options.pop("_steps"), strict=True)]
            if all(isinstance(step, Tensor) for step in steps):
                lightning_internals.set_step_value(value, mean(steps, sizes))
        elif not isinstance(value, (MetricCollection, dict)):
            value = reduced(values, sizes, options.get("reduce_fx", "mean"))
        log(key[1], value, **options)


_Values = tuple[list[Any], list[int], dict[str, Any]]  # those of the slices, their samples, and the options of `log`
_OPTIONS = [*inspect.signature(LightningModule.log).parameters][3:]  # behind self, name and value


@contextmanager
def _logging(module: LightningModule, log: Callable[..., None]) -> Iterator[Callable[..., None]]:
    """Within this context `module.log` does this; yields what it did."""
    original = module.log
    module.log = log  # type: ignore[method-assign]
    try:
        yield original
    finally:
        del module.log


def reduced(values: list[Any], sizes: list[int], reduce_fx: Any) -> Any:
    """What a batch logs for the values of its slices. reduce_fx: as of `self.log`; Lightning refuses any but four."""
    name = reduce_fx.lower() if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    joins: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
    join = joins.get(name)
    return mean(values, sizes) if join is None or len(values) == 1 else reduce(join, _floats(values))


def mean(values: list[Any], sizes: list[int]) -> Any:
    """The mean of the values, weighted by samples, in float32 at least."""
    if len(values) == 1:
        return values[0]
    tensors = _floats(values)
    total, first = sum(sizes), tensors[0]
    weights = [size / total for size in sizes]
    if not first.dim() and all(t.shape == first.shape and t.device == first.device for t in tensors):
        each = torch.stack(tensors)  # in one piece: there may be many
        return (each * torch.tensor(weights, dtype=each.dtype, device=first.device)).sum()
    return sum(weight * tensor for weight, tensor in zip(weights, tensors, strict=True))


def _floats(values: list[Any]) -> list[Tensor]:
    tensors = [value if isinstance(value, Tensor) else torch.tensor(float(value)) for value in values]
    return [t if t.dtype == torch.float64 else t.float() for t in tensors]
