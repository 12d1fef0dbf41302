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

from pipeback.counts import numbered
from pipeback.stages.tracing_lock import TRACING
from pipeback.vectorized.buffers.mail import Mail
from pipeback.vectorized.buffers.version_ring import EntryVersions, VersionRing
from pipeback.vectorized.buffers.waiting import Waiting
from pipeback.vectorized.buffers.weight_ring import WeightRing
from pipeback.vectorized.making.sizes import Sizes
from pipeback.vectorized.stacks.eager_tick import EagerTick, WaitingRoom, drifted, steps_together
from pipeback.vectorized.stacks.stack import Stack
from pipeback.vectorized.steps.joint_step import JointStep
from pipeback.vectorized.steps.own_step import OwnStep
from pipeback.vectorized.steps.row_clipping import RowClipping
from pipeback.vectorized.steps.row_tensors import AnyStep
from pipeback.vectorized.steps.sgd_rows import Step
from pipeback.vectorized.steps.step_form import How, Numbers, RingPlaces, Slots, kept, numbers, shifted, slots
from pipeback.vectorized.tracing.forms import leaves, packed
from pipeback.vectorized.tracing.graphs import Graph, direct
from pipeback.vectorized.tracing.product_gradients import accumulating

Parts = Sequence[Sequence[Tensor]]  # of each tensor of a value, the pieces that make it
Messages = Mapping[int, Any]  # by stage
Awaited = Mapping[int, Callable[[], Any]]  # what receives messages, by stage
Leave = Callable[[Literal["F", "B"]], None]  # sends other stages what was computed for them, forward or back


class Piece(NamedTuple):
    """Some of a stack's rows that get their tensors from one place.

    source: the stack; None: a message, to the stage numbered `stage`. late: by how many ticks less the source has
    counted when it sends. rows: which of the source's rows; None: it has one or they are all. lifts: whether the tensor
    lacks the dimension of the rows.
    """

    source: StackTick | None
    stage: int
    late: int
    rows: slice | int | None
    lifts: bool

    def of(self, mail: Mail, tick: int) -> Sequence[Tensor | None]:
        """Return what the source has sent for the tick of the one that gets it."""
        return mail.at(tick - self.late, keeps=type(self.rows) is int)  # a single stage holds what it gets as it is


class Pieces(NamedTuple):
    """Where some rows of a stack get their inputs from, and their gradients."""

    inward: list[Piece]
    back: list[Piece]


def joined(pieces: Sequence[Piece], parts: Parts, *, alone: bool = False) -> list[Tensor]:
    """Return for each tensor of a value its pieces as one (n, …); of a single stage (`alone`) as they lie in memory."""
    found = []
    for tensors in parts:
        some = []
        for (*_, rows, lifts), t in zip(pieces, tensors, strict=True):
            t = t if rows is None else t[rows]
            some.append(t[None] if lifts else t)
        one = some[0] if len(some) == 1 else torch.cat(some)
        found.append(one if alone else one.contiguous())
    return found


class StackTick:
    """A stack whose rows do F, B and U at their ticks: all of them, or some neighbouring ones."""

    def __init__(self, stack: Stack, rings: Waiting, clipping: RowClipping) -> None:
        self.stack, self.rings, self.kind, self._clipping = stack, rings, rings.kind, clipping
        self.written = rings.written
        self.pieces: dict[tuple[int, int], Pieces] = {}  # by the first of some rows, and the end
        self.ys, self.gxs = Mail(len(stack.stages)), Mail(len(stack.stages))  # outputs, and gradients of inputs
        self.stash: WeightRing | None = None  # the weights that F used, where B runs on them
        self.versions: VersionRing | None = None  # instead of these, where F runs on older versions
        self.drift: list[Tensor] = []  # δ, if B runs on weights shifted by it
        self._together = stack.maker.fuse is not None or steps_together(self.written, stack.rows.whole)
        self._parts: dict[tuple[int, int], EagerTick] = {}
        self._steps: tuple[AnyStep | None, dict[tuple[int, int], AnyStep]] = None, {}  # of some rows

    @property
    def first(self) -> int:
        """The number of its first stage."""
        return self.stack.first

    @property
    def place(self) -> int:
        """p of its first stage."""
        return self.stack.places[0]

    def take_weights(self, entered: EntryVersions | None) -> None:
        """Take over the weights on which the micro-batches in flight have gone forward."""
        stack = self.stack
        if entered is not None:
            versions = stack.stash
            if not isinstance(versions, VersionRing) or versions.like is not self.rings:
                versions = stack.stash = VersionRing(stack.rows, self.rings, entered)
            versions.take(entered)
            self.versions = versions
            return
        ring, like = stack.stash, self.rings
        if not isinstance(ring, WeightRing) or ring.like is not like or ring.length != like.length:
            ring = stack.stash = WeightRing(stack.rows, like)
        self.stash = ring
        ring.take()

    def take_drift(self, name: str) -> None:
        """Take over the stages' δ, their averages of w' − w, as rows. name: that of δ in their state."""
        self.drift = self.stack.rows.state(name)
        self.stack.spare = self.stack.spare or list(map(torch.empty_like, self.drift))

    def fits(self, x: Any) -> bool:
        """Whether a message to one of the stages has the form for which the graphs are made."""
        if (type(x) is tuple) != self.kind.packed:
            return False
        given = zip(leaves(x), self.kind.inputs, strict=True)
        return all(type(v) is Tensor and v.shape == shape and v.dtype == dtype for v, (shape, dtype) in given)

    @property
    def all(self) -> tuple[int, int]:
        """All rows."""
        return 0, len(self.stack.stages)

    def sent(self, kind: Literal["F", "B"], tick: int, row: int) -> Any:
        """Return what a row has sent forward or back, as a message. tick: that of F or of B (`Mail`)."""
        mail, whole = (self.ys, self.written.packs) if kind == "F" else (self.gxs, self.kind.packed)
        return packed(mail.at(tick) if self.stack.alone else mail.row(tick, row), whole)

    def leave(self) -> None:
        """Let go of all inputs and gradients after a run of ticks."""
        self.ys, self.gxs = Mail(self.ys.rows), Mail(self.gxs.rows)
        self.stash, self.versions, self.drift = None, None, []

    def given(
        self, rows: tuple[int, int], f: int, b: int, messages: Messages, awaited: Awaited
    ) -> tuple[Parts, Callable[[], Parts]]:
        """Return what the rows from one up to another get: for each input a tensor per piece, and what returns the same
        for each gradient, once it is needed.

        f, b: micro-batches of F and B at a place p = 0. messages, awaited: those to these stages from outside of all
        stacks, of F and of B.
        """
        inward, back = self.pieces[rows]
        come: Any = [
            leaves(messages[piece.stage]) if piece.source is None else piece.of(piece.source.ys, f) for piece in inward
        ]
        gone: Any = [None if piece.source is None else piece.of(piece.source.gxs, b) for piece in back]

        def gradients() -> Parts:
            every = [
                leaves(awaited[piece.stage]()) if some is None else some for some, piece in zip(gone, back, strict=True)
            ]
            return [[some[n] for some in every] for n in self.written.gives]

        return [[some[n] for some in come] for n in range(len(self.kind.inputs))], gradients

    def fixed(self, step: AnyStep, *, stay: bool) -> tuple[Any, ...]:
        """Return the first arguments of `compiled`, which stay in place. stay: all tensors must that are not copied."""
        rings = (self.rings.saved, () if self.stash is None else self.stash.rings) if stay else ((), ())
        return self.stack.rows.weights, kept(self.stack.rows.whole, step), self.drift, *rings

    def changing(self, f: int, b: int, xs: Parts, gs: Parts, *, stay: bool) -> tuple[Any, ...]:
        """Return the next arguments of `compiled`: those that change at every tick. f, b: see `given`."""
        rings, stash = self.rings, self.stash
        xs, gs = (
            [
                [t.contiguous() if piece.source is None else t for t, piece in zip(some, pieces, strict=True)]
                for some in parts
            ]
            for parts, pieces in zip((xs, gs), self.pieces[self.all], strict=True)
        )
        if stay:
            return self.waits(f, b), () if stash is None else stash.slot(b), xs, gs
        return rings.left(b), () if stash is None else stash.slots(b), xs, gs

    def waits(self, f: int, b: int) -> RingPlaces:
        """Return where tensors wait at a tick. f, b: see `given`."""
        return RingPlaces(self.rings.slot(b), self.rings.places(f))

    def told(self, step: AnyStep) -> tuple[Any, ...]:
        """Return the last arguments of `compiled`: the numbers of the step."""
        return step.ahead, step.back, numbers(self.stack.rows.whole, step)

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
        pieces = self.pieces[self.all]
        inward, gradients = joined(pieces.inward, xs), joined(pieces.back, gs)
        sent = forward(*shifted(weights, trained, drift or kept, ahead), *inward)
        gives = self.rings.factors if self.rings.factors is not None and how.by_factors else backward
        then = shifted(weights, trained, drift or kept, back)
        for n, w in zip(trained, slots(stash, used), strict=False):
            then[n] = w
        found = gives(*slots(rings, left), *made(*then), *gradients)
        count, ends = len(weights), len(weights) + len(inward)
        grads, gxs, factors = found[:count], found[count:ends], found[ends:]
        how.step([weights[n] for n in trained], kept, [grads[n] for n in trained], numbers)
        return list(sent[:outputs]), list(sent[outputs:]), list(gxs), factors

    def before(self, f: int, step: AnyStep) -> None:
        """Keep copies of the weights that `compiled` is going to change, as far as they are needed. f: see `eager`."""
        if self.stash is not None:
            whole = self.stack.rows.whole
            fore = whole.shifted(step.ahead, self.drift or None)
            self.stash.keep(f, [fore[n] for n in whole.trained] if step.ahead else None)
        if step.drift:
            torch._foreach_copy_(self.stack.spare, self.stack.rows.stepped)

    def finish(self, b: int, factors: Sequence[Tensor], step: AnyStep) -> None:
        """Step the weights whose gradients come as factors, or which a method steps itself, and δ. b: see `eager`."""
        if isinstance(step, OwnStep):
            whole, stash = self.stack.rows.whole, self.stash
            whole.move(step, whole.gradients(), used=None if stash is None else stash.slots(b))
            return
        self._along(factors, step)
        drifted(self.drift, self.stack.spare, self.stack.rows.stepped, step.drift)

    def _along(self, factors: Sequence[Tensor], step: AnyStep) -> None:
        rows, pairs = self.stack.rows.whole, list(zip(factors[::2], factors[1::2], strict=True))
        if not pairs or not isinstance(step, Step):
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

    # -- without a compiler ------------------------------------------------------------------------------------------

    def eager(
        self,
        rows: tuple[int, int],
        f: int,
        b: int,
        given: tuple[Parts, Callable[[], Parts]],
        step: AnyStep,
        joint: JointStep,
        leave: Leave,
    ) -> None:
        """Do the tick of the rows from one up to another, or leave U to the joint step; f, b, given: see `given`.

        leave: is called as soon as there is something to send.
        """
        stack, rings, stash, versions = self.stack, self.rings, self.stash, self.versions
        inward, back = self.pieces[rows]
        xs = joined(inward, given[0], alone=stack.alone)
        xs = stack.entered(xs) if stack.alone else xs

        def gradients() -> list[Tensor]:
            gs = joined(back, given[1](), alone=stack.alone)
            return stack.maker.lying(gs) if stack.alone else gs

        def give(kind: Literal["F", "B"], value: list[Any]) -> None:
            if kind == "F":
                self.ys.send(f, rows, value)
            else:
                self.gxs.send(b, rows, value)
            leave(kind)

        part, drift, spare = self._part(rows), self.drift, stack.spare
        if rows == self.all:
            keep, used = (None, None) if stash is None else (stash.keep, stash.used)
            fore = None
            if versions is not None:
                fore, used = versions.fore, versions.used
            room = WaitingRoom(rings.left, rings.put, keep, used, fore)
        else:
            assert self._sizes is not None
            first, end = rows
            shapes = self._sizes.saved(end - first)
            keep, used = (
                (None, None) if stash is None else (partial(stash.keep, rows=rows), partial(stash.used, rows=rows))
            )
            fore = None
            if versions is not None:
                fore, used = partial(versions.fore, rows=rows), partial(versions.used, rows=rows)
            room = WaitingRoom(partial(rings.left_of, rows, shapes), partial(rings.put_of, rows), keep, used, fore)
            drift, spare = ([t[first:end] for t in some] for some in (drift, spare))
            step = self._step(step, rows)
        part.run(f, b, xs, gradients, step, joint, room, give, drift, spare)

    def _step(self, step: AnyStep, rows: tuple[int, int]) -> AnyStep:
        if self._steps[0] is not step:
            self._steps = step, {}
        known = self._steps[1]
        if rows not in known:
            known[rows] = step.part(*rows)
        return known[rows]

    @property
    def _sizes(self) -> Sizes | None:
        """Graphs for fewer rows."""
        return self.stack.single.sizes(self.rings)

    def divides(self) -> bool:
        """Whether some of the rows can do a tick without the others."""
        return self.stack.alone or self._sizes is not None

    @property
    def whole(self) -> EagerTick:
        """What does F, B and U of all rows."""
        return self._part(self.all)

    def of_one_row(self) -> Graph:
        """Return the graph of F of one row, of a stack that `divides`."""
        if self.stack.alone:
            return self.rings.eager.forward
        assert self._sizes is not None
        return self._sizes.at(1)[0].forward

    def _part(self, rows: tuple[int, int]) -> EagerTick:
        if rows not in self._parts:
            with TRACING:
                self._parts[rows] = self._made(rows)
        return self._parts[rows]

    def _made(self, rows: tuple[int, int]) -> EagerTick:
        whole = self.stack.rows.whole
        if rows == self.all:
            tensors, graphs, views = whole, self.rings.eager, self.rings.made
            accumulate = direct(accumulating(self.written, len(whole.weights), whole.trained))
        else:
            assert self._sizes is not None
            tensors = whole.part(*rows)
            graphs, accumulate = self._sizes.at(rows[1] - rows[0])
            views = None if self.rings.made is None else graphs.made(*tensors.weights)
        name = partial(self._name, rows)
        clipping = self._clipping.part(*rows)
        return EagerTick(tensors, graphs, accumulate, clipping, name, together=self._together, views=views)

    def _name(self, rows: tuple[int, int], tick: int) -> str:
        """Return what errors call these rows, and their micro-batches at a tick (`Mail`)."""
        first, end = rows
        stages, places = self.stack.stages[first:end], self.stack.places[first:end]
        mbs = numbered("micro-batch", [tick - p for p in reversed(places)])
        name = stages[0].label if len(stages) == 1 else numbered("stage", [stage.index for stage in stages])
        return f"{name}, {mbs}"
