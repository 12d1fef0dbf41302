"""Norm check: whether the normalisations of a stage have enough values to take statistics from, in a micro-batch.

values per channel or group   of one sample          what is done
1                             whether or not         an error: x − mean is 0, whatever x is
2 …                           yes, a batch norm      a warning: training and evaluation compute other things
2 … 15                        no, a batch norm       a warning: the statistics are poor
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor, nn

from pipeback.stages.compile_check import Refused
from pipeback.stages.stage import Stage

FEW = 16  # with fewer values per channel, batch statistics are called poor
CURE = "replace it before the pipeline is built, pipeback.norms.to_group_norm(model), or use a larger micro-batch"
_PLACES = {nn.InstanceNorm1d: 1, nn.InstanceNorm2d: 2, nn.InstanceNorm3d: 3}  # the dimensions that are no channels


@contextmanager
def watching(stage: Stage) -> Iterator[None]:
    """Check the normalisations that are called within this context. Raises `Refused`, or warns."""
    handles = [
        module.register_forward_pre_hook(
            lambda m, args, kwargs, key=key: _check(stage, key, m, args[0] if args else kwargs.get("input")),
            with_kwargs=True,
        )
        for key, module in stage.module.named_modules()
        if isinstance(module, (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm))
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _check(stage: Stage, key: str, norm: nn.Module, x: Tensor) -> None:
    if not isinstance(x, Tensor) or not norm.training:
        return
    batch, values = isinstance(norm, nn.modules.batchnorm._BatchNorm), _values(norm, x)
    kind = type(norm).__name__
    where = f"{stage.label}: {kind} {key!r}" if key else f"{stage.label}: {kind}"
    if values <= 1 and isinstance(norm, nn.LayerNorm):  # models have such by design, and train
        warnings.warn(
            f"{where} normalises over a single value, which gives its bias whatever comes in, as in plain PyTorch",
            stacklevel=2,
        )
    elif values <= 1:
        cure = CURE if batch else "normalise over more than one value"
        raise Refused(
            f"{where} would see one value per {'channel' if batch else 'group'}, which it turns into zero; {cure}"
        )
    elif batch and len(x) == 1:
        warnings.warn(
            f"{where} takes its statistics from one sample, {values} values per channel, so that it is trained on "
            f"those of each sample and evaluated on their mean; {CURE}",
            stacklevel=2,
        )
    elif batch and values < FEW:
        warnings.warn(
            f"{where} takes its statistics from {values} values per channel, which is poor; {CURE}", stacklevel=2
        )


def _values(norm: nn.Module, x: Tensor) -> int:
    """How many values one pair of statistics is taken from."""
    if isinstance(norm, nn.modules.batchnorm._BatchNorm):
        return x.numel() // x.shape[1]
    if isinstance(norm, nn.GroupNorm):
        return x[0].numel() // norm.num_groups
    if isinstance(norm, nn.LayerNorm):
        return int(torch.Size(norm.normalized_shape).numel())
    # an instance norm: each sample and channel of its own; there may be no samples
    places = next((count for base, count in _PLACES.items() if isinstance(norm, base)), x.dim() - 2)
    return prod(x.shape[x.dim() - places :])
