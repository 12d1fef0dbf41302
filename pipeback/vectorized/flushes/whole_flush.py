"""Whole flush: does all forwards (F) and backwards (B) of a flush, stage after stage, each on several micro-batches at
once, and then all updates (U).

Within a flush the weights stay, so that a stage does with its M micro-batches

    Y, saved ← F(w, X)        G_X, Σ g ← B(saved, w, G)        X, Y, G: (M, …)

and the update is that of the event loop, with its hooks and its clipping. Where the schedule holds fewer micro-batches
at once, as 1F1B does, the flush is done in as many passes as that takes. Stages that cannot be graphs run one
micro-batch after the other.

A worker of several does so with its own stages, a part of the flush after the other, so that the next worker has work
soon: first F of all parts and then B of all, as in GPipe, so that no worker waits for one that waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeback.counts import numbered
from pipeback.errors import StageError
from pipeback.private import listened
from pipeback.runtime.stage_executor import StageExecutor
from pipeback.runtime.worker import Worker
from pipeback.schedules.flushes import flying
from pipeback.schedules.ops import Schedule
from pipeback.stages.gradients import own
from pipeback.stages.stage import Stage
from pipeback.stages.tracing_lock import TRACING
from pipeback.tensors.copies import to_device
from pipeback.vectorized.making.bounded_cache import BoundedCache
from pipeback.vectorized.making.shared_graphs import SharedLosses, apart, together
from pipeback.vectorized.stacks.eligible import flushes, torchs
from pipeback.vectorized.stacks.stack import Stack
from pipeback.vectorized.tracing.forms import Kind, floating, leaves, packed

PARTS = 4  # in which a worker of several hands a flush on
Left = tuple[Any, Sequence[Tensor]]  # the graphs of a stage, and what its F has saved for B


class Pass(NamedTuple):
    """Micro-batches that went forward together: what is left for B; and the gradients of the last stage's outputs, or
    None where they are messages. packed: whether the first stage got them as a tuple.
    """

    mbs: range
    left: dict[int, Left | None]
    gradients: list[Any] | None
    packed: bool


class Begun(NamedTuple):
    """A flush that has begun: its micro-batches, the older versions that stages run on, and passes without their B."""

    mbs: range
    versions: dict[int, int]
    paused: Sequence[Pass] = ()


def able(worker: Worker) -> bool:
    """Whether a worker can do whole flushes, or groups."""
    last = worker.stages[worker.last]
    return flushes(worker.method, outside=last.last and not last.judges, shared=len(worker.stages) < worker.count)


class WholeFlush:
    """Does flushes for a worker: its own stages. one_by_one: does operations of stages that are no graphs.

    judged: is called with every micro-batch and its loss.
    """

    def __init__(
        self, worker: Worker, one_by_one: StageExecutor, stacks: Sequence[Stack], judged: Callable[[int, Tensor], None]
    ) -> None:
        self.worker, self.one_by_one, self.judged = worker, one_by_one, judged
        self._of = {stage.index: stack for stack in stacks for stage in stack.stages}
        self._losses: BoundedCache[Any, SharedLosses | None] = BoundedCache()
        self._unfit: set[Any] = set()  # stacks that have no graphs for a kind of micro-batch
        self._weights = {s: list(stage.module.parameters()) for s, stage in worker.stages.items()}
        self._begun: Begun | None = None
        self._held: tuple[int, list[int]] = 0, []  # micro-batches per flush, and the most in flight at each stage

    def run(self, first: int, count: int, schedule: Schedule) -> None:
        """Do the flush or the group of `count` micro-batches from `first` on, which have all arrived."""
        self.begin(first, count, schedule)
        self.end()

    def begin(self, first: int, count: int, schedule: Schedule, *, pauses: bool = False) -> None:
        """Do all of it but the updates. pauses: where the loss is computed outside, B is left, too: that of the last
        pass, or that of all passes where the last stage is another worker's.
        """
        worker, mbs = self.worker, range(first, first + count)
        if self._held[0] != count:
            self._held = count, flying(schedule, worker.count)
        held: Any = worker.residence.forward([(s, first) for s in worker.stages])  # an older version, for all of them
        self._begun = Begun(mbs, {stage.index: h.version for h in held for stage in h.stages})
        try:
            part = len(worker.stages) < worker.count
            ahead = [self._pass(some) for some in (_divided(mbs, PARTS) if part else ())]
            for some in () if part else self._passes(mbs):
                ahead.append(self._pass(some))
                if not pauses or some.stop < mbs.stop:
                    self._back(ahead.pop())
            if pauses:
                self._begun = self._begun._replace(paused=ahead)
            else:
                self._all_back(ahead)
        except BaseException:
            self._forget()
            raise
        finally:
            worker.residence.after_backward(held)

    def _pass(self, mbs: range) -> Pass:
        """Do F of these micro-batches at the stages of this worker."""
        link, first = self.worker.link, self.worker.first
        for i in mbs:
            link.wait("F", first, i)
        packed = type(link.box["F", first, mbs[0]]) is tuple
        return Pass(mbs, *self._forth(mbs), packed)

    def _all_back(self, passes: Sequence[Pass]) -> None:
        """Do B of these passes, and send the gradients of the inputs to the worker before."""
        first = self.worker.first
        for one in passes:
            back = self._back(one)
            if first and back is not None:
                self._send("B", first - 1, one.mbs, apart(back, len(one.mbs), one.packed))

    @property
    def begun(self) -> bool:
        """Whether a flush has begun and not ended."""
        return self._begun is not None

    def end(self) -> None:
        """Do what `begin` has left."""
        worker, begun = self.worker, self._begun
        assert begun is not None
        mbs, versions, paused = begun
        try:
            self._all_back(paused)
        except BaseException:
            self._forget()
            raise
        self._begun = None
        for stage in worker.stages.values():
            stage.note_flights(self._held[1][stage.index])
        records = [
            (2 * s + back, versions.get(s, stage.version)) for s, stage in worker.stages.items() for back in (0, 1)
        ]
        worker.ledger.put_off(len(records) * len(mbs), partial(_records, records, mbs))
        worker.update([(s, mbs[-1]) for s in worker.stages])

    def _forget(self) -> None:
        begun, self._begun = self._begun, None
        for stage in self.worker.stages.values():
            for i in () if begun is None else begun.mbs:
                stage.flights.pop(i, None)

    def _passes(self, mbs: range) -> Iterator[range]:
        """Yield the micro-batches that go through the stages together: all of one form, and no more than the schedule
        keeps on average at a stage.
        """
        most = max(1, sum(self._held[1]) // len(self._held[1]))
        begin = mbs.start
        for end in range(mbs.start + 1, mbs.stop + 1):
            if end == mbs.stop or self._form(end) != self._form(begin):
                yield from _divided(range(begin, end), -(-(end - begin) // most))
                begin = end

    def _form(self, i: int) -> Any:
        box, last = self.worker.link.box, self.worker.last
        x, target = box["F", 0, i], box.get(("Y", last, i))
        return type(x), *((type(v), getattr(v, "shape", None), getattr(v, "dtype", None)) for v in (*leaves(x), target))

    def _forth(self, mbs: range) -> tuple[dict[int, Left | None], list[Any] | None]:
        """Do F of these micro-batches at every stage, and B of the last one if its loss is part of a graph.

        Returns what is left for B, and the gradients (n, …) of the last of these stages' outputs; None: they are
        messages.
        """
        left: dict[int, Left | None] = {}
        value: list[Tensor] | None = None  # the outputs of the stage before, (n, …), if they are no messages
        packs = False
        with torch.no_grad():
            for s, stage in self.worker.stages.items():
                if stage.last and (found := self._judge(stage, mbs, value, packs)) is not None:
                    return left, found
                value, packs, left[s] = self._forward(stage, mbs, value, packs)
        if not stage.last and value is not None:
            self._send("F", s + 1, mbs, apart(value, len(mbs), packs))
        return left, None

    def _back(self, one: Pass) -> list[Any] | None:
        """Do B of a pass at the stages where something is left; return the gradients (n, …) of the first one's inputs,
        or None where they are messages.
        """
        mbs, left, value, _ = one
        with torch.no_grad():
            for s in reversed(left):
                value = self._backward(self.worker.stages[s], mbs, value, left[s])
        for stage in self.worker.stages.values():
            stage.went_backward(self.worker.options[mbs[-1]])
        for i in mbs:
            del self.worker.options[i]
        return value

    # -- F -----------------------------------------------------------------------------------------------------------

    def _forward(
        self, stage: Stage, mbs: range, value: list[Tensor] | None, packs: bool
    ) -> tuple[list[Tensor] | None, bool, Left | None]:
        """Do F. Returns the outputs (n, …) or None, if they are messages; whether each is a tuple; and what is left."""
        worker, s = self.worker, stage.index
        graphs, xs = self._graphs(stage, mbs, value, packs)
        if graphs is None:
            if value is not None:
                self._send("F", s, mbs, apart(value, len(mbs), packs))
            # the event loop forgets the options of a micro-batch when it has left the last stage
            kept = {i: worker.options[i] for i in mbs}
            with torch.enable_grad():
                self.one_by_one.forward([(s, i) for i in mbs])
            worker.options.update(kept)
            return None, False, None
        if worker.began is not None:
            worker.began(("F", s, mbs[0]))
        try:
            found = graphs.forward(*self._weights[s], *xs)
        except Exception as error:
            raise self._failed("forward", stage, mbs, error) from error
        saved = found[graphs.outputs :]
        self._of[s].note_flush(sum(t.nbytes for t in saved))
        return list(found[: graphs.outputs]), graphs.packs, (graphs, saved)

    def _graphs(
        self, stage: Stage, mbs: range, value: list[Tensor] | None, packs: bool
    ) -> tuple[Any, Sequence[Tensor]]:
        """Return the graphs of a stage for its inputs, and these; None if it has none."""
        s, link = stage.index, self.worker.link
        stack = self._of.get(s)
        if stack is None:
            return None, ()
        if value is None and (found := self._joined(s, mbs)) is not None:
            value, packs = found
        if value is None:
            return None, ()
        kind = Kind(tuple((tuple(v.shape[1:]), v.dtype) for v in value), packs, stack.mode, stage.learnt.casts)
        key = id(stack), kind
        if key in self._unfit:
            return None, ()
        try:
            with TRACING:
                one = [v[0] for v in value]
                stack.rings(kind, packed(one, packs))  # its stages are alike for this kind, or it raises `Unfit`
                graphs = stack.maker.shared(kind, one).at(len(mbs), value)
        except Exception:  # whatever the user's code or torch raises: the micro-batches still run one by one
            self._unfit.add(key)
            return None, ()
        for i in mbs:
            link.box.pop(("F", s, i), None)
        return graphs, value

    def _joined(self, s: int, mbs: range) -> tuple[list[Tensor], bool] | None:
        """Return the inputs of a stage that are messages as tensors (n, …), and whether each is a tuple; None if they
        cannot be joined.
        """
        messages = [self.worker.link.box["F", s, i] for i in mbs]
        each = [[(type(v), getattr(v, "shape", None)) for v in leaves(message)] for message in messages]
        plain = all(kind is Tensor for kind, _ in each[0]) and all(some == each[0] for some in each)
        return (together(messages), type(messages[0]) is tuple) if plain else None

    def _send(self, kind: str, s: int, mbs: range, values: Sequence[Any]) -> None:
        for i, value in zip(mbs, values, strict=True):
            self.worker.link.send(kind, s, i, value)

    def _judge(self, stage: Stage, mbs: range, value: list[Tensor] | None, packs: bool) -> list[Tensor] | None:
        """Do F and B of the last stage; return the gradients of its inputs, or None if it is no graph."""
        worker, link, s = self.worker, self.worker.link, stage.index
        if stage.loss is None or not torchs(stage.loss) or stage.random.state is not None or listened(stage.module):
            return None
        if value is None and (joined := self._joined(s, mbs)) is not None:
            value, packs = joined
        if value is None:
            return None
        targets = [to_device(stage.device, link.box["Y", s, i]) for i in mbs]
        if type(targets[0]) is not Tensor or not all(floating(v.dtype) for v in value):
            return None
        target = torch.stack(targets)
        graph = self._loss_graph(stage, value, target, packs)
        if graph is None:
            return None
        counts = [float(worker.sizes[i]) if worker.samples else 1.0 for i in mbs]
        seeds = torch.tensor(counts, dtype=value[0].dtype, device=value[0].device)
        try:
            losses, *found = graph(*self._weights[s], *value, target, seeds)
        except Exception as error:
            raise self._failed("forward", stage, mbs, error) from error
        for i, loss in zip(mbs, losses.unbind(), strict=True):
            self.judged(i, loss.clone())
            del link.box["Y", s, i]
            link.box.pop(("F", s, i), None)
        self._add(stage, mbs, found[len(value) :])
        return list(found[: len(value)])

    def _loss_graph(self, stage: Stage, value: list[Tensor], target: Tensor, packs: bool) -> Any:
        forms = ((v.shape[1:], v.dtype) for v in (*value, target))
        form = (packs, *forms, stage.module.training, id(stage.loss), stage.learnt.casts)
        with TRACING:
            try:
                if form not in self._losses:
                    self._losses[form] = None
                    x = tuple(v[0] for v in value) if packs else value[0][0]
                    self._losses[form] = SharedLosses(stage, x, target[0])
                found = self._losses.used(form)
                return None if found is None else found.at(len(target), value, target)
            except Exception:  # whatever the user's code or torch raises: the micro-batches still run one by one
                self._losses[form] = None
                return None

    # -- B -----------------------------------------------------------------------------------------------------------

    def _backward(self, stage: Stage, mbs: range, value: list[Any] | None, left: Left | None) -> list[Any] | None:
        """Do B. value: the gradients of the outputs, (n, …), None if they are messages. Returns those of the inputs,
        likewise.
        """
        worker, s, link = self.worker, stage.index, self.worker.link
        if left is None:
            if value is not None:
                self._send("B", s, mbs, apart(value, len(mbs), self._packs(s)))
            with torch.enable_grad():
                for i in mbs:
                    self.one_by_one.backward([(s, i)])
            return None
        graphs, saved = left
        if value is None:
            messages = [leaves(link.recv("B", s, i)) for i in mbs]
            gs = [torch.stack([some[n] for some in messages]) for n in graphs.gives]
        else:
            gs = [value[n].contiguous() for n in graphs.gives]
        if worker.began is not None:
            worker.began(("B", s, mbs[0]))
        weights = self._weights[s]
        try:
            found = graphs.backward(*saved, *graphs.made(*weights), *gs)
        except Exception as error:
            raise self._failed("backward", stage, mbs, error) from error
        self._add(stage, mbs, [found[n] for n in self._of[s].rows.trained])
        gxs = list(found[len(weights) :])
        return gxs if s else None

    def _packs(self, s: int) -> bool:
        """Whether the output of a stage that is no graph is a tuple."""
        flight = next(iter(self.worker.stages[s].flights.values()))
        return type(flight.output) is tuple

    def _add(self, stage: Stage, mbs: range, grads: Sequence[Tensor]) -> None:
        """Add the gradients of these micro-batches to the sums of a stage."""
        seen: set[int] = set()
        pairs = zip(stage.params, grads, strict=True)
        stage.gradients.add([own(p, g, seen) if p.requires_grad else None for p, g in pairs])
        stage.gradients.count_more(len(mbs))
        for i in mbs if self.worker.samples else ():
            self.one_by_one.weigh(stage, i)

    def _failed(self, what: str, stage: Stage, mbs: range, error: Exception) -> StageError:
        return StageError(
            f"{stage.label}, {numbered('micro-batch', list(mbs))}: the {what} failed: {error}", what, stage.index
        )


def _divided(mbs: range, parts: int) -> Iterator[range]:
    """Yield so many parts of the micro-batches, about equally many each."""
    n = min(parts, len(mbs))
    ends = [mbs.start + len(mbs) * k // n for k in range(n + 1)]
    return map(range, ends, ends[1:])


def _records(records: Sequence[tuple[int, int]], mbs: range) -> tuple[list[int], list[int], list[int]]:
    """Return what the ledger records of a flush: forwards first, and backwards from the last stage on."""
    forth = [record for record in records if not record[0] % 2]
    back = [record for record in reversed(records) if record[0] % 2]
    each = [(who, i, version) for some in (forth, back) for i in mbs for who, version in some]
    who, numbers, versions = zip(*each, strict=True)
    return list(who), list(numbers), list(versions)
