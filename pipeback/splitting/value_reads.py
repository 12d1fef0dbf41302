"""Value reads: numbers of weights and buffers that a forward gives to Python, and that are others at the next forward.

A traced model repeats the numbers that Python had. A counter in a buffer (`int(self.pointer)`), which every forward
advances, is another number then, and so is what weights compute (`self.scale.exp().item()`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from pipeback.splitting.call_origins import Decision, decided
from pipeback.splitting.call_trace import CallTrace
from pipeback.splitting.refusals import reads_changing
from pipeback.tensors.structures import parts


def check_value_reads(model: nn.Module, record: CallTrace) -> None:
    """Raise ValueError, which names the module, if a number that Python was given will be another one next time."""
    if not any(call.check is not None for call in record.calls):
        return
    for each in decided(record):
        names = {name for call in each.calls() for name in call.attributes()}
        changing = next((name for name in names if name in record.changed), None)
        if changing is not None:
            raise reads_changing(model, each.call.where, f"{changing!r}, which it changes,")
        assert each.call.check is not None
        if _fraction(each.call.check[0]) and (_trained(model, names) or _layers(model, each)):
            raise reads_changing(model, each.call.where, "a number that weights compute")


def _fraction(value: Any) -> bool:
    """Whether a value has a fractional number in it; a comparison or a count may stay the same."""
    return any(isinstance(x, float) for x in parts(value))


def _trained(model: nn.Module, names: Collection[str]) -> bool:
    """Whether a weight that trains is among these parameters and buffers."""
    return any(p.requires_grad for name, p in model.named_parameters(remove_duplicate=False) if name in names)


def _layers(model: nn.Module, decision: Decision) -> bool:
    """Whether layers with weights that train lead to a decision."""
    targets = {call.target for call in decision.calls() if call.module}
    return any(p.requires_grad for target in targets for p in model.get_submodule(target).parameters())
