"""Norms: replace batch normalisation by group normalisation, which can be trained in small micro-batches.

    y = γ·(x − mean_G)/√(var_G + ε) + β        over the channels of one group G of one sample, and all places

Statistics of a batch of one or a few samples are undefined or poor; those of a group of channels do not depend on the
batch at all. Kosson et al., "Pipelined Backpropagation at Scale" (arXiv 2003.11666, MLSys 2021), train convolutional
networks in this way; as it is commonly described, with an initial group size of two. It is read here as two channels
per group in every layer. Neither the number nor this reading was compared with the paper's text. Wu and He, "Group
Normalization" (arXiv 1803.08494), use 32 groups, or 16 channels per group: `to_group_norm(model, 16)`.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipeback.private import hooks_of


def to_group_norm(model: nn.Module, group_size: int = 2) -> nn.Module:
    """Replace every BatchNorm1d, 2d, 3d and SyncBatchNorm of `model` in place by a GroupNorm; returns the model.

    group_size  channels per group. If it does not divide a layer's channels, the nearest divisor is taken (the larger
                of two that are equally near): 15 channels at group_size 2 get groups of 3

    The new norms keep γ, β, ε, dtype, device and training mode; γ and β are the very same parameters, frozen or not,
    and a norm without them stays without. A module that stands at several places is replaced at all of them. Running
    statistics are dropped. If `model` itself is a batch normalisation, the new module is returned. Call this before you
    build the optimizer or a `Pipeline`.

    Raises ValueError, naming the module, and changes nothing, for a norm that has no channels yet (lazy), that would
    normalise single values (BatchNorm1d of features with one channel per group), that has hooks or parametrizations, or
    that is of a class of your own.

    >>> model = to_group_norm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()))
    >>> model[1].num_groups
    4
    """
    if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 1:
        raise ValueError(
            f"group_size must be a whole number of channels of at least 1, but is {group_size!r}; the default is 2"
        )
    # first all that can fail; one replacement a module, at however many places it stands
    fresh = {
        module: _group_norm(module, path or "the model", group_size)
        for path, module in model.named_modules()
        if isinstance(module, _BatchNorm)
    }
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if isinstance(child, _BatchNorm):
                parent._modules[key] = fresh[child]
    return fresh[model] if isinstance(model, _BatchNorm) else model


def _group_norm(norm: _BatchNorm, path: str, group_size: int) -> nn.GroupNorm:
    kind, channels = type(norm), norm.num_features
    where = f"{path} ({kind.__name__})"
    if "parametrizations" in norm._modules:
        raise ValueError(
            f"{where} has parametrizations; remove them with torch.nn.utils.parametrize.remove_parametrizations before"
        )
    if kind not in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm):
        lazy = isinstance(norm, nn.modules.lazy.LazyModuleMixin)
        cure = "run the model once before" if lazy else "replace it by hand, or derive nothing from batch normalisation"
        raise ValueError(f"{where} is no plain batch normalisation: {cure}")
    if hooks_of(norm):
        raise ValueError(f"{where} has hooks, which the new module would not call; remove them before, set them after")
    size = _nearest_divisor(channels, group_size)
    if size == 1 and kind is nn.BatchNorm1d:
        why = f"{channels} channel{'s' * (channels > 1)} in groups of {group_size}"
        raise ValueError(
            f"{where}: {why} would be groups of one channel, where (N, C) has one value, whose normalisation is 0 "
            "whatever it is; use a larger group_size or another number of channels, or replace it by hand where "
            "its input is (N, C, L)"
        )
    made = nn.GroupNorm(channels // size, channels, eps=norm.eps, affine=False)
    made.affine = norm.affine
    made.weight, made.bias = norm.weight, norm.bias
    return made.train(norm.training)


def _nearest_divisor(channels: int, size: int) -> int:
    divisors = [d for d in range(1, channels + 1) if channels % d == 0]
    return min(divisors, key=lambda d: (abs(d - size), -d))
