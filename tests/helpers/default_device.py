"""`pytest --device cuda`: what tests make without naming a device is made there, as under `torch.set_default_device`.

A device of `sim` stands for the simulated accelerator of tests/simulated. Numbers that a test draws with a generator of
its own are drawn on the CPU and moved, so they are the same everywhere. What it turns into an array of numpy, and what
it compares by `torch.equal`, comes to the CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

ARRAYS = (torch.Tensor.numpy, torch.Tensor.__array__)


class Adapted(TorchFunctionMode):
    """What tests do that works on the CPU alone."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.made = device, _device_constructors()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ARRAYS:
            return func(args[0].cpu(), *args[1:], **kwargs)
        if func is torch.equal:
            return func(args[0].cpu(), args[1].cpu())
        if kwargs.get("generator") is not None and func in self.made and kwargs.get("device") is None:
            return func(*args, **kwargs | {"device": "cpu"}).to(self.device)
        return func(*args, **kwargs)


def use(name: str, folder: Path) -> None:
    """Have the tests of this process make their tensors on a device. folder: for the simulated one, once compiled."""
    if name == "sim":
        from tests.simulated import device as simulated

        simulated.register(folder)
    device = torch.device(name)
    torch.set_default_device(device)
    Adapted(device).__enter__()
