"""Tick: runs the steady state of stages that are one. At a tick every stage, or every second one, does F (forward), B
(backward) and U (update), each of one micro-batch. None of these operations feeds another one at the same tick, so all
that a stack does at a tick is one function of tensors:

    Y, saved ← F(W, X)        G_X, v ← B(saved D ticks ago, W, G), v ← m·v + g        W ← W − η·v

X are the outputs of the stages before at the last tick, G the gradients from the stages behind, D the delay in updates,
W the weights, v the velocities, g the gradients, m the momentum, η the learning rate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pipeback.stages.stage import Stage
from pipeback.vectorized.adam_rows import AdamStep, adapted
from pipeback.vectorized.cuda_graph import side_by_side
from pipeback.vectorized.forms import leaves, packed
from pipeback.vectorized.graph_rewrites import Graph, accumulating, direct, products
from pipeback.vectorized.joint_step import JointStep
from pipeback.vectorized.waiting import Waiting
from pipeback.vectorized.rows import Rows, Step
from pipeback.vectorized.stack import Stack
from pipeback.vectorized.weight_ring import WeightRing

Slots = Sequence[Tensor] | Tensor
Parts = Sequence[Sequence[Tensor]]  # of each tensor of a value, the pieces that make it
Messages = Mapping[tuple[Literal["F", "B"], int], Any]  # by direction, "F" or "B", and stage


class Piece(NamedTuple):
    """Some of a stack's rows that get their tensors from one place.

    source: the stack; None: a message, to the stage numbered `stage`. rows: which of the source's rows; None: it has one
    or they are all. lifts: whether the tensor lacks the dimension of the rows.
    """

    source: StackTick | None
    stage: int
    rows: slice | int | None
    lifts: bool


def joined(pieces: Sequence[Piece], parts: Parts) -> list[Tensor]:
    """Return for each tensor of a value its pieces as one (n, …)."""
    found = []
    for tensors in parts:
        some = []
        for (_, _, rows, lifts), t in zip(pieces, tensors, strict=True):
            t = t if rows is None else t[rows]
            some.append(t[None] if lifts else t)
        found.append(some[0] if len(some) == 1 else torch.cat(some))
    return found


class StackTick:
    """A stack whose rows all do F, B and U at each of their ticks."""

    def __init__(self, stack: Stack, rings: Waiting) -> None:
        self.stack, self.rings, self.kind = stack, rings, rings.kind
        self.written = rings.written
        self.inward: list[Piece] = []  # where the rows get their inputs from
        self.back: list[Piece] = []  # and their gradients
        self.ys: list[Tensor] = []  # the outputs of the last tick, (n, …)
        self.gxs: list[Tensor | None] = []  # and the gradients of its inputs
        self.stash: WeightRing | None = None  # the weights that F used, where B runs on them
        self.drift: list[Tensor] = []  # δ, if B runs on weights shifted by it
        rows = stack.rows
        self._accumulate: Graph | None = None  # the backward with momentum, without a compiler
        self._together = (
            False  # whether its weights are better stepped in one pass, together with those of other stacks
        )
        if stack.fuse is None:
            self._accumulate = direct(accumulating(self.written, len(rows.weights), rows.trained))
            into = sum(rows.weights[n].nbytes for n in products(self.written, rows.trained))
            self._together = 2 * into < sum(w.nbytes for w in rows.stepped)

    @property
    def first(self) -> int:
        """The number of its first stage."""
        return self.stack.first

    @property
    def place(self) -> int:
        """p of its first stage."""
        return self.stack.places[0]

    def take_weights(self) -> None:
        """Take over the weights on which the micro-batches in flight have gone forward."""
        stack = self.stack
        if stack.stash is None or stack.stash.like is not self.rings or stack.stash.length != self.rings.length:
            stack.stash = WeightRing(stack.rows, self.rings)
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

    def fits(self, x: Any) -> bool:
        """Whether a message to one of the stages has the form for which the graphs are made."""
        if (type(x) is tuple) != self.kind.packed:
            return False
        given = zip(leaves(x), self.kind.inputs, strict=True)
        return all(type(v) is Tensor and v.shape == shape and v.dtype == dtype for v, (shape, dtype) in given)

    def sent(self, row: int) -> Any:
        """Return the last output of a row, as it is sent on."""
        ys = self.ys if self.stack.alone else [y[row] for y in self.ys]
        return packed(ys, self.written.packs)

    def sent_back(self, row: int) -> Any:
        """Return the last gradient of a row's input, as it is sent back."""
        gxs = self.gxs if self.stack.alone else [None if gx is None else gx[row] for gx in self.gxs]
        return packed(gxs, self.kind.packed)

    def leave(self) -> None:
        """Let go of all inputs and gradients after a run of ticks."""
        self.ys, self.gxs = [], []
        self.stash, self.drift = None, []

    def given(self, messages: Messages) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """Return what the rows get at the next tick: for each input, and then for each gradient, a tensor per piece.

        messages: those to these stages from outside of all stacks, by direction and stage.
        """
        inputs, gives = range(len(self.kind.inputs)), self.written.gives
        come: Any = [
            [leaves(messages["F", piece.stage]) if piece.source is None else piece.source.ys for piece in self.inward],
            [leaves(messages["B", piece.stage]) if piece.source is None else piece.source.gxs for piece in self.back],
        ]
        return [[some[n] for some in come[0]] for n in inputs], [[some[n] for some in come[1]] for n in gives]

    def fixed(self, step: Step | AdamStep, *, stay: bool) -> tuple[Any, ...]:
        """Return the first arguments of `compiled`, which stay in place. stay: all tensors must that are not copied."""
        rings = (self.rings.saved, () if self.stash is None else self.stash.rings) if stay else ((), ())
        return self.stack.rows.weights, self.stack.rows.kept(step), self.drift, *rings

    def changing(self, b: int, xs: Parts, gs: Parts, *, stay: bool) -> tuple[Any, ...]:
        """Return the next arguments of `compiled`: those that change at every tick."""
        rings, stash = self.rings, self.stash
        xs, gs = (
            [
                [t.contiguous() if piece.source is None else t for t, piece in zip(some, pieces, strict=True)]
                for some in parts
            ]
            for parts, pieces in ((xs, self.inward), (gs, self.back))
        )
        if stay:
            return rings.slot(b), () if stash is None else stash.slot(b), xs, gs
        return rings.left(b), () if stash is None else stash.slots(b), xs, gs

    def told(self, step: Step | AdamStep) -> tuple[Any, ...]:
        """Return the last arguments of `compiled`: the numbers of the step."""
        return step.ahead, step.back, numbers(self.stack.rows, step)

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
        xs: Parts,
        gs: Parts,
        ahead: Sequence[Tensor],
        back: Sequence[Tensor],
        numbers: Numbers,
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor | None], Sequence[Tensor]]:
        """Do the whole tick but `finish`, written for a compiler. left, used: the tensors that F saved and the weights
        on which it ran, or the numbers of their slots in `rings` and `stash`.
        """
        forward, backward, made, outputs, *_ = self.written
        trained = self.stack.rows.trained
        inward, gradients = joined(self.inward, xs), joined(self.back, gs)
        sent = forward(*shifted(weights, trained, kept, ahead), *inward)
        gives = self.rings.factors if self.rings.factors is not None and how.by_factors else backward
        then = shifted(weights, trained, drift or kept, back)
        for n, w in zip(trained, slots(stash, used), strict=False):
            then[n] = w
        found = gives(*slots(rings, left), *made(*then), *gradients)
        count, ends = len(weights), len(weights) + len(inward)
        grads, gxs, factors = found[:count], found[count:ends], found[ends:]
        how.step([weights[n] for n in trained], kept, [grads[n] for n in trained], numbers)
        return list(sent[:outputs]), list(sent[outputs:]), list(gxs), factors

    def finish(self, factors: Sequence[Tensor], step: Step | AdamStep) -> None:
        """Step the weights whose gradients come as factors."""
        rows, pairs = self.stack.rows, list(zip(factors[::2], factors[1::2], strict=True))
        if not pairs or isinstance(step, AdamStep):
            return
        some = [rows.trained.index(n) for n in self.rings.factored]
        if not step.momentum:
            rows.move(step, [a @ b for a, b in pairs], some)
            return
        for m, (a, b) in zip(some, pairs, strict=True):
            v = rows.velocities()[m]
            if v.dim() == 2:
                v.addmm_(a, b, beta=step.momentum)
            else:
                v.baddbmm_(a, b, beta=step.momentum)
        rows.follow(step, some)

    def eager(self, f: int, b: int, xs: Parts, gs: Parts, step: Step | AdamStep, joint: JointStep) -> None:
        """Do the whole tick without a compiler, or leave U to the joint step. f, b: micro-batches of F and B at p = 0."""
        rows, rings, (forward, backward, made, outputs, *_) = self.stack.rows, self.rings, self.rings.eager
        saved, gradients, inputs = rings.left(b), joined(self.back, gs), joined(self.inward, xs)
        if self.stack.alone:
            gradients, inputs = self.stack.lying(gradients), self.stack.entered(inputs)
        sent = forward(*rows.shifted(step.ahead), *inputs)
        if self.stash is not None:
            views = made(*self.stash.used(b))
        else:
            along = self.drift or None
            views = made(*rows.shifted(step.back, along)) if step.back or rings.made is None else rings.made
        if self._together and isinstance(step, Step) and joint.fits(rows, step):
            found = backward(*saved, *views, *gradients)
            gxs = found[len(rows.weights) :]
            joint.add(rows, step, [found[n] for n in rows.trained])
        elif isinstance(step, Step) and step.momentum and not step.late and self._accumulate is not None:
            factor = rows.number(step.momentum)
            gxs = self._accumulate(*saved, *views, *gradients, step.momentum, factor, *rows.velocities())
            rows.follow(step)
        else:
            found = backward(*saved, *views, *gradients)
            gxs = found[len(rows.weights) :]
            rows.move(step, [found[n] for n in rows.trained])
        self.ys, self.gxs = list(sent[:outputs]), list(gxs)
        rings.put(f, sent[outputs:])


class LossStage:
    """The last stage with the loss as one graph, since its F and B are of the same micro-batch."""

    def __init__(self, stage: Stage, graph: Graph, rows: Rows, x: Any, target: Any, *, check: bool) -> None:
        """rows: the stage's weights. check: whether the weights must stay if the loss is not finite."""
        self.stage, self.graph, self.rows, self.check = stage, graph, rows, check
        self.inputs, self.packed = len(leaves(x)), type(x) is tuple
        self.form = form(x, target)

    def eager(self, x: Any, target: Any, step: Step | AdamStep) -> tuple[Tensor, Any, list[Tensor]]:
        """Return the loss, the gradient of the input, and those of the weights."""
        loss, *found = self.graph(*self.rows.shifted(step.ahead), *leaves(x), target)
        return loss, packed(found[: self.inputs], self.packed), found[self.inputs :]

    def fixed(self, step: Step | AdamStep, *, stay: bool) -> tuple[Any, ...]:
        """Return the first arguments of `compiled`: tensors that stay in place."""
        return self.rows.weights, self.rows.kept(step)

    def changing(self, x: Any, target: Any) -> tuple[Any, ...]:
        """Return the next arguments of `compiled`: those that change at every tick."""
        return [v.contiguous() for v in leaves(x)], target.contiguous()

    def told(self, step: Step | AdamStep) -> tuple[Any, ...]:
        """Return the last arguments of `compiled`: the numbers of the step."""
        return step.ahead, numbers(self.rows, step)

    def compiled(
        self,
        how: How,
        weights: Sequence[Tensor],
        kept: Sequence[Any],
        xs: Sequence[Tensor],
        target: Any,
        ahead: Sequence[Tensor],
        numbers: Numbers,
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Do F, B and U, written for a compiler."""
        loss, *found = self.graph(*shifted(weights, self.rows.trained, kept, ahead), *xs, target)
        gxs, grads = found[: len(xs)], found[len(xs) :]
        if self.check:
            fine = torch.isfinite(loss)
            grads = [torch.where(fine, g, 0) for g in grads]
            along, *others = numbers
            numbers = [torch.where(fine, c, 0) for c in along], *others
        how.step([weights[n] for n in self.rows.trained], kept, grads, numbers)
        return loss, gxs


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
        # not add(…, alpha=decay): where g is a product of matrices, inductor makes one call of both and forgets alpha
        moved = late = g + decay * w if decay else g
        if velocities:
            velocities[n].mul_(momentum).add_(moved)
            moved = velocities[n]
        w.addcmul_(moved, c)
        if against:
            w.addcmul_(late, against[n])


def form(x: Any, target: Any) -> tuple[Any, ...] | None:
    """Return the shapes and dtypes for which a graph of the loss is made; None if there can be no graph."""
    both = (*leaves(x), target)
    plain = all(type(v) is Tensor for v in both)
    return (type(x) is tuple, *((v.shape, v.dtype) for v in both)) if plain else None


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
    cuda = moving[0].rings.device.type == "cuda"

    def tick(fixed: Sequence[tuple[Any, ...]], changing: Sequence[tuple[Any, ...]]) -> list[Any]:
        every = [partial(call, *some, *rest) for call, some, rest in zip(calls, fixed, changing, strict=True)]
        return side_by_side(every, cuda)

    tick.__code__ = tick.__code__.replace(co_name="tick")  # torch counts recompilations per code object
    compiled: Callable[..., Any] = compile(tick)
    return compiled
