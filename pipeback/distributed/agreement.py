"""Agreement: checks that ranks have the same model, method and options, and gives them the first rank's values."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch

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
            "pipeback": version("pipeback"),
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
    values = [[*stage.module.parameters(), *stage.module.buffers()] for stage in stages]
    mine = [None if any(t.is_meta for t in some) else checksum(some) for some in values]
    every = ranks.gather(mine, CALL)
    for s, some in enumerate(values):
        if any(theirs[s] != every[0][s] for theirs in every):
            if any(theirs[s] is None for theirs in every):
                raise ValueError(
                    f"{stages[s].label} is on the meta device on some ranks; build it there on all of them, or on none"
                )
            ranks.share(some)
