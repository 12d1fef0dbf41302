"""Stage builder: the stages of a pipeline from the parts of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeback.methods.base import Method
from pipeback.pipeline.option_checks import check_optimizer, checked_factory
from pipeback.splitting.partition import StagePart
from pipeback.splitting.traced_model import TracedModel
from pipeback.stages import compiled
from pipeback.stages.activations import keeping, recomputes
from pipeback.stages.stage import OptimizerFactory, Stage
from pipeback.tensors import copies


class StageBuilder(NamedTuple):
    """What they are built with, as `Pipeline` is given it."""

    method: Method
    delays: Sequence[int]
    loss: Callable[[Any, Any], Tensor] | None
    optimizers: Sequence[OptimizerFactory]  # one per stage
    activations: Sequence[str]  # one per stage
    masters: bool
    compile: bool | dict[str, Any]

    def stages(self, parts: Sequence[StagePart], replica: int) -> list[Stage]:
        """One stage per part. Raises ValueError or TypeError, naming the stage, if optimizer and method do not fit."""
        n, stages = len(parts), []
        for s, part in enumerate(parts):
            factory = checked_factory(self.optimizers[s], s)
            judge = self.loss if s == n - 1 else None
            stage = Stage(
                s, n, part.module, part.name, self.method, factory, judge, self.masters, replica,
                keeping(self.activations[s]),
            )  # fmt: skip
            stage.random.sow(torch.initial_seed())
            stage.gradients.show_between(self.loss is None)
            if self.compile:
                keep = compiled.faithful(self.method, self.delays[s]) and not recomputes(self.activations[s])
                stage.call_by(compiled.Compiled(part.module, s, compiled.options(self.compile, keep)))
            check_optimizer(stage, self.method)
            stages.append(stage)
        return stages

    def twins(self, parts: Sequence[StagePart], program: TracedModel | None, replicas: int) -> Iterator[list[Stage]]:
        """The stages of every further replica in this process, on copies. program: that of a traced model."""
        for replica in range(1, replicas):
            mine = [part._replace(module=copies.deep(part.module)) for part in parts]
            if program is not None:
                program.follow_too([part.module for part in mine])
            yield self.stages(mine, replica)
