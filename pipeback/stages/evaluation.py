"""Evaluation: run stages in evaluation mode without changing anything that is in flight."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeback.splitting.control_flow import as_written
from pipeback.stages.flight import Value, cut
from pipeback.stages.own_memory import apart
from pipeback.stages.stage import Stage


def evaluate(stages: Sequence[Stage], x: Value) -> Value:
    """Return the output of the last of these stages for x, in evaluation mode, on the newest weights.

    The modes of the modules are put back afterwards.
    """
    modes = [(module, module.training) for stage in stages for module in stage.module.modules()]
    try:
        for module, _ in modes:
            module.training = False
        value = x
        with torch.no_grad(), as_written():
            for stage in stages:
                given = tuple(leaf.detach() for leaf in stage.enter(value)[0])  # none needs a gradient
                if value is x or stage.learnt.clones_input:  # the first push finds it out
                    given = tuple(map(_alike, given))
                value = apart(stage.module, (), stage.module(given if isinstance(value, tuple) else given[0]))
    finally:
        for module, mode in modes:
            module.training = mode
    return cut(value)


def _alike(x: Tensor) -> Tensor:
    """Return a clone that lies in memory as x does: torch chooses kernels of products by strides and alignment."""
    if type(x) is not Tensor or x.layout is not torch.strided or x.is_contiguous() or not x.numel():
        return x.clone()
    extent = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    begin = x.storage_offset() % 64
    memory = x.new_empty(begin + extent)
    memory[begin:].copy_(x.as_strided((extent,), (1,)))
    return memory.as_strided(x.shape, x.stride(), begin)
