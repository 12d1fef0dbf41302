"""Tick: the steady state of stages that run as one. At a tick every stage does F, B and U of one micro-batch each, none
feeds another, and all that a stack does is one function of tensors:

    Y, saved ← F(W, X)        G_X, v ← B(saved D ticks ago, W, G), v ← m·v + g        W ← W − η·v

X is what the rows before gave at the last tick, G what the rows behind gave back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeback.adaptive import Adaptive, adapted
from pipeback.graphed import side_by_side
from pipeback.graphs import Graph, accumulating, direct
from pipeback.rings import Kind
from pipeback.rows import Rows, Step
from pipeback.stack import Stack
from pipeback.stage import Stage

Given = tuple[tuple[Any, ...], tuple[Any, ...]]


class Moving:
    """A stack whose rows all move on at every tick."""

    def __init__(self, stack: Stack, kind: Kind) -> None:
        self.stack, self.kind = stack, kind
        self.rings = stack.rings(kind)
        self._accumulate = direct(accumulating(self.rings.written, stack.rows.trained)) if stack.fuse is None else None

    def begin(self, f: int, b: int) -> None:
        """Before the tick at which row r does F of micro-batch f − r and B of b + r."""
        rings = self.rings
        self.y = torch.cat([rings.inputs[f % rings.length, 1:], rings.inputs[0, :1]])
        self.gx = torch.cat([rings.gradients[0, :1], rings.gradients[b % rings.length, :-1]])

    def end(self, f: int, b: int) -> None:
        """After all ticks before that one."""
        rings = self.rings
        rings.inputs[f % rings.length, 1:] = self.y[:-1]
        rings.gradients[b % rings.length, :-1] = self.gx[1:]

    def given(self, b: int, x: Tensor, g: Tensor, step: Step | Adaptive) -> Given:
        """What `compiled` is given: what stays where it is, and the rest."""
        rows, rings = self.stack.rows, self.rings
        fixed = rows.weights, rows.kept(step), rings.saved
        return fixed, (rings.slot(b), x.contiguous(), self.y, g.contiguous(), self.gx, step.ahead, numbers(rows, step))

    def compiled(
        self,
        how: How,
        weights: Sequence[Tensor],
        kept: Sequence[Any],
        rings: Sequence[Tensor],
        at: Tensor,
        x: Tensor,
        y: Tensor,
        g: Tensor,
        gx: Tensor,
        ahead: Sequence[Tensor],
        numbers: Numbers,
    ) -> tuple[Tensor, list[Tensor], Tensor, Sequence[Tensor]]:
        """The whole tick, for a compiler, but for `finish`."""
        forward, backward, made = self.rings.written
        trained, used = self.stack.rows.trained, list(weights)
        for n, v, c in zip(trained, kept, ahead, strict=False):
            used[n] = torch.addcmul(used[n], v, c)
        y, *left = forward(*used, torch.cat([x[None], y[:-1]]))
        saved = [ring.index_select(0, at)[0] for ring in rings]
        gives = self.rings.factors if self.rings.factors is not None and how.by_factors else backward
        found = gives(*saved, *made(*weights), torch.cat([gx[1:], g[None]]))
        grads, gx, factors = found[: len(weights)], found[len(weights)], found[len(weights) + 1 :]
        how.step([weights[n] for n in trained], kept, [grads[n] for n in trained], numbers)
        return y, left, gx, factors

    def finish(self, factors: Sequence[Tensor], step: Step | Adaptive) -> None:
        """The step of the weights whose gradients come as factors."""
        rows, pairs = self.stack.rows, list(zip(factors[::2], factors[1::2], strict=True))
        if not pairs or isinstance(step, Adaptive):
            return
        some = [rows.trained.index(n) for n in self.rings.factored]
        if not step.momentum:
            rows.move(step, [a * b if a.shape[-1] == 1 else torch.bmm(a, b) for a, b in pairs], some)
            return
        for m, (a, b) in zip(some, pairs, strict=True):
            v = rows.velocities()[m]
            if a.shape[-1] == 1:
                v.mul_(rows.number(step.momentum)).addcmul_(a, b)
            else:
                v.baddbmm_(a, b, beta=step.momentum)
        rows.follow(step, some)

    def eager(self, f: int, b: int, x: Tensor, g: Tensor, step: Step | Adaptive) -> None:
        """The whole tick."""
        rows, rings, (forward, backward, made) = self.stack.rows, self.rings, self.rings.eager
        saved = rings.left(b)
        y, *left = forward(*rows.shifted(step), torch.cat([x[None], self.y[:-1]]))
        views = made(*rows.weights) if rings.made is None else rings.made
        gradient = torch.cat([self.gx[1:], g[None]])
        if isinstance(step, Step) and step.momentum and step.late is None and self._accumulate is not None:
            factor = rows.number(step.momentum)
            self.gx = self._accumulate(*saved, *views, gradient, step.momentum, factor, *rows.velocities())
            rows.follow(step)
        else:
            *grads, self.gx = backward(*saved, *views, gradient)
            rows.move(step, [grads[n] for n in rows.trained])
        self.y = y
        rings.put(rings.places(f), left)


class Judge:
    """The last stage with the loss, whose F and B are of one micro-batch, as one graph."""

    def __init__(self, stage: Stage, graph: Graph, rows: Rows, x: Tensor, target: Any, *, check: bool) -> None:
        """rows: the stage's weights. check: nothing moves where the loss is not finite."""
        self.stage, self.graph, self.rows, self.check = stage, graph, rows, check
        self.form = form(x, target)

    def eager(self, x: Tensor, target: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The loss, the gradient of the input, and those of the weights, (1, …)."""
        loss, gx, *grads = self.graph(*[w[0] for w in self.rows.weights], x, target)
        return loss, gx, [g[None] for g in grads]

    def given(self, x: Tensor, target: Any, step: Step | Adaptive) -> Given:
        """What `compiled` is given."""
        rows = self.rows
        return (rows.weights, rows.kept(step)), (x.contiguous(), target.contiguous(), numbers(rows, step))

    def compiled(
        self,
        how: How,
        weights: Sequence[Tensor],
        kept: Sequence[Any],
        x: Tensor,
        target: Any,
        numbers: Numbers,
    ) -> tuple[Tensor, Tensor]:
        """F, B and U, for a compiler."""
        loss, gx, *grads = self.graph(*[w[0] for w in weights], x, target)
        grads = [g[None] for g in grads]
        if self.check:
            fine = torch.isfinite(loss)
            grads = [torch.where(fine, g, 0) for g in grads]
            along, *others = numbers
            numbers = [torch.where(fine, c, 0) for c in along], *others
        how.step([weights[n] for n in self.rows.trained], kept, grads, numbers)
        return loss, gx


Numbers = tuple[Any, ...]  # of every row: −η·a and −η·b, and m as a tensor; of Adam η


def numbers(rows: Rows, step: Step | Adaptive) -> Numbers:
    if isinstance(step, Adaptive):
        return (step.columns,)
    return step.along, step.against, rows.number(step.momentum)


class How(NamedTuple):
    """What a compiler is told of a step. step: a function of the weights, what is kept beside them, gradients, numbers;
    by_factors: whether large gradients may stay factors.
    """

    step: Callable[..., None]
    by_factors: bool

    @classmethod
    def of(cls, step: Step | Adaptive) -> How:
        if isinstance(step, Adaptive):
            return cls(partial(adapted, step.settings), False)
        return cls(partial(descended, step.decays), step.late is None)  # a late gradient goes to the weights, too


def descended(
    decays: Sequence[float],
    weights: Sequence[Tensor],
    velocities: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    numbers: Numbers,
) -> None:
    """v ← m·v + g + λ·w, w ← w − η·(a·v + b·g), written for a compiler. No gradient: not here."""
    along, against, momentum = numbers
    for n, (w, g, c, decay) in enumerate(zip(weights, grads, along, decays, strict=True)):
        if g is None:
            continue
        moved = late = torch.add(g, w, alpha=decay) if decay else g
        if velocities:
            velocities[n].mul_(momentum).add_(moved)
            moved = velocities[n]
        w.addcmul_(moved, c)
        if against:
            w.addcmul_(late, against[n])


def form(x: Any, target: Any) -> tuple[Any, ...] | None:
    """What of a micro-batch a graph of the loss is made for; None where it cannot be."""
    both = (x, target)
    return tuple((v.shape, v.dtype) for v in both) if all(type(v) is Tensor for v in both) else None


def fused(
    moving: Sequence[Moving],
    judge: Judge | None,
    steps: Sequence[Step | Adaptive],
    compile: Callable[[Any], Any],
) -> Callable[..., Any]:
    """All stacks and the last stage as one compiled function: (fixed, changing) -> what each `compiled` gives.

    steps: such ones as theirs.
    """
    parts: list[Moving | Judge] = [*moving, *([] if judge is None else [judge])]
    calls = [partial(one.compiled, How.of(step)) for one, step in zip(parts, steps, strict=True)]
    cuda = moving[0].stack.rows.weights[0].is_cuda

    def tick(fixed: Sequence[tuple[Any, ...]], changing: Sequence[tuple[Any, ...]]) -> list[Any]:
        every = [partial(call, *some, *rest) for call, some, rest in zip(calls, fixed, changing, strict=True)]
        return side_by_side(every, cuda)

    tick.__code__ = tick.__code__.replace(co_name="tick")  # torch counts what shares code
    compiled: Callable[..., Any] = compile(tick)
    return compiled
