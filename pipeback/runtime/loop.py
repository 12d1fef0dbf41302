"""Loop: one worker's loop. The order says which operations may run, and the worker does those of its own stages.

An operation is F (forward), B (backward) or U (update) of a micro-batch at a stage. The progress of a loop is plain
data, which a saved state contains.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain
from typing import Any, NoReturn

from pipeback.errors import StageError
from pipeback.methods.base import Method
from pipeback.runtime import undo
from pipeback.runtime.link import Name
from pipeback.runtime.undo import Dropped, Mark
from pipeback.runtime.worker import Worker
from pipeback.schedules.ops import Schedule
from pipeback.schedules.order import Order, Wave
from pipeback.schedules.placement import Placement, unwaited
from pipeback.schedules.programs import fill_drain, fills, flush, sequential
from pipeback.schedules.split import splits, whole
from pipeback.stages.flight import Value
from pipeback.stages.joint_optimizer import Options
from pipeback.tensors.layout import Message

Batch = tuple[Value, Any, int]  # inputs, target, samples
Messages = dict[Name, Message]
Failure = StageError | KeyboardInterrupt
Failed = tuple[str, int, int]  # the operation that has failed: its kind, stage and micro-batch


class Loop:
    """One worker's loop: an order, the same on every worker, and the worker that does its own part."""

    def __init__(
        self,
        worker: Worker,
        order: Order,
        method: Method,
        replica: int = 0,
        placement: Placement | None = None,
        at_once: bool = False,
    ) -> None:
        """placement: where stages are; given where a method with flushes runs `Method.placed` within a push.
        at_once: a push admits all its micro-batches before any operation, so that the order can choose among more.
        """
        self.worker, self.order, self.method, self.replica = worker, order, method, replica
        self.placement, self.at_once = placement, at_once
        # whether something else waits to be done; None: the caller asks for what is left of a push
        self.more: Callable[[], bool] | None = None
        self.inline = False  # whether a caller hears that a micro-batch has failed before the next one is pushed
        # where it stood before the schedule was begun
        self._before: tuple[dict[str, Any], int, tuple[int, int, int]] = ({}, 1, (0, 0, 0))
        self._marks = Mark(), Mark()  # the states before a push, and before a later micro-batch of it
        self.fresh = True  # whether the next micro-batch begins the schedule anew
        self.awaited = True  # whether somebody has waited for what was pushed last
        self.pushed = 1  # the micro-batches of the push that began the schedule
        self._rested = self._watches = True  # whether no operation is running elsewhere; see `watch`
        self._waves: Iterator[Wave] = iter(())  # the operations that may still run, from the updates that are due on

    def push(self, batches: Sequence[Batch], options: Options) -> None:
        """Admit micro-batches one by one, and do every operation that may then run."""
        order, worker, link = self.order, self.worker, self.worker.link
        self._look()
        able = self.inline and undo.able(worker, order) and self.placement is None
        first = mark = self._mark(0) if able else None
        if self.fresh:
            self._begin(len(batches), at_once=self.at_once)
        elif (self.placement is not None or self.at_once) and order.empty:
            # the last push or this one may be part of a flush
            order.restart(self._schedule(len(batches), at_once=self.at_once))
        worker.placed_by, worker.in_flushes, self.awaited = order.placed, self._flushes(), False
        varies = order.policy == "skewed" or self.method.flush_each_push
        worker.given = 0 if varies else order.arrived + len(batches)
        if worker.given:
            worker.residence.compare(worker.given)
        last = worker.count - 1
        at_end = self.at_once or order.policy == "skewed"  # with these the order of operations does not change
        for n, (x, target, size) in enumerate(batches):
            i = order.arrived + (n if at_end else 0)
            if n and able and not at_end:
                mark = self._mark(1)
            worker.options[i] = options
            if worker.samples:
                worker.sizes[i] = size
            link.enter(i, x, target, worker.start, options)
            if 0 in worker.stages:
                link.send("F", 0, i, worker.placed(0, x))
            if last in worker.stages:
                link.send("Y", last, i, worker.placed(last, target))
            if not at_end:
                self._let_in(i + 1, first, mark, len(batches) - n)
        if at_end:
            self._let_in(order.arrived + len(batches), first, mark, len(batches))
        if order.policy == "skewed" and self.more is not None:
            worker.run(order.rest(self.more))  # while nothing comes that would fill the pipeline
        self._remember()
        if self.method.flush_each_push:
            self.drain()

    def _flushes(self) -> bool:
        """Whether nothing is in flight after a micro-batch, or, where losses are computed inside, after a push in which
        all stages hold as many micro-batches; and all stages are here.
        """
        worker, schedule = self.worker, self.order.schedule
        pushes = self.method.flush_each_push and worker.judges and fills(schedule)
        return len(worker.stages) == worker.count and (sequential(schedule) or pushes)

    def _mark(self, n: int) -> Mark:
        return self._marks[n].put(self.worker, self.order, (self.fresh, self.pushed))

    def _let_in(self, arrived: int, first: Mark | None, mark: Mark | None, behind: int) -> None:
        """Do what may be done once so many micro-batches have arrived; `behind` of this push were not let in before."""
        try:
            self.worker.run(self.order.advance(arrived))
        except (StageError, KeyboardInterrupt) as error:
            failed, self.worker.failed = self.worker.failed or ("", 0, 0), None
            if first is not None and mark is not None:
                self._take_back(error, failed, first, mark, behind)
            elif self.inline and failed[:2] == ("forward", 0):
                self._withdraw(error, failed, behind)
            raise

    def _take_back(self, error: Failure, failed: Failed, first: Mark, mark: Mark, behind: int) -> None:
        """Take back the micro-batch whose forward failed with `error`, and the `behind` - 1 after it; a flush is taken
        back as a whole push. Raises `Dropped` if that was possible.
        """
        kind = failed[0]
        if kind == "update" or (isinstance(error, KeyboardInterrupt) and kind != "forward"):
            return  # weights may be half changed
        pushed = mark.order["arrived"] - first.order["arrived"] + behind
        whole = self.at_once or (self.method.flush_each_push and first.empty and first.within_reach(self.worker))
        mark = first if whole else mark
        if not mark.within_reach(self.worker):
            return
        mark.restore(self.worker)
        self.fresh, self.pushed = mark.more
        self.order.resume(self._of_method(mark.order["start"], self.pushed), mark.order)
        self._remember()
        if self.method.flush_each_push and not whole:
            self.drain()
        before = self.order.arrived - first.order["arrived"]
        self._drop(error, failed, before, pushed, whole=whole)

    def _withdraw(self, error: Failure, failed: Failed, pushed: int) -> None:
        """Take back the micro-batch whose forward failed at the first stage, before anything else of its tick was done,
        and those behind it. Raises `Dropped` if that was possible.
        """
        order, worker = self.order, self.worker
        if self.method.flush_each_push or not undo.entering(worker, order):
            return
        came = order.arrived - pushed
        order.withdraw()
        undo.forget(worker, order.arrived)
        if order.arrived == order.start:  # the schedule was begun with this push
            state, self.pushed, (worker.start, worker.base, worker.entered) = self._before
            order.resume(self._of_method(state["start"], self.pushed), state)
            self.fresh = True
        elif order.start == came:
            self.pushed = order.arrived - came
        self._remember()
        self._drop(error, failed, order.arrived - came, pushed)

    def _drop(self, error: Failure, failed: Failed, before: int, pushed: int, *, whole: bool = False) -> NoReturn:
        """Raise `Dropped`: the first `before` micro-batches of a push were let in; whole: of one that is taken back."""
        told, cause = str(error), error.__cause__
        if isinstance(error, KeyboardInterrupt):
            _, s, i = failed
            told, cause = f"{self.worker.stages[s].label}, micro-batch {i}: the forward was stopped", error
        operation, stage, mb = (
            ("forward", *failed[1:])
            if isinstance(error, KeyboardInterrupt)
            else (error.operation, error.stage, error.micro_batch)
        )
        rest = f", nor on the {pushed - before - 1} behind it, but on the {before} before it" if pushed > 1 else ""
        rest = ", nor on the others of this push" if whole and pushed > 1 else rest
        raise Dropped(
            f"{told}; nothing was trained on it{rest}, and others may be pushed", operation, stage, mb
        ) from cause

    def drain(self) -> None:
        """Finish the micro-batches in flight; the schedule begins anew with the next one."""
        self.settle()
        if not self.fresh:
            self.worker.run(self.order.close(self.order.arrived))
            self.worker.settle()
            self.fresh = True
            self._remember()

    # -- micro-batches in three parts, for a loss that is computed outside -----------------------------------------

    def forward(self, xs: Sequence[Value], options: Options, expected: int) -> None:
        """Run F of the next micro-batches at every stage; several of them run at one stage before the next stage.

        The order counts them only with the backward, so that they can still be forgotten. No other operation can run
        before these forwards: all that were allowed have been done, and stages downstream wait for them.
        """
        self.settle()
        worker, count, mbs = self.worker, self.worker.count, self.enter(xs, options, expected)
        if len(xs) == 1:
            worker.run([Wave("F", [(s, mbs[0]) for s in range(count)])])
        else:
            worker.run([Wave("F", [(s, i)]) for s in range(count) for i in mbs])

    def enter(self, xs: Sequence[Value], options: Options, expected: int) -> range:
        """Begin the next micro-batches, of which nothing is done yet; return their numbers."""
        if self.fresh:
            self._begin(expected)
        worker, mbs = self.worker, range(self.order.arrived, self.order.arrived + len(xs))
        worker.in_flushes = self._flushes()
        for i, x in zip(mbs, xs, strict=True):
            worker.options[i] = options
            worker.link.enter(i, x, None)
            if 0 in worker.stages:
                worker.link.send("F", 0, i, worker.placed(0, x))
        worker.look()
        return mbs

    def forget(self, which: Collection[int], of: int) -> None:
        """Drop the micro-batches `which` of the last `of`, whose forwards were done; those after them move up."""
        first, joined = self.order.arrived, self.worker.executor.joined
        runs: list[dict[int, Any]] = [] if joined is None else list(joined.flying)
        for flights in [*runs, *(stage.flights for stage in self.worker.stages.values())]:
            held = [flights.pop(first + n, None) for n in range(of)]  # None: with other stages of a run
            kept = [flight for n, flight in enumerate(held) if n not in which and flight is not None]
            flights.update(enumerate(kept, first))

    def backward(self, gradients: Sequence[Value]) -> None:
        """Run the backwards that may run now; `settle` does the updates after them."""
        worker, first = self.worker, self.order.arrived
        last = worker.count - 1
        for i, gradient in enumerate(gradients, first):
            if last in worker.stages:
                worker.link.send("B", last, i, gradient)
        waves = self.order.advance(first + len(gradients))
        then = self._without_forwards(waves, first, len(gradients))
        if len(gradients) > 1:
            # all forwards have been done: a stage can do all its backwards at once
            then = sorted((Wave(kind, [op]) for kind, ops in chain(then, waves) for op in ops), key=_downstream_first)
        rest = chain(then, waves)

        def up_to_an_update() -> Iterator[Wave]:
            for wave in rest:
                if wave.kind == "U":
                    self._waves = chain([wave], rest)
                    return
                yield wave

        worker.run(up_to_an_update())

    def _without_forwards(self, waves: Iterator[Wave], first: int, count: int) -> list[Wave]:
        """Remove the forwards of these micro-batches, which have been done, from the waves; return the other waves."""
        undone = {(s, i) for s in range(self.worker.count) for i in range(first, first + count)}
        between = []
        while undone:
            kind, ops = next(waves, Wave("U", []))
            others = [op for op in ops if kind != "F" or op not in undone]
            if kind == "F":
                undone.difference_update(ops)
            early = kind == "U" and {s for s, _ in others} & {s for s, _ in undone}
            if not ops or early:
                i = min(i for _, i in undone)
                raise RuntimeError(
                    f"the schedule holds micro-batch {i} back; a forward must not wait for later arrivals"
                )
            if others:
                between.append(Wave(kind, others))
        return between

    def settle(self) -> None:
        """Do every operation that may run, except those left in the program of a schedule that has ended."""
        self._look()
        self.awaited = True
        waves, self._waves = self._waves, iter(())
        self.worker.run(self._undone(waves if self.fresh else chain(waves, self.order.rest())))
        self.worker.settle()
        self._remember()

    def reach(self, done: Callable[[], bool]) -> None:
        """Do operations that may run until `done` says so, or none is left."""
        self._look()
        self.awaited = True
        if not self.fresh:
            self.worker.run(self._undone(self.order.rest(done)))
            self.worker.settle()
        self._remember()

    def _undone(self, waves: Iterator[Wave]) -> Iterator[Wave]:
        """Leave out the forward that was done before its turn, if there is one."""
        return waves if self.worker.early is None else _without(self.worker, waves)

    def rest(self) -> None:
        """Do every operation that may run, and wait for operations that run elsewhere."""
        self.settle()
        self.worker.residence.rest()
        self._rested = True
        self._remember()

    def _look(self) -> None:
        """Take over what the user has written into weights and optimizers; no other thread may work meanwhile."""
        if self._watches and (self._rested or self.worker.residence.joins):
            for changes in self.worker.outside:
                changes.look()
        self.worker.look()
        self._rested = False

    def clip(self, norm: float | None, value: float | None) -> None:
        """Bound the gradients of later updates."""
        self.worker.clip_norm, self.worker.clip_value = norm, value

    def watch(self, watches: bool) -> None:
        """Set whether operations look for what the user has written into weights and optimizers before them."""
        self._watches = watches
        self._remember()

    def _remember(self) -> None:
        if self._watches and (self._rested or self.worker.residence.joins):
            for changes in self.worker.outside:
                changes.remember()

    def _begin(self, pushed: int, *, at_once: bool = False) -> None:
        order, worker = self.order, self.worker
        self._before = order.state(), self.pushed, (worker.start, worker.base, worker.entered)
        self.pushed = pushed
        order.restart(self._schedule(pushed, at_once=at_once))
        worker.start, worker.base = order.arrived, next(iter(worker.stages.values())).version
        worker.entered = worker.base
        self.fresh = False

    def _schedule(self, pushed: int, *, at_once: bool = False) -> Schedule:
        """Return the schedule for a push: the method's own, or one that gives the same weights if flushes end with it.

        at_once: all forwards come first, so that weights are fetched to the device once for F and once for B.
        """
        schedule = self._of_method(self.order.arrived, pushed)
        if pushed % flush(schedule):
            return schedule
        if at_once and self.method.by_worker:
            return fill_drain(flush(schedule))
        return schedule if (at := self.placement) is None else unwaited(self.method.placed(schedule, at))

    def _of_method(self, start: int, pushed: int) -> Schedule:
        """Return the method's schedule, with whole backwards where the worker cannot split them."""
        schedule = self.method.schedule_at(start, pushed)
        return whole(schedule) if self.worker.split is None and splits(schedule) else schedule

    # -- progress ------------------------------------------------------------------------------------------------

    def waiting(self) -> Messages:
        """Return the messages to own stages that were not received, by name; no operation may be running."""
        link, order, last = self.worker.link, self.order, self.worker.count - 1
        mine, done = self.worker.stages, {"F": order.forwards, "B": order.backwards}
        sent = [("F", s, s - 1) for s in mine if s] + [("B", s, s + 1) for s in mine if s < last]
        due = {(k, s, order.start + mb) for k, s, by in sent for mb in range(done[k][s], done[k][by])}
        for name in sorted(due):
            link.wait(*name)
        # other workers may be ahead and have sent more; what comes from outside, x, y and gradients, stays
        return {n: m for n, m in link.box.items() if n in due or n[:2] in (("F", 0), ("Y", last), ("B", last))}

    def progress(self, number: Callable[[Options], int]) -> dict[str, Any]:
        """Return the progress as plain values; `entries`, `options` and `sizes` are of micro-batches still in use."""
        worker = self.worker
        return {
            "order": self.order.state(),
            "fresh": self.fresh,
            "pushed": self.pushed,
            "start": worker.start,
            "base": worker.base,
            "entered": worker.entered,
            "entries": {str(i): v for i, v in worker.entries.items()},
            "options": {str(i): number(o) for i, o in worker.options.items()},
            "sizes": {str(i): n for i, n in worker.sizes.items()},
        }

    def resume(self, saved: dict[str, Any], messages: Messages, options: dict[int, Options]) -> None:
        """Continue from saved `progress`, with the entries that all workers remembered."""
        worker = self.worker
        self.pushed = saved.get("pushed", 1)
        self.order.resume(self._of_method(saved["order"]["start"], self.pushed), saved["order"])
        self.fresh, worker.start, worker.base = saved["fresh"], saved["start"], saved["base"]
        worker.entered = saved["entered"]
        worker.entries = {int(i): v for i, v in saved["entries"].items()}
        worker.options = {int(i): options[n] for i, n in saved["options"].items()}
        worker.sizes = {int(i): n for i, n in saved["sizes"].items()}
        worker.link.box.update({name: m for name, m in messages.items() if name[1] in worker.stages})
        worker.executor.take_up()


def _without(worker: Worker, waves: Iterator[Wave]) -> Iterator[Wave]:
    for kind, ops in waves:
        if worker.early is not None and kind == "F" and worker.early in ops:
            ops, worker.early = [op for op in ops if op != worker.early], None
        if ops:
            yield Wave(kind, ops)


def _downstream_first(wave: Wave) -> int:
    return -wave.ops[0][0]
