"""Store: where the weights and the optimizer state of stages live.

Outside the device, a stage's weights lie in one run of bytes. What F and B run on is copied to the device for them;
gradients come back, and the optimizer makes its step on the weights in the store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from pipeback.flat import Flat
from pipeback.method import Method
from pipeback.slot import Slot
from pipeback.stage import Stage


class Store:
    """The base of stores: `HostStore` and `pipeback.disk.DiskStore`.

    prefetch  stages fetched ahead of the one at work; at most prefetch + 1 have their weights on the device
    fused     use torch's fused CPU optimizers: faster, with other last bits than the default ones
    """

    prefetch: int = 1
    fused: bool = False

    def hold(self, stage: Stage, method: Method, device: torch.device) -> None:
        """Become the home of a stage, which is to compute on `device`: its weights, optimizer and method state."""
        if self.fused:
            _fuse(stage)  # or nothing is moved
        home = Flat([p.data for p in stage.module.parameters()], torch.device("cpu"), pinned=device.type == "cuda")
        with torch.no_grad():
            for p, view in zip(stage.module.parameters(), home.views, strict=True):
                view.copy_(p.data)
        stage.move_home(home, Slot(list(stage.module.parameters()), device, self.shown(home)), method)

    def shown(self, home: Flat) -> list[torch.Tensor] | None:
        """What a stage's parameters show while they are not on the device; None: NaN."""
        return None

    @contextmanager
    def opened(self, stage: Stage, *, changes: bool = False, whole: bool = False) -> Iterator[None]:
        """Meanwhile weights, optimizer and method state are in host memory; afterwards `changes` are kept.

        whole: older weights and sums of gradients too.
        """
        yield

    @contextmanager
    def lent(self, stage: Stage, tensors: Sequence[torch.Tensor | None]) -> Iterator[None]:
        """Meanwhile these, older weights or sums of gradients of a stage, are in host memory."""
        yield

    def put(self, stage: Stage) -> None:
        """Take in what is new of a stage: sums that left the device, shifted weights that B will need."""

    def read(self, stage: Stage, into: Flat) -> None:
        """Copy the newest weights to the device, by one copy."""
        assert stage.home is not None
        into.memory.copy_(stage.home.memory, non_blocking=True)

    def open(self) -> None:
        """Called once, before the first stage is held."""

    def close(self) -> None:
        """Let go of files and the like."""


@dataclass
class HostStore(Store):
    """Weights, gradients and optimizer state in host memory, pinned where a stage computes on CUDA.

    Between pushes, after `Pipeline.wait()`, the model's parameters show the weights here.
    """

    prefetch: int = 1
    fused: bool = False

    def shown(self, home: Flat) -> list[torch.Tensor] | None:
        return None if home.memory.is_pinned() else home.views


def _fuse(stage: Stage) -> None:
    kind = type(stage.optimizer)
    if "fused" not in stage.optimizer.defaults:
        raise ValueError(f"fused=True: {kind.__name__} of {stage.label} has no fused implementation; use fused=False")
    for group in stage.optimizer.param_groups:
        group["fused"], group["foreach"] = True, False
