"""Step twin: a LightningModule of its own with the same weights, whose `training_step` leaves no trace.

It runs where `training_step` is traced, or run beforehand to see what it calls. What it logs is dropped, metrics count
nothing, and attributes that it sets are the twin's. Prints are not caught. Where stages need modules of their own, a
twin has copies of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from pipeback.lightning import lightning_internals

OWN = {"_modules", lightning_internals.TRAINER, "forward", "log", "log_dict"}  # attributes that the twin has of its own
HELD = {"_parameters", "_buffers"}  # and those of a twin with copies
CHANGING = ("current_epoch", "global_step")  # what a Trainer counts


def twin(module: LightningModule, forward: Callable[..., Any], read: Callable[[str], None]) -> LightningModule:
    """Return the twin, with this forward. read: hears which counters of the Trainer are read."""
    found = object.__new__(type(module))
    nn.Module.__init__(found)  # whoever listens to the module does not hear of the twin
    own: dict[str, Any] = vars(found)
    refresh(found, module)
    own["_modules"] = {name: _silent(child) for name, child in module._modules.items()}
    own[lightning_internals.TRAINER] = _Trainer(module, read)
    own["log"] = own["log_dict"] = _nothing
    own["forward"] = forward
    return found


class Copies:
    """A twin with copies of the modules. known: what stands for an object in the copies, by its identity; it gets all
    that is copied.
    """

    def __init__(self, twin: LightningModule, module: LightningModule, known: dict[int, Any]) -> None:
        self._known = known
        self.twin = known[id(module)] = object.__new__(type(twin))
        nn.Module.__init__(self.twin)
        own: dict[str, Any] = vars(self.twin)
        own.update((key, copy.deepcopy(vars(twin)[key], known)) for key in ("_modules", *HELD))
        own.update((key, vars(twin)[key]) for key in OWN - {"_modules"})
        # lists of results may be long, so that only those are gone through that hold modules now
        self._holders = {key for key, value in vars(module).items() if self._holds(value)}
        refresh(self.twin, module, self)

    def standing_for(self, key: str, value: Any) -> Any:
        """Return what the twin has for an attribute of the module: copies stand for modules and weights in it."""
        return self._exchanged(value) if key in self._holders or isinstance(value, (nn.Module, Tensor)) else value

    def _holds(self, value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return any(map(self._holds, value))
        return any(map(self._holds, value.values())) if isinstance(value, dict) else id(value) in self._known

    def _exchanged(self, value: Any) -> Any:
        if isinstance(value, (nn.Module, Tensor)):
            return self._known.get(id(value), value)
        if type(value) in (list, tuple):
            return type(value)(map(self._exchanged, value))
        return {key: self._exchanged(each) for key, each in value.items()} if type(value) is dict else value


def refresh(twin: LightningModule, module: LightningModule, copies: Copies | None = None) -> None:
    """Give the twin the attributes that the module has now. copies: of a twin that has some."""
    left_out = OWN if copies is None else OWN | HELD
    now = {key: value for key, value in vars(module).items() if key not in left_out and "hook" not in key}
    vars(twin).update(now if copies is None else {key: copies.standing_for(key, each) for key, each in now.items()})


@contextmanager
def put_back(module: nn.Module) -> Iterator[None]:
    """A context that restores what lists, dictionaries and tensors in the attributes of the module hold."""
    held = [x for key, x in vars(module).items() if not key.startswith("_")]
    containers = [(x, x.copy()) for x in held if isinstance(x, (list, dict, set))]
    tensors = [(x, x._version, x.detach().clone()) for x in held if isinstance(x, Tensor)]
    try:
        yield
    finally:
        for now, before in containers:
            now.clear()
            now.extend(before) if isinstance(now, list) else now.update(before)
        for tensor, version, value in tensors:
            if tensor._version != version:
                tensor.data.copy_(value)


@contextmanager
def attributes_kept(twin: nn.Module) -> Iterator[None]:
    """A context that takes back which attributes were set."""
    before = dict(vars(twin))
    try:
        yield
    finally:
        vars(twin).clear()
        vars(twin).update(before)


@contextmanager
def attributes_unset(twin: nn.Module, forward: str) -> Iterator[None]:
    """A context that raises ValueError if its body sets attributes. forward: the function that runs, in the message."""
    before = dict(vars(twin))
    yield
    new = [key for key, value in vars(twin).items() if key not in before or before[key] is not value]
    if new:
        raise ValueError(
            f"{forward} sets self.{new[0]}, but it runs in the stages, and training_step does not see what they set; "
            f"have forward return it, and write in training_step: out, self.{new[0]} = self(x)"
        )


class _Trainer:
    """A Trainer that tells which of its counters are read, and that has no logger."""

    def __init__(self, module: LightningModule, read: Callable[[str], None]) -> None:
        self.__dict__.update(_module=module, _read=read, logger=DummyLogger(), loggers=[DummyLogger()])

    def __getattr__(self, name: str) -> Any:
        if name in CHANGING:
            self._read(name)
        return getattr(self._module.trainer, name)


class Silent(nn.Module):
    """Stands for a metric, or for several with these names: it counts nothing, and its values are 0."""

    def __init__(self, names: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.names = names

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return {name: torch.zeros(()) for name in self.names} if self.names else torch.zeros(())

    update = compute = forward

    def reset(self) -> None:
        """Do nothing."""

    def __getitem__(self, name: Any) -> Silent:
        return Silent()

    def items(self) -> Any:
        """The names, with what stands for their metrics."""
        return [(name, Silent()) for name in self.names]


def _silent(module: nn.Module | None) -> nn.Module | None:
    if isinstance(module, MetricCollection):
        return Silent(tuple(map(str, module.keys())))
    if isinstance(module, Metric):
        return Silent()
    if type(module) is nn.ModuleDict and any(isinstance(m, Metric) for m in module.values()):
        return nn.ModuleDict({name: _silent(child) for name, child in module.items()})  # type: ignore[misc]
    if type(module) is nn.ModuleList and any(isinstance(m, Metric) for m in module):
        return nn.ModuleList([_silent(child) for child in module])  # type: ignore[misc]
    return module


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Log nothing."""
