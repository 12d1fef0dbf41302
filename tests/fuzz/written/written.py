"""A training_step whose source is drawn, and fits with graphs that stand for it and without."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeback import Debug
from pipeback.lightning import captured_step
from tests.lightning.plain_steps import SAMPLES, fitted, same_fits, step_of

HEAD = """
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from tests.lightning.plain_steps import Plain

FACTOR = 0.25


def helper(a, n=2):
    for _ in range(n):
        a = a * 0.9
    return a


class Power(nn.Module):
    def __init__(self):
        super().__init__()
        self.power = 2

    def forward(self, a):
        return a**self.power


class Drawn(Plain):
    def __init__(self):
        super().__init__()
        self.leaky, self.own = nn.LeakyReLU(0.1), Power()
        self.shares, self.table = [0.5, 2.0], {"b": (1.0, 0.5), "each": self.each * 2}
        self.soft = partial(F.softplus, beta=2.0)

    def helped(self, a):
        return a - a.mean() if self.hparams.share else a

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 4:
            CHANGE

    def training_step(self, batch, batch_idx):
        x, y = batch
"""


@dataclass(frozen=True)
class Written:
    """A training_step: its lines, and the method and the micro-batch size that train it.

    change: what a hook does before the fifth batch; a graph of those before must not stand where that is read.
    """

    lines: tuple[str, ...]
    method: str = "pb"
    size: int = 1
    change: str = "pass"

    @property
    def command(self) -> str:
        """What replays it."""
        return f'python -m tests.fuzz "{self!r}"'

    def module(self) -> Any:
        """The class, made of a file, in which its source is found."""
        file = Path(tempfile.mkdtemp()) / "drawn.py"
        file.write_text(HEAD.replace("CHANGE", self.change) + "".join(f"        {line}\n" for line in self.lines))
        spec = importlib.util.spec_from_file_location(f"drawn_{file.parent.name}", file)
        assert spec is not None and spec.loader is not None
        made = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
        return made.Drawn


def check_written(one: Written) -> None:
    """Raise AssertionError where graphs compute something else than the lines do, or some of them run for nothing."""
    kind, found = one.module(), []
    for few in (captured_step.FEW, SAMPLES + 1):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(captured_step, "FEW", few)
            found.append(fitted(kind, one.method, one.size, where={"debug": Debug(stop_at_nan=False)}))
    (mine, how), (wanted, _) = found
    told = step_of(how)
    assert told == "a graph stands for it" or "takes a number out of a tensor" in told, told
    same_fits(mine, wanted)
