"""Module shell: the user's module while its stages run elsewhere, on other ranks or in another thread.

The pipeline gets a copy of the module. Its tensors share memory with the user's at first, but have gradients of their
own and are freed on their own. Once each rank holds only its own stages, the user's weights are on the meta device. So
what Lightning does to them (evaluation mode, zeroed gradients) does not disturb the stages while they run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from pipeback.lightning.call_override import Fronts
from pipeback.lightning.find_stages import TrainedModule
from pipeback.splitting.split import Split
from pipeback.stages.module_settings import Mirror
from pipeback.stages.trained_weights import Trained
from pipeback.tensors import copies, meta


class ModuleShell:
    """The user's module, and its copy for the pipeline.

    Where `training_step` is followed, the module is the LightningModule; only weights that stages have are freed, since
    the rest of it goes on in the user's code.

    Raises ValueError if the module cannot be copied.
    """

    def __init__(self, found: TrainedModule, module: LightningModule) -> None:
        self.found, self.empty, self._fronts = found, False, Fronts()
        self._stand_ins = list[tuple[nn.Module, Callable[..., Any]]]()  # modules and their forwards while it is empty
        self.step = found.step
        self.module = found.module if self.step is None else module
        known: dict[int, Any] = {id(p): nn.Parameter(p.data, p.requires_grad) for p in found.module.parameters()}
        known |= {id(b): b.detach() for b in found.module.buffers()}
        known |= {id(module): module, id(module.trainer): module.trainer}
        try:
            if self.step is None:
                self.copy, stages = copy.deepcopy((found.module, found.stages), known)
            else:
                self.copy, stages = self.step.apart(known), []
        except Exception as error:
            raise ValueError(f"{self.shown} cannot be copied, as several devices need it: {error}") from error
        for p in filter(attrgetter("requires_grad"), found.module.parameters()):
            copies.copy_weight_hooks(p, known[id(p)], known)
        with meta.unreferenced(self.copy):
            pass
        self.split: Split | None = None  # of the copy; None: it is to be traced
        if found.split is not None:
            parts = [part._replace(module=stage) for part, stage in zip(found.split.parts, stages, strict=True)]
            self.split = replace(found.split, parts=parts, model=self.copy)
        self._values = _tensors(found.module)  # that stages have
        self._freed = [*self._values.values()]
        self._writes: list[int] = []  # their counters of writes when they were freed
        self._places = {name: _place(tensor) for name, tensor in self._values.items()}
        first = 0 if self.step is None else 1  # a twin follows by itself
        self._mirror = Mirror([list(each.modules())[first:] for each in (found.module, self.copy)])
        self._trained = Trained(found.module.parameters())

    def cut(self, split: Split) -> None:
        """Hear of the stages: what of a LightningModule is in none of them stays as it is."""
        if self.step is None:
            return
        inside = {id(t) for part in split.parts for t in (*part.module.parameters(), *part.module.buffers())}
        names = {name for name, mine in _tensors(self.copy).items() if id(mine) in inside}
        self._values = {name: theirs for name, theirs in self._values.items() if name in names}
        weights = [theirs for theirs in self._values.values() if isinstance(theirs, nn.Parameter)]
        self._freed = [p for p in weights if p.requires_grad or self.step.single is not None]

    def changed(self) -> bool:
        """Whether modes or numbers were set, or weights frozen or trained again, since the copy last followed."""
        return self._mirror.changed() or self._trained.changed()

    def follow(self) -> None:
        """Set in the copy what was set in the module; nobody may compute with it meanwhile."""
        self._mirror.follow()
        for mine, theirs in zip(self.copy.parameters(), self.found.module.parameters(), strict=True):
            mine.requires_grad_(theirs.requires_grad)
        self._trained = Trained(self.found.module.parameters())

    @property
    def shown(self) -> str:
        """The module in messages."""
        return self.found.shown if self.step is None else self.step.single or "self"

    @property
    def serves(self) -> bool:
        """Whether the stages can serve calls of the module: they compute one call, not several."""
        return self.step is None or self.step.single is not None

    def check(self) -> None:
        """Raise RuntimeError if the tensors of the user's module were replaced since it was copied."""
        now = _tensors(self.found.module)
        for name in self._values:
            if self._places[name] != _place(now[name]):
                raise RuntimeError(
                    f"{self.found.shown}.{name} was replaced after the Trainer had set up; write into it instead, as "
                    "load_state_dict and copy_ do"
                )

    def check_writes(self) -> None:
        """Raise RuntimeError if somebody has written into a weight of the module while it is empty."""
        if not self.empty or self._writes == list(map(_written, self._freed)):
            return
        names = {id(tensor): name for name, tensor in self._values.items()}
        pairs = zip(self._freed, self._writes, strict=True)
        name = next(names[id(tensor)] for tensor, before in pairs if _written(tensor) != before)
        raise RuntimeError(
            f"{self.found.shown}.{name} was written into within fit, but over several devices its values are with the "
            "stages then, and what was written is lost; use Trainer(devices=1), or write before fit"
        )

    def values(self) -> dict[str, Tensor]:
        """The weights and buffers that this rank holds."""
        mine = {n: t.detach() for n, t in _tensors(self.copy).items() if n in self._values and not t.is_meta}
        return {name: tensor.to("cpu", copy=True) for name, tensor in mine.items()}

    def let_go(self, forward: Callable[..., Any]) -> None:
        """Free the values of the module, and replace its forward by `forward`."""
        if not self.empty:
            meta.let_go(self.module, self._freed)
            self._writes = list(map(_written, self._freed))
        if not self._stand_ins:
            one = [(self.module, forward)]
            self._stand_ins = one if self.step is None else [*self.step.stand_ins(forward, self._freed)]
        for module, stand_in in self._stand_ins:
            self._fronts.put(module, stand_in)
        self.empty = True

    def fill(self, values: dict[str, Tensor], device: torch.device) -> None:
        meta.take_up(self.module, device, self._freed)
        for name, tensor in self._values.items():
            tensor.data.copy_(values[name])
        self.restore()
        self.empty = False

    def restore(self) -> None:
        """Give the module its own forward again."""
        self._fronts.back()

    def check_call(self, inputs: tuple[Any, ...], named: dict[str, Any], after: bool) -> None:
        """Raise if the stages cannot serve this call outside of F. after: whether F has run in this `training_step`."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{self.shown} was called with gradients outside of training_step; its stages are on several "
                "devices, which give gradients there only: call it in torch.no_grad()"
            )
        called = self.module if self.step is None else self.step.called[self.shown]
        if any(module.training for module in called.modules()):
            raise RuntimeError(
                f"{self.shown} was called without gradients in training mode; over several devices that is not "
                f"possible: call {self.shown}.eval() before, and train() afterwards"
            )
        if after:
            raise RuntimeError(
                f"training_step called {self.shown} without gradients after it had called it with gradients, where "
                "the other ranks leave training_step; call it before"
            )
        if not self.found.followed and (len(inputs) != 1 or named):
            raise TypeError(
                f"{self.shown} was called with {len(inputs)} positional and {len(named)} named arguments; the "
                "first stage takes one tensor or a tuple of tensors"
            )


_written = attrgetter("_version")


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict([*module.named_parameters(), *module.named_buffers()])


def _place(tensor: Tensor) -> int:
    return copies.pieces(tensor)[-1].data_ptr()
