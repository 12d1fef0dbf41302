"""`pytest --device cuda` has pipelines train there; `--default-device cuda` makes it torch's default device, too.

A device of `sim` stands for the simulated accelerator of tests/simulated. Numbers that a test draws with a generator of
its own are drawn on the CPU and moved, so they are the same everywhere. What it turns into an array of numpy, and what
it compares by `torch.equal`, comes to the CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

import pipeback

ARRAYS = (torch.Tensor.numpy, torch.Tensor.__array__)


class Adapted(TorchFunctionMode):
    """What tests do that works on the CPU alone."""

    def __init__(self, device: torch.device | None) -> None:
        super().__init__()
        self.device, self.made = device, _device_constructors()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ARRAYS:
            return func(args[0].cpu(), *args[1:], **kwargs)
        if func is torch.equal:
            return func(args[0].cpu(), args[1].cpu())
        if self.device is not None and func in self.made and kwargs.get("generator") and not kwargs.get("device"):
            return func(*args, **kwargs | {"device": "cpu"}).to(self.device)
        return func(*args, **kwargs)


def use(name: str, folder: Path, *, default: bool) -> None:
    """Have the pipelines of this process's tests train on a device. folder: for the simulated one, once compiled.

    default: it is torch's default device; else models come to it when a pipeline is built, and what is pushed follows.
    """
    if name == "sim":
        from tests.simulated import device as simulated

        simulated.register(folder)
    device = torch.device(name)
    if not default:
        begin = pipeback.Pipeline.__init__

        def moved(self: pipeback.Pipeline, model: Any, *given: Any, **options: Any) -> None:
            for module in [model] if isinstance(model, nn.Module) else model:
                if isinstance(module, nn.Module):
                    module.to(device)
            begin(self, model, *given, **options)

        pipeback.Pipeline.__init__ = moved  # type: ignore[method-assign]
        Adapted(None).__enter__()
        return
    torch.set_default_device(device)
    Adapted(device).__enter__()
