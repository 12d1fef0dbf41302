"""Agreement: checks that ranks have the same model, method and options, and gives them the first rank's values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipeback
from pipeback.distributed.ranks import Ranks
from pipeback.stages.stage import Stage
from pipeback.tensors.checksum import checksum

CALL = "Pipeline(...)"


def agree(ranks: Ranks, stages: Sequence[Stage], **options: Any) -> None:
    """Give every rank the first rank's seed, weights and buffers, where they differ.

    Raises ValueError on every rank if the model, optimizers, versions or one of the options differ.
    """
    ranks.agree(
        {
            "pipeback": pipeback.__version__,
            "torch": torch.__version__,
            "stages": len(stages),
            "model": [
                [stage.name, [(k, tuple(t.shape), str(t.dtype)) for k, t in stage.module.state_dict().items()]]
                for stage in stages
            ],
            "optimizer": [repr(stage.optimizer) for stage in stages],
            **options,
        }
    )
    seed = ranks.gather(torch.initial_seed(), CALL)[0]
    for stage in stages:
        stage.random.sow(seed)
    if ranks.tensor > 1:
        return  # values were shared before they were cut into shards (`alike`)
    values = [[*stage.module.parameters(), *stage.module.buffers()] for stage in stages]
    mine = [None if any(t.is_meta for t in some) else checksum(some) for some in values]
    every = ranks.gather(mine, CALL)
    for s, some in enumerate(values):
        if any(theirs[s] != every[0][s] for theirs in every):
            if any(theirs[s] is None for theirs in every):
                raise ValueError(
                    f"{stages[s].label} is on the meta device on some ranks; build it there on all of them, or on none"
                )
            _share(ranks, some)


def alike(ranks: Ranks, model: nn.Module) -> None:
    """Give every rank the first rank's weights and buffers, before they are cut into shards.

    Raises ValueError on every rank if ranks have tensors of other names or shapes.
    """
    tensors = model.state_dict(keep_vars=True)
    ranks.agree({"model": [(name, tuple(t.shape), str(t.dtype)) for name, t in tensors.items()]})
    every = ranks.gather(None if any(t.is_meta for t in tensors.values()) else checksum(list(tensors.values())), CALL)
    if any(theirs != every[0] for theirs in every):
        _share(ranks, [t for t in tensors.values() if not t.is_meta])


def _share(ranks: Ranks, tensors: Sequence[Tensor]) -> None:
    """Give every rank the first rank's values."""
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            with torch.no_grad():
                tensor.copy_(ranks.gather(tensor.detach(), "Pipeline(...)")[0])
            continue
        with ranks.health.calling("Pipeline(...)"), ranks.health.waiting(ranks.others, "the first rank's weights"):
            value = tensor.detach().cpu().contiguous()
            try:
                dist.broadcast(value, ranks.everyone[0], group=ranks.control)
            except RuntimeError as error:
                raise ranks.lost(ranks.others, "the first rank's weights") from error
        with torch.no_grad():
            tensor.copy_(value)
