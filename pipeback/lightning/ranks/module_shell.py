"""Module shell: the user's module while its stages run elsewhere, on other ranks or in another thread.

The pipeline gets a copy of the module. Its tensors share memory with the user's at first, but have gradients of their
own and are freed on their own. Once each rank holds only its own stages, the user's weights are on the meta device. So
what Lightning does to them (evaluation mode, zeroed gradients) does not disturb the stages while they run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from pipeback.lightning.find_stages import TrainedModule
from pipeback.splitting.split import Split
from pipeback.tensors import copies, meta


class ModuleShell:
    """The user's module, and its copy for the pipeline.

    Raises ValueError if the module cannot be copied.
    """

    def __init__(self, found: TrainedModule, module: LightningModule) -> None:
        self.name, self.module, self.empty = found.name, found.module, False
        known: dict[int, Any] = {id(p): nn.Parameter(p.data, p.requires_grad) for p in found.module.parameters()}
        known |= {id(b): b.detach() for b in found.module.buffers()}
        known |= {id(module): module, id(module.trainer): module.trainer}
        try:
            self.copy, stages = copy.deepcopy((found.module, found.stages), known)
        except Exception as error:
            raise ValueError(f"self.{found.name} cannot be copied, as several devices need it: {error}") from error
        with meta.unreferenced(self.copy):
            pass
        self.split: Split | None = None  # of the copy; None: it is to be traced
        if found.split is not None:
            parts = [part._replace(module=stage) for part, stage in zip(found.split.parts, stages, strict=True)]
            self.split = replace(found.split, parts=parts, model=self.copy)
        self.followed = found.followed
        self._places = {name: _place(tensor) for name, tensor in _tensors(found.module).items()}
        self._pairs = list(zip(found.module.modules(), self.copy.modules(), strict=True))

    def modes(self) -> Callable[[], None] | None:
        """A function that sets the training mode of the copy as the user's module has it; None if they agree."""
        odd = [(theirs, mine.training) for mine, theirs in self._pairs if mine.training != theirs.training]

        def follow() -> None:
            for module, training in odd:
                module.training = training

        return follow if odd else None

    def check(self) -> None:
        """Raise RuntimeError if the tensors of the user's module were replaced since it was copied."""
        for name, tensor in _tensors(self.module).items():
            if self._places[name] != _place(tensor):
                raise RuntimeError(
                    f"{self.name}.{name} was replaced after the Trainer had set up; write into it instead, as "
                    "load_state_dict and copy_ do"
                )

    def values(self) -> dict[str, Tensor]:
        """The weights and buffers that this rank holds."""
        mine = {name: tensor.detach() for name, tensor in _tensors(self.copy).items() if not tensor.is_meta}
        return {name: tensor.to("cpu", copy=True) for name, tensor in mine.items()}

    def let_go(self, forward: Callable[..., Any]) -> None:
        """Free the values of the module, and replace its forward by `forward`."""
        if not self.empty:
            meta.let_go(self.module)
        self.module.forward = forward
        self.empty = True

    def fill(self, values: dict[str, Tensor], device: torch.device) -> None:
        meta.take_up(self.module, device)
        for name, tensor in _tensors(self.module).items():
            tensor.data.copy_(values[name])
        self.restore()
        self.empty = False

    def restore(self) -> None:
        """Give the module its own forward again."""
        self.module.__dict__.pop("forward", None)

    def check_call(self, inputs: tuple[Any, ...], named: dict[str, Any], after: bool) -> None:
        """Raise if the stages cannot serve this call outside of F. after: whether F has run in this `training_step`."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"self.{self.name} was called with gradients outside of training_step; its stages are on several "
                "devices, which give gradients there only: call it in torch.no_grad()"
            )
        if any(module.training for module in self.module.modules()):
            raise RuntimeError(
                f"self.{self.name} was called without gradients in training mode; over several devices that is not "
                f"possible: call self.{self.name}.eval() before, and train() afterwards"
            )
        if after:
            raise RuntimeError(
                f"training_step called self.{self.name} without gradients after it had called it with gradients, where "
                "the other ranks leave training_step; call it before"
            )
        if not self.followed and (len(inputs) != 1 or named):
            raise TypeError(
                f"self.{self.name} was called with {len(inputs)} positional and {len(named)} named arguments; the "
                "first stage takes one tensor or a tuple of tensors"
            )


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict([*module.named_parameters(), *module.named_buffers()])


def _place(tensor: Tensor) -> int:
    return copies.pieces(tensor)[-1].data_ptr()
