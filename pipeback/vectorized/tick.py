"""Tick: runs the steady state of stages that are one. At a tick every stage, or every second one, does F (forward), B
(backward) and U (update), each of one micro-batch. None of these operations feeds another one at the same tick, so all
that a stack does at a tick is one function of tensors:

    Y, saved ← F(W, X)        G_X, v ← B(saved D ticks ago, W, G), v ← m·v + g        W ← W − η·v

X are the outputs of the stages before at the last tick, G the gradients from the stages behind, D the delay in updates,
W the weights, v the velocities, g the gradients, m the momentum, η the learning rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeback.runtime.link import Name
from pipeback.stages.stage import Stage
from pipeback.tensors.layout import Message
from pipeback.vectorized.adam_rows import AdamStep, adapted
from pipeback.vectorized.cuda_graph import side_by_side
from pipeback.vectorized.graph_rewrites import Graph, accumulating, direct
from pipeback.vectorized.ring_buffers import RingBuffers
from pipeback.vectorized.rows import Rows, Step
from pipeback.vectorized.stack import Stack
from pipeback.vectorized.weight_ring import WeightRing

Slots = Sequence[Tensor] | Tensor
Box = dict[Name, Message]


class StackTick:
    """A stack whose rows all do F, B and U at each of their ticks."""

    def __init__(self, stack: Stack, rings: RingBuffers) -> None:
        self.stack, self.rings, self.kind = stack, rings, rings.kind
        self.source = self  # the stack whose rows give these their inputs: itself, or its partner
        other = stack.partner
        self.enters = other is None or stack.first < other.first  # whether the first row gets its input from outside
        self.leaves = other is None or stack.last > other.last  # whether the last row gets its gradient from outside
        rows = len(stack.stages)
        behind = 0 if other is not None and self.enters else 1  # which row of the source is behind the first
        self._inward = slice(0, rows - self.enters)
        self._back = slice(behind, behind + rows - self.leaves)
        self.stash: WeightRing | None = None  # the weights that F used, where B runs on them
        self.drift: list[Tensor] = []  # δ, if B runs on weights shifted by it
        self._accumulate = direct(accumulating(self.rings.written, stack.rows.trained)) if stack.fuse is None else None

    def take_weights(self) -> None:
        """Take over the weights on which the micro-batches in flight have gone forward."""
        stack, length = self.stack, self.rings.length
        if stack.stash is None or stack.stash.length != length:
            stack.stash = WeightRing(stack.rows, length)
        self.stash = stack.stash
        self.stash.take()

    def take_drift(self) -> None:
        """Take over the stages' δ, their averages of w' − w, as rows."""
        self.drift = self.stack.rows.state("drift")
        self.stack.spare = self.stack.spare or list(map(torch.empty_like, self.drift))

    def about_to_drift(self) -> None:
        """Remember the weights before the step, from which δ is updated."""
        torch._foreach_copy_(self.stack.spare, self.stack.rows.stepped)

    def drifted(self, step: Step | AdamStep) -> None:
        """Update δ after the weights were stepped."""
        stack = self.stack
        for d, w, before, share in zip(self.drift, stack.rows.stepped, stack.spare, step.drift, strict=True):
            d.lerp_(torch.sub(w, before, out=before), share)

    def begin(self, f: Sequence[int], b: Sequence[int], box: Box) -> None:
        """Take the messages that wait for a tick at which row r does F of f − r and B of b + r."""
        rings, first = self.rings, self.stack.first
        if self.source is self:
            self.y = torch.cat([rings.inputs[f[first] % rings.length, 1:], rings.inputs[0, :1]])
            self.gx = torch.cat([rings.gradients[0, :1], rings.gradients[b[first] % rings.length, :-1]])
            return
        shape, dtype, _ = self.kind
        nothing = torch.zeros(shape, dtype=dtype, device=rings.inputs.device)
        y, gx = ([nothing] * len(self.source.stack.stages) for _ in range(2))
        for name, row in self._names(f, b):
            (y if name[0] == "F" else gx)[row] = box.pop(name)
        self.source.y, self.source.gx = torch.stack(y), torch.stack(gx)

    def end(self, f: Sequence[int], b: Sequence[int], box: Box) -> None:
        """Leave the messages for such a tick in `box`, after the ticks before it."""
        rings, first = self.rings, self.stack.first
        if self.source is self:
            rings.inputs[f[first] % rings.length, 1:] = self.y[:-1]
            rings.gradients[b[first] % rings.length, :-1] = self.gx[1:]
            return
        y, gx = self.source.y.unbind(), self.source.gx.unbind()
        box.update({name: (y if name[0] == "F" else gx)[row] for name, row in self._names(f, b)})

    def leave(self) -> None:
        """Let go of all inputs and gradients after a run of ticks."""
        self.y = self.gx = torch.empty(0)
        self.stash, self.drift = None, []

    def _names(self, f: Sequence[int], b: Sequence[int]) -> Iterator[tuple[Name, int]]:
        """Yield the names of the messages that rows get from the source, with the rows there."""
        numbers = self.stack.numbers
        for s, row in zip(numbers[self.enters :], range(len(numbers)), strict=False):
            yield ("F", s, f[s]), row
        for s, row in zip(numbers[: len(numbers) - self.leaves], range(self._back.start, self._back.stop), strict=True):
            yield ("B", s, b[s]), row

    def fixed(self, step: Step | AdamStep, *, stay: bool) -> tuple[Any, ...]:
        """Return the first arguments of `compiled`, which stay in place. stay: all tensors must that are not copied."""
        rings = (self.rings.saved, () if self.stash is None else self.stash.rings) if stay else ((), ())
        return self.stack.rows.weights, self.stack.rows.kept(step), self.drift, *rings

    def changing(self, b: int, x: Tensor | None, g: Tensor | None, *, stay: bool) -> tuple[Any, ...]:
        """Return the next arguments of `compiled`: those that change at every tick."""
        rings, stash, source = self.rings, self.stash, self.source
        x, g = None if x is None else x.contiguous(), None if g is None else g.contiguous()
        if stay:
            return rings.slot(b), () if stash is None else stash.slot(b), x, source.y, g, source.gx
        return rings.left(b), () if stash is None else stash.slots(b), x, source.y, g, source.gx

    def told(self, step: Step | AdamStep) -> tuple[Any, ...]:
        """Return the last arguments of `compiled`: the numbers of the step."""
        return step.ahead, step.back, numbers(self.stack.rows, step)

    def _joined(self, x: Tensor | None, y: Tensor, g: Tensor | None, gx: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs and the gradients of all rows."""
        inward, back = y[self._inward], gx[self._back]
        return (
            inward if x is None else torch.cat([x[None], inward]), back if g is None else torch.cat([back, g[None]]),
        )  # fmt: skip

    def compiled(
        self,
        how: How,
        weights: Sequence[Tensor],
        kept: Sequence[Any],
        drift: Sequence[Tensor],
        rings: Sequence[Tensor],
        stash: Sequence[Tensor],
        left: Slots,
        used: Slots,
        x: Tensor | None,
        y: Tensor,
        g: Tensor | None,
        gx: Tensor,
        ahead: Sequence[Tensor],
        back: Sequence[Tensor],
        numbers: Numbers,
    ) -> tuple[Tensor, list[Tensor], Tensor, Sequence[Tensor]]:
        """Do the whole tick but `finish`, written for a compiler. left, used: the tensors that F saved and the weights
        on which it ran, or the numbers of their slots in `rings` and `stash`.
        """
        forward, backward, made = self.rings.written
        trained, (inward, gradient) = self.stack.rows.trained, self._joined(x, y, g, gx)
        y, *leaves = forward(*shifted(weights, trained, kept, ahead), inward)
        gives = self.rings.factors if self.rings.factors is not None and how.by_factors else backward
        then = shifted(weights, trained, drift or kept, back)
        for n, w in zip(trained, slots(stash, used), strict=False):
            then[n] = w
        found = gives(*slots(rings, left), *made(*then), gradient)
        grads, gx, factors = found[: len(weights)], found[len(weights)], found[len(weights) + 1 :]
        how.step([weights[n] for n in trained], kept, [grads[n] for n in trained], numbers)
        return y, leaves, gx, factors

    def finish(self, factors: Sequence[Tensor], step: Step | AdamStep) -> None:
        """Step the weights whose gradients come as factors."""
        rows, pairs = self.stack.rows, list(zip(factors[::2], factors[1::2], strict=True))
        if not pairs or isinstance(step, AdamStep):
            return
        some = [rows.trained.index(n) for n in self.rings.factored]
        if not step.momentum:
            rows.move(step, [torch.bmm(a, b) for a, b in pairs], some)
            return
        for m, (a, b) in zip(some, pairs, strict=True):
            rows.velocities()[m].baddbmm_(a, b, beta=step.momentum)
        rows.follow(step, some)

    def eager(self, f: int, b: int, x: Tensor | None, g: Tensor | None, step: Step | AdamStep) -> None:
        """Do the whole tick without a compiler."""
        rows, rings, (forward, backward, made) = self.stack.rows, self.rings, self.rings.eager
        saved, (inward, gradient) = rings.left(b), self._joined(x, self.source.y, g, self.source.gx)
        y, *left = forward(*rows.shifted(step.ahead), inward)
        if self.stash is not None:
            views = made(*self.stash.used(b))
        else:
            along = self.drift or None
            views = made(*rows.shifted(step.back, along)) if step.back or rings.made is None else rings.made
        if isinstance(step, Step) and step.momentum and not step.late and self._accumulate is not None:
            factor = rows.number(step.momentum)
            self.gx = self._accumulate(*saved, *views, gradient, step.momentum, factor, *rows.velocities())
            rows.follow(step)
        else:
            *grads, self.gx = backward(*saved, *views, gradient)
            rows.move(step, [grads[n] for n in rows.trained])
        self.y = y
        rings.put(rings.places(f), left)


class LossStage:
    """The last stage with the loss as one graph, since its F and B are of the same micro-batch."""

    def __init__(self, stage: Stage, graph: Graph, rows: Rows, x: Tensor, target: Any, *, check: bool) -> None:
        """rows: the stage's weights. check: whether the weights must stay if the loss is not finite."""
        self.stage, self.graph, self.rows, self.check = stage, graph, rows, check
        self.form = form(x, target)

    def eager(self, x: Tensor, target: Any, step: Step | AdamStep) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return the loss, the gradient of the input, and those of the weights, (1, …)."""
        loss, gx, *grads = self.graph(*[w[0] for w in self.rows.shifted(step.ahead)], x, target)
        return loss, gx, [g[None] for g in grads]

    def fixed(self, step: Step | AdamStep, *, stay: bool) -> tuple[Any, ...]:
        """Return the first arguments of `compiled`: tensors that stay in place."""
        return self.rows.weights, self.rows.kept(step)

    def changing(self, x: Tensor, target: Any) -> tuple[Any, ...]:
        """Return the next arguments of `compiled`: those that change at every tick."""
        return x.contiguous(), target.contiguous()

    def told(self, step: Step | AdamStep) -> tuple[Any, ...]:
        """Return the last arguments of `compiled`: the numbers of the step."""
        return step.ahead, numbers(self.rows, step)

    def compiled(
        self,
        how: How,
        weights: Sequence[Tensor],
        kept: Sequence[Any],
        x: Tensor,
        target: Any,
        ahead: Sequence[Tensor],
        numbers: Numbers,
    ) -> tuple[Tensor, Tensor]:
        """Do F, B and U, written for a compiler."""
        used = shifted(weights, self.rows.trained, kept, ahead)
        loss, gx, *grads = self.graph(*[w[0] for w in used], x, target)
        grads = [g[None] for g in grads]
        if self.check:
            fine = torch.isfinite(loss)
            grads = [torch.where(fine, g, 0) for g in grads]
            along, *others = numbers
            numbers = [torch.where(fine, c, 0) for c in along], *others
        how.step([weights[n] for n in self.rows.trained], kept, grads, numbers)
        return loss, gx


def slots(rings: Sequence[Tensor], at: Slots) -> Sequence[Tensor]:
    """Return the slots of this number, written for a compiler; `at` may be the slots themselves."""
    return [ring.index_select(0, at)[0] for ring in rings] if isinstance(at, Tensor) else at


def shifted(
    weights: Sequence[Tensor], trained: Sequence[int], velocities: Sequence[Any], by: Sequence[Tensor]
) -> list[Tensor]:
    """Return the weights, with w + c·v for the trainable ones, written for a compiler."""
    found = list(weights)
    for n, v, c in zip(trained, velocities, by, strict=False):
        found[n] = torch.addcmul(found[n], v, c)
    return found


Numbers = tuple[Any, ...]  # of every row −η·a and −η·b, and m as a tensor; of Adam η


def numbers(rows: Rows, step: Step | AdamStep) -> Numbers:
    if isinstance(step, AdamStep):
        return (step.columns,)
    return step.along, step.against, rows.number(step.momentum)


class How(NamedTuple):
    """The form of a step for a compiler.

    step: a function of the weights, the optimizer state, the gradients and `numbers`. by_factors: whether large
    gradients may stay factors.
    """

    step: Callable[..., None]
    by_factors: bool

    @classmethod
    def of(cls, step: Step | AdamStep) -> How:
        if isinstance(step, AdamStep):
            return cls(partial(adapted, step.settings), False)
        return cls(partial(descended, step.decays), not step.late)  # `late` adds gradients to weights, too


def descended(
    decays: Sequence[float],
    weights: Sequence[Tensor],
    velocities: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    numbers: Numbers,
) -> None:
    """Do v ← m·v + g + λ·w and w ← w − η·(a·v + b·g), written for a compiler; weights without a gradient stay."""
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
    """Return the shapes and dtypes for which a graph of the loss is made; None if there can be no graph."""
    both = (x, target)
    return tuple((v.shape, v.dtype) for v in both) if all(type(v) is Tensor for v in both) else None


def fused(
    moving: Sequence[StackTick],
    judge: LossStage | None,
    steps: Sequence[Step | AdamStep],
    compile: Callable[[Any], Any],
) -> Callable[..., Any]:
    """Return all stacks and the last stage as one compiled function: (fixed, changing) -> the outputs of `compiled`.

    steps: one for each stack and the last stage, of the form for which the function is compiled.
    """
    parts: list[StackTick | LossStage] = [*moving, *([] if judge is None else [judge])]
    calls = [partial(one.compiled, How.of(step)) for one, step in zip(parts, steps, strict=True)]
    cuda = moving[0].stack.rows.weights[0].is_cuda

    def tick(fixed: Sequence[tuple[Any, ...]], changing: Sequence[tuple[Any, ...]]) -> list[Any]:
        every = [partial(call, *some, *rest) for call, some, rest in zip(calls, fixed, changing, strict=True)]
        return side_by_side(every, cuda)

    tick.__code__ = tick.__code__.replace(co_name="tick")  # torch counts recompilations per code object
    compiled: Callable[..., Any] = compile(tick)
    return compiled
