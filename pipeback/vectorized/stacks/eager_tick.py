"""Eager tick: does F (forward), B (backward) and U (update) of some neighbouring rows of a stack without a compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pipeback.errors import StageError
from pipeback.vectorized.steps.joint_step import JointStep
from pipeback.vectorized.steps.row_clipping import RowClipping
from pipeback.vectorized.steps.row_tensors import AnyStep, RowTensors
from pipeback.vectorized.steps.sgd_rows import Step
from pipeback.vectorized.steps.summed_step import SummedStep
from pipeback.vectorized.tracing.graphs import Graph, Graphs
from pipeback.vectorized.tracing.product_gradients import products


class WaitingRoom(NamedTuple):
    """Where the tensors that wait between F and B of these rows are.

    left: returns those for B. put: keeps those of F. keep: keeps the weights on which F is going to run, and used:
    returns those on which it ran, where B runs on them. fore: keeps the newest weights, and returns those on which F
    runs, where these are older. f, b: micro-batches of F and B at the place p = 0.
    """

    left: Callable[[int], Sequence[Tensor]]  # of b
    put: Callable[[int, Sequence[Tensor]], None]  # of f
    keep: Callable[[int, Sequence[Tensor] | None], None] | None = None
    used: Callable[[int], list[Tensor]] | None = None
    fore: Callable[[int], list[Tensor]] | None = None  # of f


class EagerTick:
    """The rows of `tensors`, with graphs for so many rows, called directly.

    accumulate: the backward with momentum. clipping: of the gradients. name: returns what errors call the rows and
    their micro-batches at a tick. together: whether the weights are better stepped in one pass, together with those of
    other stacks. views: the output of the graph `made`, if it consists of views of the weights.
    """

    def __init__(
        self,
        tensors: RowTensors,
        graphs: Graphs,
        accumulate: Graph,
        clipping: RowClipping,
        name: Callable[[int], str],
        *,
        together: bool,
        views: Sequence[Tensor] | None,
    ) -> None:
        self.tensors, self.graphs, self.together, self.views = tensors, graphs, together, views
        self.name, self._accumulate, self._clipping = name, accumulate, clipping

    def run(
        self,
        f: int,
        b: int,
        xs: Sequence[Tensor],
        gs: Callable[[], Sequence[Tensor]],
        step: AnyStep,
        joint: JointStep,
        room: WaitingRoom,
        give: Callable[[Literal["F", "B"], list[Any]], None],
        drift: Sequence[Tensor] = (),
        before: Sequence[Tensor] = (),
    ) -> None:
        """Do F, B and U, or leave U to the joint step.

        gs: returns the gradients, once B needs them. give: takes the outputs ("F") and the gradients of the inputs
        ("B"), as soon as they are there. drift, before: δ, an average of w' − w along which B is shifted, and memory
        for the weights before the step.
        """
        forward, outputs = self.graphs.forward, self.graphs.outputs
        fore = self.fore(f, step, room, drift, before)
        saved = room.left(b)
        try:
            sent = forward(*fore, *xs)
        except Exception as error:
            raise self._failed("forward", f, error) from error
        give("F", list(sent[:outputs]))
        self.back(b, fore, saved, gs, step, joint, room, give, drift, before)
        room.put(f, sent[outputs:])

    def fore(
        self, f: int, step: AnyStep, room: WaitingRoom, drift: Sequence[Tensor] = (), before: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """Return the weights on which F is going to run, and keep what is needed of them."""
        tensors = self.tensors
        fore = tensors.shifted(step.ahead, drift or None) if room.fore is None else room.fore(f)
        if isinstance(step, SummedStep):
            step.shift([fore[n] for n in tensors.trained])
        if room.keep is not None:
            room.keep(f, [fore[n] for n in tensors.trained] if step.ahead else None)
        if step.drift:
            torch._foreach_copy_(list(before), tensors.stepped)
        return fore

    def back(
        self,
        b: int,
        fore: Sequence[Tensor],
        saved: Sequence[Tensor],
        gs: Callable[[], Sequence[Tensor]],
        step: AnyStep,
        joint: JointStep,
        room: WaitingRoom,
        give: Callable[[Literal["F", "B"], list[Any]], None],
        drift: Sequence[Tensor] = (),
        before: Sequence[Tensor] = (),
    ) -> None:
        """Do B and U, or leave U to the joint step. fore: what `fore` gave. saved: by F for this B."""
        tensors, (_, backward, made, *_), clips = self.tensors, self.graphs, self._clipping.on
        then = None if room.used is None else room.used(b)
        if then is not None:
            views = made(*then)
        elif step.back or self.views is None:
            views = made(*tensors.shifted(step.back, drift or None))
        else:
            views = self.views
        together = self.together or clips  # all gradients are there before a weight moves
        if together and isinstance(step, Step) and not step.drift and joint.fits(tensors, step):
            joint.add(tensors, step, self._gradients(backward(*saved, *views, *gs()), give))
        elif isinstance(step, Step) and self._undoes(step, room, drift) and together and tensors.decays(step):
            grads = self._gradients(backward(*saved, *views, *gs()), give)
            tensors.undo(step, [fore[n] for n in tensors.trained], grads)
        elif (
            isinstance(step, Step)
            and not clips
            and step.momentum
            and (not step.late or self._undoes(step, room, drift))
        ):
            factor = tensors.number(step.momentum)
            gxs = self._accumulate(*saved, *views, *gs(), step.momentum, factor, *tensors.velocities())
            give("B", list(gxs))
            tensors.follow(step, fore=[fore[n] for n in tensors.trained] if step.late else ())
        else:
            grads = self._gradients(backward(*saved, *views, *gs()), give, sums=isinstance(step, SummedStep))
            tensors.move(step, grads, used=then and [then[n] for n in tensors.trained])
        drifted(drift, before, tensors.stepped, step.drift)

    def _gradients(
        self, found: Sequence[Tensor], give: Callable[[Literal["F", "B"], list[Any]], None], *, sums: bool = False
    ) -> Sequence[Tensor]:
        """Give what B has found for the stages before; return what it has for weights. sums: these are not clipped, but
        their sum.
        """
        give("B", list(found[len(self.tensors.weights) :]))
        grads = [found[n] for n in self.tensors.trained]
        return grads if sums else self._clipping.clip(self.tensors, grads)

    @staticmethod
    def _undoes(step: Step, room: WaitingRoom, drift: Sequence[Tensor]) -> bool:
        """Whether the step can be made without gradients: from w + c·v, on which F ran, and which is still there."""
        return bool(step.late) and not step.back and not drift and room.fore is None and bool(step.undone)

    def _failed(self, what: str, tick: int, error: Exception) -> StageError:
        return StageError(f"{self.name(tick)}: the {what} failed: {error}", what)


def drifted(
    drift: Sequence[Tensor], before: Sequence[Tensor], weights: Sequence[Tensor], shares: Sequence[Tensor]
) -> None:
    """Do δ ← γ·δ + (1 − γ)·(w' − w). before: w, which is overwritten. shares: 1 − γ."""
    for d, w, old, share in zip(drift, weights, before, shares, strict=False):
        d.lerp_(torch.sub(w, old, out=old), share)


def steps_together(graphs: Graphs, rows: RowTensors) -> bool:
    """Whether weights are better stepped together with those of other stacks: most of their gradients are no products,
    which are added to the velocities as they are computed.
    """
    into = sum(rows.weights[n].nbytes for n in products(graphs, rows.trained))
    return 2 * into < sum(w.nbytes for w in rows.stepped)
