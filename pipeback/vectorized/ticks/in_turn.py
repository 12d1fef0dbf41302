"""In turn: a micro-batch goes through all stages, F (forward) of one after the other. Then every stage does B
(backward) of one micro-batch, and U (update), if it is due.

That is all that can be done as one where a loss is awaited before the next micro-batch is there: F of a stage waits for
that of the stage before, but the gradients come from earlier turns.

    turn i, D = 2(S − 1 − s)    F  i                    at every stage s of S, downstream
                                B  i − D      U         at every stage, as one
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import is_
from typing import Any, Literal

import torch
from torch import Tensor

from pipeback.errors import StageError
from pipeback.runtime.worker import Worker
from pipeback.tensors.layout import Message
from pipeback.vectorized.buffers.waiting import Turns
from pipeback.vectorized.stacks.eager_tick import WaitingRoom
from pipeback.vectorized.steps.joint_step import JointStep
from pipeback.vectorized.steps.row_tensors import AnyStep
from pipeback.vectorized.ticks.tick import StackTick, joined
from pipeback.vectorized.ticks.wiring import Box, Where
from pipeback.vectorized.tracing.forms import leaves, packed
from pipeback.vectorized.tracing.weight_views import shared, split

Ends = tuple[Sequence[int], Sequence[int]]  # per stage, the micro-batches of its next F and B


class StackInTurn:
    """A stack whose rows do F one after the other, and B and U as one."""

    def __init__(self, one: StackTick, delays: Sequence[int]) -> None:
        """delays: D of every stage of the pipeline."""
        self.one, self.stack, self.rings = one, one.stack, one.rings
        self.delays = [delays[s] for s in one.stack.numbers]
        self.gxs: deque[list[Tensor | None]] = deque()  # gradients of inputs that stages before have not taken yet
        self._room = WaitingRoom(self._left, self._put)
        self._views, self._forward = split(one.of_one_row(), len(one.stack.rows.weights))
        self._fore: list[Tensor] = []  # the weights of this turn's F
        self._rows: list[Sequence[Tensor]] = []  # of each row, what its F looks at
        self._stay = False  # whether these are views, which change with the weights
        self._saved: list[Sequence[Tensor]] = []

    def _of_f(self, i: int) -> Turns:
        return [(r, i) for r in range(len(self.delays))]

    def _of_b(self, i: int) -> Turns:
        return [(r, i - D) for r, D in enumerate(self.delays)]

    def _left(self, i: int) -> Sequence[Tensor]:
        return self.rings.back(self._of_b(i))

    def _put(self, i: int, saved: Sequence[Tensor]) -> None:
        self.rings.leave(saved, self._of_f(i))

    def _keep(self, i: int, shifted: Sequence[Tensor] | None) -> None:
        assert self.one.stash is not None
        self.one.stash.keep_of(self._of_f(i), shifted)

    def _used(self, i: int) -> list[Tensor]:
        ring = self.one.stash or self.one.versions
        assert ring is not None
        return ring.used_of(self._of_b(i))

    def _older(self, i: int) -> list[Tensor]:
        """Return the weights on which F of micro-batch i runs, where they are not the newest."""
        assert self.one.versions is not None
        return self.one.versions.fore_of(self._of_f(i))

    def begin(self, i: int, step: AnyStep) -> None:
        """Begin the turn of micro-batch i."""
        fore = self.one.whole.fore(i, step, self._room, self.one.drift, self.stack.spare)
        if not self._stay or not all(map(is_, fore, self._fore)):
            apart = [fore] if self.stack.alone else [[w[r : r + 1] for w in fore] for r in range(len(self.delays))]
            self._rows = [self._views(*some) for some in apart]
            self._stay = shared([t for some in self._rows for t in some], fore)
        self._fore = fore

    def forward(self, row: int, i: int, xs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Do F of micro-batch i at a row; return the tensors of its output. They have the dimension of the rows, as xs
        have, unless the stack is a single stage.
        """
        outputs = self.one.written.outputs
        try:
            sent = self._forward(*self._rows[row], *(self.stack.entered(xs) if self.stack.alone else xs))
        except Exception as error:
            label = self.stack.stages[row].label
            raise StageError(f"{label}, micro-batch {i}: the forward failed: {error}", "forward") from error
        self._saved.append(sent[outputs:])
        return sent[:outputs]  # type: ignore[no-any-return]

    def back(self, i: int, gradients: Sequence[Sequence[Tensor]], step: AnyStep, joint: JointStep) -> None:
        """Do B of all rows at the end of turn i, and U, or leave that to the joint step. gradients: see `joined`."""
        one, stack = self.one, self.stack
        gs = joined(one.pieces[one.all].back, gradients, alone=stack.alone)
        gs = stack.maker.lying(gs) if stack.alone else gs
        saved, mine, self._saved = self._left(i), self._saved, []
        one.whole.back(i, self._fore, saved, lambda: gs, step, joint, self._room, self._give, one.drift, stack.spare)
        self._put(i, mine[0] if stack.alone else [torch.cat(rows) for rows in zip(*mine, strict=True)])

    def _give(self, kind: Literal["F", "B"], value: list[Any]) -> None:
        self.gxs.append(value)

    def drop(self) -> None:
        """Forget a turn that has failed."""
        self._saved = []

    # -- between runs, when the gradients are messages ---------------------------------------------------------------

    def take(self, where: Where, b: Sequence[int], box: Box) -> None:
        """Take the gradients that wait out of `box`."""
        numbers, self.gxs = self.stack.numbers, deque()
        if self.one.stash is not None:
            self._room = self._room._replace(keep=self._keep, used=self._used)
        if self.one.versions is not None:
            self._room = self._room._replace(used=self._used, fore=self._older)
        targets = [s - 1 if s and s - 1 in where else None for s in numbers]
        for n in range(max([b[s] - b[s - 1] for s in numbers if s], default=0)):
            rows = [None if t is None else leaves(box.pop(("B", t, b[t] + n))) for t in targets]
            like = next((row for row in rows if row is not None), ())
            self.gxs.append([None if v is None else self._whole(v, m, rows) for m, v in enumerate(like)])

    def _whole(self, like: Tensor, m: int, rows: Sequence[Sequence[Any] | None]) -> Tensor:
        """Return the tensors numbered m of these messages as one, with zeros where there is none."""
        each = [torch.zeros_like(like) if row is None else row[m] for row in rows]
        return each[0] if self.stack.alone else torch.stack(each)

    def give(self, where: Where, b: Sequence[int], box: Box) -> None:
        """Leave in `box` what `take` takes."""
        for n, value in enumerate(self.gxs):
            for row, s in enumerate(self.stack.numbers):
                if s and s - 1 in where:
                    some = [v if v is None or self.stack.alone else v[row].clone() for v in value]
                    box["B", s - 1, b[s - 1] + n] = packed(some, self.one.kind.packed)


class InTurn:
    """All stages but the last, which is outside of the stacks, for a worker that has all stages."""

    def __init__(self, worker: Worker, moving: Sequence[StackTick], where: Where, ends: Ends) -> None:
        f, b = ends
        self.worker, self.where = worker, where
        of = {one: StackInTurn(one, [i - j for i, j in zip(f, b, strict=True)]) for one in moving}
        self.stacks = list(of.values())
        self._line = [(of[where[s][0]], where[s][1]) for s in range(worker.last)]
        self._of = of

    def begin(self, b: Sequence[int]) -> None:
        """Take over the gradients that wait."""
        for one in self.stacks:
            one.take(self.where, b, self.worker.link.box)

    def finish(self, b: Sequence[int]) -> None:
        """Leave them as messages."""
        for one in self.stacks:
            one.give(self.where, b, self.worker.link.box)

    def fits(self, x: Message) -> bool:
        """Whether an input has the form for which the graphs are made."""
        return self._line[0][0].one.fits(x)

    def forward(self, i: int, steps: Sequence[AnyStep]) -> Message:
        """Do F of a micro-batch at all stages but the last, and return what that is sent. steps: of each stack."""
        for one, step in zip(self.stacks, steps, strict=False):
            one.begin(i, step)
        xs: Sequence[Tensor]
        xs, lifted, packs = leaves(self.worker.link.recv("F", 0, i)), False, False
        try:
            for one, row in self._line:
                if one.stack.alone is lifted:
                    xs, lifted = [x[0] if lifted else x[None] for x in xs], not lifted
                xs, packs = one.forward(row, i, xs), one.one.written.packs
        except BaseException:
            for one in self.stacks:
                one.drop()
            raise
        return packed([x[0] for x in xs] if lifted else xs, packs)

    def back(self, i: int, b: int, steps: Sequence[AnyStep], joint: JointStep) -> None:
        """Do B and U of all stages but the last, or leave U to the joint step. b: the micro-batch of B at the last
        stage but one.
        """
        come = leaves(self.worker.link.recv("B", self.worker.last - 1, b))
        given = [self._gradients(one, come) for one in self.stacks]  # before anything of this turn comes
        for one, some, step in zip(self.stacks, given, steps, strict=False):
            one.back(i, some, step, joint)
        for one in self.stacks:
            one.gxs.popleft()

    def _gradients(self, one: StackInTurn, come: Sequence[Any]) -> list[list[Tensor]]:
        """Return what a stack gets back: for each output a tensor per piece."""
        pieces = one.one.pieces[one.one.all].back
        every = [come if piece.source is None else self._of[piece.source].gxs[0] for piece in pieces]
        return [[some[n] for some in every] for n in one.one.written.gives]  # type: ignore[misc]
