"""Held-out data: what a loader gives, outputs of several batches as one, and means of losses and metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pipeback.tensors.structures import opened

Judge = Callable[[Any, Any], Any]  # (output, target) -> a number or 0-d tensor, the mean over the batch

_METRICS = 'metrics={"accuracy": lambda output, y: (output.argmax(1) == y).float().mean()}'


def is_loader(x: Any) -> bool:
    """Whether x gives batches (x, y), and is no batch itself: a DataLoader, another iterable, or a list of pairs."""
    if isinstance(x, Dataset) and not isinstance(x, Iterable):
        raise TypeError(
            f"evaluate takes a tensor, or batches (x, y), but got a {type(x).__name__}, which has single samples; give "
            "torch.utils.data.DataLoader(dataset, batch_size=256)"
        )
    if isinstance(x, list):
        return bool(x) and all(isinstance(part, (tuple, list)) and len(part) == 2 for part in x)
    if isinstance(x, DataLoader | Iterator):
        return True
    return isinstance(x, Iterable) and not isinstance(x, Tensor | tuple | Mapping) and not opened(x)[0]


def pairs(loader: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Each batch as (x, y). Raises TypeError for a batch that is none, with a generator that makes it one."""
    for batch in loader:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            found = f"a {type(batch).__name__}"
            cure = "(x, None) for x in loader"
            if isinstance(batch, Mapping):
                label = next((key for key in ("labels", "label", "y") if key in batch), None)
                target = "None" if label is None else f'b["{label}"]'
                cure = f"(b, {target}) for b in loader"
            elif isinstance(batch, tuple | list):
                names = [f"x{n}" for n in range(len(batch) - 1)]
                found = f"{len(batch)} parts"
                cure = f"(({', '.join(names)}), y) for {', '.join([*names, 'y'])} in loader" if names else cure
            raise TypeError(
                f"evaluate takes batches that are pairs (x, y), but got {found}; give pairs: pipe.evaluate({cure})"
            )
        yield batch[0], batch[1]


def joined(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """The outputs for batches of so many samples as one: tensors are concatenated along their first dimension."""
    found = [opened(output) for output in outputs]
    form = found[0][1]
    odd = [tuple(t.shape) for (ts, _), n in zip(found, sizes, strict=True) for t in ts if not t.dim() or len(t) != n]
    if odd or any(other != form for _, other in found):
        what = f"a tensor of shape {odd[0]} in it" if odd else "other values in it from batch to batch"
        raise ValueError(
            f"the output has {what}, so that the outputs of batches of {sizes[0]} samples cannot be concatenated; "
            "leave batch_size out"
        )
    return form.fill([torch.cat(parts) for parts in zip(*(tensors for tensors, _ in found), strict=True)])


class Means:
    """Means of a loss and of metrics over batches, each batch weighted by its number of samples.

    loss: None if the pipeline has none. metrics: functions by name; None: the loss alone.
    """

    def __init__(self, loss: Judge | None, metrics: Mapping[str, Judge] | None) -> None:
        odd = metrics is not None and (
            not isinstance(metrics, Mapping) or not all(isinstance(k, str) and callable(f) for k, f in metrics.items())
        )
        if odd:
            told = type(metrics).__name__ if not isinstance(metrics, Mapping) else dict(metrics)
            raise TypeError(f"metrics must be a dict of functions by name, but is {told!r}; for example {_METRICS}")
        if loss is None and not metrics:
            raise ValueError(
                "evaluate has no loss whose mean it could give, since this pipeline has loss=None; give the loss as a "
                'metric: metrics={"loss": lambda output, y: ...}'
            )
        if loss is not None and metrics is not None and "loss" in metrics:
            raise ValueError('metrics has a "loss", which is the name of the mean of the pipeline\'s loss; rename it')
        self._alone = metrics is None
        self._judges = {**({} if loss is None else {"loss": loss}), **(metrics or {})}
        self._values: dict[str, list[Tensor]] = {name: [] for name in self._judges}
        self._sizes: list[int] = []

    def add(self, output: Any, target: Any, samples: int) -> None:
        """Judge the output of one batch."""
        self._sizes.append(samples)
        for name, judge in self._judges.items():
            value = torch.as_tensor(judge(output, target)).detach()
            if value.numel() != 1:
                raise ValueError(
                    f"{name} must be one number, the mean over the batch, but has shape {tuple(value.shape)}; reduce "
                    "it, for example with .float().mean()"
                )
            self._values[name].append(value.reshape(()))

    def found(self) -> Any:
        """The mean loss, a 0-d float64 tensor in host memory; with metrics {name: mean}, "loss" first."""
        if not self._sizes:
            raise ValueError("evaluate got no batches: the loader was empty, or an iterator that had come to its end")
        weights = torch.tensor(self._sizes, dtype=torch.float64, device="cpu")
        means = {
            name: torch.stack(values).cpu().double() @ weights / weights.sum() for name, values in self._values.items()
        }
        return means["loss"] if self._alone else means
