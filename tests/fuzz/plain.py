"""A program as plain PyTorch trains it, whose bits method "sgd" has."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from .cases import OPTIMIZERS
from .models import DRAWING, LOSSES, build, stages
from .program import CLEARED, Program, Seen


def is_plain(program: Program) -> bool:
    """Whether plain PyTorch trains it: no delays, a micro-batch a push, no clipping, and layers that draw nothing."""
    return (
        program.method == "sgd"
        and set(program.options) <= {"check_finite", "weights"}
        and program.model not in DRAWING
        and program.form not in ("meta", "counted")
        and not (program.optimizer == "counter" and ("load",) in program.calls)  # a copy of one forgets its count
    )


def trained_plainly(program: Program, dtype: torch.dtype) -> Seen:
    """What plain PyTorch shows."""
    plain = _Plain(program, dtype)
    for n, (name, *values) in enumerate(program.calls):
        getattr(plain, name, plain.nothing)(f"{n} {name}", *values)
    plain.look(f"{len(program.calls)} end")
    return plain.seen


class _Plain:
    """Calls that it has no method for must not change a bit."""

    def __init__(self, program: Program, dtype: torch.dtype) -> None:
        self.program, self.dtype = program, dtype
        made, _ = build(program.model, program.stages, program.seed, program.form, dtype)
        self.model: Any = nn.Sequential(*made) if isinstance(made, list) else made
        kind, _, options = OPTIMIZERS[program.optimizer]
        self.blocks = self.model.blocks if program.form == "followed" else self.model
        self.optimizers = [
            kind(params, **{**options, "weight_decay": program.decay}) if (params := list(block.parameters())) else None
            for block in self.blocks
        ]
        self.seen: Seen = []
        self.pushes = 0
        self.saved: Any = None

    def nothing(self, at: str, *values: Any) -> None: ...

    def groups(self, only: int | None = None) -> list[dict[str, Any]]:
        """The groups of all optimizers, or of that of one stage."""
        some = self.optimizers if only is None else self.optimizers[only : only + 1]
        return [group for optimizer in some if optimizer is not None for group in optimizer.param_groups]

    def push(self, at: str, samples: int) -> None:
        x, y = self.program.data(samples, self.pushes, self.dtype)
        self.pushes += 1
        self.model.zero_grad()
        loss: Tensor = LOSSES[self.program.loss](self.model(x), y)
        loss.backward()
        for optimizer in self.optimizers:
            if optimizer is not None:
                optimizer.step()
        self.seen.append((at, loss.detach()))

    def cast(self, at: str, samples: int) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            self.push(at, samples)

    def evaluate(self, at: str, samples: int) -> None:
        modes = {module: module.training for module in self.model.modules()}
        self.model.eval()
        with torch.no_grad():
            self.seen.append((at, self.model(self.program.data(samples, 1000, self.dtype)[0])))
        for module, mode in modes.items():
            module.training = mode

    def look(self, at: str) -> None:
        self.seen += [(f"{at} {name}", value.clone()) for name, value in self.model.state_dict().items()]

    def rate(self, at: str, factor: float, only: int | None = None) -> None:
        for group in self.groups(only):
            group["lr"] *= factor

    def decay(self, at: str, value: float) -> None:
        for group in self.groups():
            group["weight_decay"] = value

    def eval(self, at: str) -> None:
        self.model.eval()

    def train(self, at: str) -> None:
        self.model.train()

    def save(self, at: str) -> None:
        self.saved = copy.deepcopy((self.model, self.blocks, self.optimizers)), self.pushes

    def load(self, at: str) -> None:
        if self.saved is not None:
            (self.model, self.blocks, self.optimizers), self.pushes = copy.deepcopy(self.saved)

    def listen(self, at: str, what: str, s: int) -> None:
        self.push(at, 2)
        self.push(at, 2)

    def forms(self, at: str) -> None:
        self.listen(at, "", 0)

    def fill(self, at: str) -> None:
        for block, other in zip(self.blocks, stages(self.program.model, len(self.blocks), self.program.seed + 1)):
            values = {n: v for n, v in other.state_dict().items() if not n.endswith("mask")}
            block.load_state_dict(values, strict=False)

    def gate(self, at: str, s: int, factor: float, how: str) -> None:
        self.blocks[s][0].gate.mul_(factor)

    def clear(self, at: str) -> None:
        for optimizer in self.optimizers if self.program.optimizer in CLEARED else ():
            if optimizer is not None:
                optimizer.state.clear()
