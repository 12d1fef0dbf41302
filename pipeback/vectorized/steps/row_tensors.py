"""Row tensors: computes with the weights of all rows of a stack at once, or of some neighbouring rows.

F is the forward, B the backward, U the update, of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from pipeback.private import fused_sgd
from pipeback.vectorized.steps.adam_rows import FIRST, SECOND, STEP, AdamStep
from pipeback.vectorized.steps.own_step import OwnStep
from pipeback.vectorized.steps.sgd_rows import Step, in_one_pass
from pipeback.vectorized.steps.summed_step import SummedStep

T = TypeVar("T")
AnyStep = Step | AdamStep | OwnStep | SummedStep


class RowTensors:
    """Weights (n, …), those numbered `trained` with a buffer each in `scratch`, if the method shifts weights.

    beside: returns the state of the optimizers by its names in torch, as rows: a list of tensors (n, …) for each name,
    and for `STEP` a matrix (weights, n). several: False: the weights are those of a single stage, without the dimension
    of the rows.
    """

    def __init__(
        self,
        weights: list[Tensor],
        trained: Sequence[int],
        scratch: Sequence[Tensor],
        beside: Callable[..., list[Any]],
        *,
        several: bool = True,
    ) -> None:
        self.weights, self.trained, self.scratch, self._beside = weights, trained, list(scratch), beside
        self.several = several
        self.stepped = [weights[n] for n in trained]
        self._number: tuple[float, Tensor] | None = None
        self._gradients: list[Tensor] = []
        self._counts: Tensor | None = None
        self._kernel = fused_sgd()

    def part(self, first: int, end: int) -> RowTensors:
        """Return some of the rows; their tensors are views of these."""
        known: list[Any] = [None, None]  # the state of all rows, and that of these

        def beside(*names: str) -> list[Any]:
            whole = self._beside(*names)
            if known[0] is not whole:
                known[:] = (
                    whole,
                    [
                        some[:, first:end] if name == STEP else [t[first:end] for t in some]
                        for name, some in zip(names, whole, strict=True)
                    ],
                )
            found: list[Any] = known[1]
            return found

        weights, scratch = ([t[first:end] for t in some] for some in (self.weights, self.scratch))
        return RowTensors(weights, self.trained, scratch, beside)

    def velocities(self) -> list[Tensor]:
        """Return the momentum buffers."""
        buffers: list[Tensor] = self._beside("momentum_buffer")[0]
        return buffers

    def kept(self, step: AnyStep) -> list[Any]:
        """Return the state of the optimizers: velocities, or p, q and the numbers of updates; none if others step."""
        if isinstance(step, SummedStep):
            return []
        step = step.base if isinstance(step, OwnStep) else step
        if isinstance(step, AdamStep):
            return self._beside(FIRST, SECOND, STEP)
        return self.velocities() if step.momentum else []

    def counts(self, steps: Tensor) -> Tensor:
        """Return the numbers of updates on the device of the weights; if they lie in host memory, as a copy that has
        always the same place.
        """
        if not self.stepped or steps.device == self.stepped[0].device:
            return steps
        if self._counts is None:
            self._counts = steps.to(self.stepped[0].device)
        else:
            self._counts.copy_(steps)
        return self._counts

    def gradients(self) -> list[Tensor]:
        """Return room for the gradients of the weights to step, always the same."""
        self._gradients = self._gradients or list(map(torch.zeros_like, self.stepped))
        return self._gradients

    def shifted(self, by: Sequence[Tensor], along: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Return w + c·v, on which F or B runs, valid until the next call; the weights themselves if `by` is empty.

        along: added instead of v.
        """
        if not by:
            return self.weights
        found = list(self.weights)
        if along is None:
            along = self.velocities()
        room: Sequence[Tensor | None] = self.scratch or [None] * len(self.stepped)
        for n, w, x, c, out in zip(self.trained, self.stepped, along, by, room, strict=True):
            found[n] = torch.addcmul(w, x, c, out=out)
        return found

    def follow(self, step: Step, some: Sequence[int] | None = None, fore: Sequence[Tensor] = ()) -> None:
        """Finish a step whose gradients are already added to the velocities, but whose decay is not.

        some: the numbers of the weights to step, among the trainable ones; None: all. fore: the weights on which this
        tick's F ran, of a step that needs them (`Step.undone`).
        """
        velocities, weights = self._chosen(some, self.velocities()), self._chosen(some, self.stepped)
        decays = self._chosen(some, step.decays)
        if in_one_pass(step, weights, lambda: velocities):
            for decay in dict.fromkeys(decays):
                mine = [n for n, other in enumerate(decays) if other == decay]
                vs = [velocities[n] for n in mine]
                # at a first step, torch's v becomes g + λ·w; here g is v
                self._kernel(
                    [weights[n] for n in mine], vs, vs, weight_decay=decay, momentum=step.momentum, lr=step.rate,
                    dampening=0.0, nesterov=False, maximize=False, is_first_step=True,
                )  # fmt: skip
            return
        for v, w, decay in zip(velocities, weights, decays, strict=True):
            if decay:
                v.add_(w, alpha=decay)
        if fore:
            self._undone(step, fore)
            return
        self._along(step, velocities, some)

    def decays(self, step: Step) -> bool:
        """Whether weights decay, all by the same λ, so that one pass may decay them and step the velocities."""
        vs = self.velocities()
        same = len(set(step.decays)) == 1 and bool(step.decays[0])
        return same and all(v.stride() == w.stride() for v, w in zip(vs, self.stepped, strict=True))

    def undo(self, step: Step, fore: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Make a step that needs no gradients but for the velocities (`Step.undone`): see `follow`."""
        vs = self.velocities()
        grads = [g if g.stride() == w.stride() else torch.empty_like(w).copy_(g) for g, w in zip(grads, self.stepped)]
        self._kernel(  # at a rate of 0, it leaves the weights as they are
            self.stepped, grads, vs, weight_decay=step.decays[0], momentum=step.momentum, lr=0.0, dampening=0.0,
            nesterov=False, maximize=False, is_first_step=False,
        )  # fmt: skip
        self._undone(step, fore)

    def _undone(self, step: Step, fore: Sequence[Tensor]) -> None:
        for w, ahead, (_, share) in zip(self.stepped, fore, step.undone, strict=True):
            w.lerp_(ahead, share)
        torch._foreach_addcmul_(self.stepped, self.velocities(), [both for both, _ in step.undone])

    def _along(self, step: Step, directions: Sequence[Tensor], some: Sequence[int] | None) -> None:
        weights = list(self._chosen(some, self.stepped))
        if not weights:
            return
        if step.rate is None:
            torch._foreach_addcmul_(weights, list(directions), list(self._chosen(some, step.along)))
        else:
            torch._foreach_add_(weights, list(directions), alpha=-step.rate)

    @staticmethod
    def _chosen(some: Sequence[int] | None, values: Sequence[T]) -> Sequence[T]:
        return values if some is None else [values[n] for n in some]

    def number(self, value: float) -> Tensor:
        """Return a number as a tensor on the device of the weights, always the same tensor for a number."""
        if self._number is None or self._number[0] != value:
            like = self.stepped[0] if self.stepped else torch.zeros(())
            self._number = value, torch.tensor(value, dtype=like.dtype, device=like.device)
        return self._number[1]

    def move(
        self,
        step: AnyStep,
        grads: Sequence[Tensor],
        some: Sequence[int] | None = None,
        used: Sequence[Tensor] | None = None,
    ) -> None:
        """Step the weights with these gradients. some: see `follow`. used: what F ran on, if that differs."""
        if isinstance(step, SummedStep):
            step.move(grads)
            return
        if isinstance(step, OwnStep):
            step.move(self.stepped, grads, used, self.kept(step), self.move)
            return
        if isinstance(step, AdamStep):
            first, second, steps = self.kept(step)
            step.move(self.stepped, first, second, steps, grads)
            return
        if any(step.decays):
            both = zip(self._chosen(some, self.stepped), self._chosen(some, step.decays), strict=True)
            grads = [torch.add(g, w, alpha=decay) if decay else g for g, (w, decay) in zip(grads, both, strict=True)]
        if not step.momentum:
            self._along(step, grads, some)
            return
        velocities = list(self._chosen(some, self.velocities()))
        torch._foreach_mul_(velocities, self.number(step.momentum))
        torch._foreach_add_(velocities, list(grads))
        self._along(step, velocities, some)
        if step.against:
            weights, against = self._chosen(some, self.stepped), self._chosen(some, step.against)
            torch._foreach_addcmul_(list(weights), list(grads), list(against))
