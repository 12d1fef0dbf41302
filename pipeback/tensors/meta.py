"""Meta: moves weights to and from the meta device, where they have shapes and no values.

A model may be built there, so that no process ever holds the whole of it; stages that other ranks hold stay there.
Parameters keep their identity when they are moved, so optimizers and others that refer to them are not affected.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pipeback.private import heard_again


def absent(module: nn.Module) -> bool:
    """Whether a module has weights or buffers, and these are on the meta device."""
    return any(tensor.is_meta for tensor in _tensors(module))


def move(tensors: Iterable[Tensor], device: torch.device | str) -> None:
    """Move tensors to `device` without their values: to the meta device to free memory, from it to allocate it.

    Sparse ones stay as they are, since how many values they have is a value, too.
    """
    torch.clear_autocast_cache()  # it keeps weak references to weights, which prevent a move
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            continue
        tensor.grad = None
        other: Tensor = torch.empty_like(tensor.detach(), device=device)
        if isinstance(tensor, nn.Parameter):
            other = nn.Parameter(other, tensor.requires_grad)
        torch.utils.swap_tensors(tensor, other)
        heard_again(tensor)


@contextmanager
def unreferenced(module: nn.Module) -> Iterator[None]:
    """A context without the weak references that nn.LSTM and the like keep to their weights, which prevent a move.

    On exit they refer to the module's own weights, even in a copy, where they may have referred to the original's.
    """
    recurrent: list[Any] = [m for m in module.modules() if isinstance(m, nn.RNNBase)]
    for m in recurrent:
        m._flat_weight_refs = []
    yield
    for m in recurrent:
        m._flat_weight_refs = [None if w is None else weakref.ref(w) for w in m._flat_weights]


def let_go(module: nn.Module, tensors: Iterable[Tensor] | None = None) -> None:
    """Free the memory of weights and buffers. tensors: those of the module that are meant; None: all."""
    with unreferenced(module):
        move(_tensors(module) if tensors is None else tensors, "meta")


def take_up(module: nn.Module, device: torch.device | str, tensors: Iterable[Tensor] | None = None) -> None:
    """Allocate memory for weights and buffers, whose values are undefined. tensors: as for `let_go`."""
    with unreferenced(module):
        move(_tensors(module) if tensors is None else tensors, device)


def initialise(
    module: nn.Module, label: str, seed: int, device: torch.device | str, init: Callable[[nn.Module], object] | None
) -> None:
    """Initialise a module from the meta device. The values depend on `seed` alone, not on the process or device.

    init: a function that sets the values; None: the `reset_parameters` of every layer, inner ones first, as
    construction does. Raises ValueError naming the layer that has weights or buffers and no `reset_parameters`.
    """
    take_up(module, "cpu")
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        with torch.no_grad():
            if init is not None:
                init(module)
            else:
                for name, layer in reversed(list(module.named_modules())):
                    _reset(layer, f"{label}: {type(layer).__name__} {name!r}")
    finally:
        torch.set_rng_state(before)
    if torch.device(device).type != "cpu":
        values = [tensor.detach() for tensor in _tensors(module)]
        take_up(module, device)
        with torch.no_grad():
            for tensor, value in zip(_tensors(module), values, strict=True):
                tensor.copy_(value)


def _reset(layer: nn.Module, where: str) -> None:
    own = [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
    if not own:
        return
    # nn.MultiheadAttention calls its own `_reset_parameters`
    reset = getattr(layer, "reset_parameters", None) or getattr(layer, "_reset_parameters", None)
    if reset is None:
        raise ValueError(
            f"{where} is on the meta device and has no reset_parameters() that would give {own[0][0]!r} its values; "
            "write one, give store=pipeback.Streaming(init=...), or build the model with its values"
        )
    reset()


def _tensors(module: nn.Module) -> list[Tensor]:
    """Return the weights and buffers of a module, each once."""
    return [*module.parameters(), *module.buffers()]


def shaped(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape for use under a fake mode; a meta tensor becomes one on the CPU."""
    device = "cpu" if tensor.is_meta else tensor.device
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device, requires_grad=tensor.requires_grad)
