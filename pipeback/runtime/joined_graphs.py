"""Joined graphs: stages of one worker that are neighbours make one graph of a micro-batch, within a whole flush, or
where each micro-batch goes forward and back before the next one comes.

    F(i)   y ← f_b(… f_a(x))        B(i)   Σ g_a, …, Σ g_b, dx ← one autograd call        a … b: the stages of a run

Between F (forward) and B (backward) nothing changes the weights, and no state is taken, so that nobody asks for a
micro-batch at one of these stages alone. Autograd does in the one graph what it does in graphs that are cut between the
stages, so no bit changes; what is paid per stage is only the module itself.

Stages that something listens to, and those that keep their activations otherwise than in their graph, run alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from pipeback.errors import StageError
from pipeback.methods.base import Method, overrides
from pipeback.private import listened, registered
from pipeback.runtime.worker import Worker
from pipeback.schedules.order import Ops
from pipeback.schedules.placement import Placed
from pipeback.stages.failed_graph import failed
from pipeback.stages.flight import Flight, begins, reported, weighed
from pipeback.stages.gradients import differentiate
from pipeback.stages.stage import Stage
from pipeback.tensors.copies import to_device

Run = Sequence[Stage]  # neighbours


class Joined(NamedTuple):
    """A micro-batch between F and B at a run of stages. ends: of each stage, the nodes of the graph that it ends with.
    outputs: of each stage, where somebody may ask which one was not finite.
    """

    flight: Flight
    ends: Sequence[Sequence[Any]]
    outputs: Sequence[Any]


def able(method: Method) -> bool:
    """Whether F and B of a method run on the newest weights, without being asked."""
    hooked = overrides(method, "forward_weights") or overrides(method, "backward_weights")
    return method.copies == "live" and not hooked and not method.needs_entry


class JoinedGraphs:
    """Does F and B at the parts of a worker, each operation of a micro-batch at all stages of a part."""

    def __init__(self, worker: Worker, first_bad: Callable[[int, Tensor], StageError]) -> None:
        """first_bad: the error of a micro-batch whose loss is not finite."""
        self.worker, self._first_bad = worker, first_bad
        self._flying: dict[int, dict[int, Joined]] = {}  # by the last stage of a run, and by micro-batch
        self._done: set[tuple[int, int]] = set()  # stages whose B was done with that of a later stage of their run
        self._runs: dict[tuple[int, ...], list[Run]] = {}
        self._heard = -1  # hooks that had been registered on anything when the runs were found
        self._whole: tuple[Placed | None, set[int]] = None, set()

    def forward(self, ops: Ops) -> None:
        """Do F at the stages of a part, or of several micro-batches, those of each upstream first."""
        for i, some in groupby(ops, itemgetter(1)):
            for run in self._divided(tuple([s for s, _ in some])):
                if len(run) == 1:
                    self.worker.forward([(run[0].index, i)])
                else:
                    self._forward(run, i)

    def backward(self, ops: Ops) -> None:
        """Do B, at the stages of a run where the last one is to do it."""
        for s, i in ops:
            if (s, i) in self._done:
                self._done.discard((s, i))
            elif (joined := self._flying.get(s, {}).pop(i, None)) is None:
                self.worker.backward([(s, i)])
            else:
                before = range(s - len(joined.ends) + 1, s)
                self._backward([self.worker.stages[t] for t in (*before, s)], i, joined)
                self._done.update((t, i) for t in before)

    def output(self, s: int, i: int) -> Any:
        """The output of a stage for a micro-batch in flight, None if it is not kept here."""
        for last, flying in self._flying.items():
            if i in flying and last - len(flying[i].outputs) < s <= last:
                return flying[i].outputs[s - last - 1]
        return None

    @property
    def flying(self) -> Iterable[dict[int, Any]]:
        """What is in flight, by micro-batch: a dictionary for each run of stages."""
        return self._flying.values()

    def forget(self, first: int) -> None:
        """Drop the micro-batches from `first` on, which are taken back."""
        for flying in self._flying.values():
            for mb in [mb for mb in flying if mb >= first]:
                del flying[mb]
        self._done = {(s, mb) for s, mb in self._done if mb < first}

    def _forward(self, run: Run, i: int) -> None:
        worker, first, last = self.worker, run[0], run[-1]
        link, began = worker.link, worker.began
        leaves, value = first.enter(x := link.recv("F", first.index, i))
        target = to_device(last.device, link.recv("Y", last.index, i)) if last.judges else None
        ends: list[Sequence[GradientEdge]] = []
        outputs: list[Any] = []
        kept = worker.check_finite and worker.last in worker.stages and worker.stages[worker.last].judges
        for stage in run:
            if began is not None:
                began(("F", stage.index, i))
            try:
                if stage.learnt.clones_input and stage is not first:
                    value = tuple([part.clone() for part in value]) if type(value) is tuple else value.clone()
                value = stage.compute(value, target if stage.judges else None)
            except (Exception, KeyboardInterrupt) as error:
                told = worker.failure("forward", stage, i, error)
                if isinstance(error, KeyboardInterrupt):
                    raise
                raise told from error
            ends.append([y.grad_fn for y in (value if type(value) is tuple else (value,))])
            if kept:
                outputs.append(value)
        flight = Flight(leaves, value, target, first.version, type(x) is tuple)
        flight.options = worker.options[i]
        if first.index:
            flight.listen()  # its gradient comes from stages whose outputs may be laid in any way
        flying = self._flying.setdefault(last.index, {})
        flying[i] = Joined(flight, ends, outputs)
        for stage in run:
            stage.note_flights(len(flying))
        if not last.last:
            link.send("F", last.index + 1, i, value)
        elif worker.check_finite and last.judges and not torch.isfinite(value):
            raise self._first_bad(i, value)
        else:
            worker.report(i, reported(value))
        if last.index == worker.last:
            del worker.options[i]
        numbers = [stage.index for stage in run]
        worker.ledger.add("F", numbers, [i] * len(run), [stage.version for stage in run])

    def _backward(self, run: Run, i: int, joined: Joined) -> None:
        worker, first, last, flight = self.worker, run[0], run[-1], joined.flight
        number = worker.sizes[i] if worker.samples else 1
        output = flight.output
        outputs = output if type(output) is tuple else (output,)
        grad = weighed(output, number) if last.judges else worker.link.recv("B", last.index, i)
        if worker.began is not None:
            worker.began(("B", f"{first.index} to {last.index}", i))
        roots: list[Any] = []
        seeds: list[Tensor] = []
        try:
            for y, g in zip(outputs, grad if type(grad) is tuple else (grad,) * len(outputs), strict=True):
                if y.requires_grad and g is not None:
                    roots.append(begins(y))
                    seeds.append(g.to(y.device) if last.learnt.mixed else g)
            differentiate(roots, seeds, flight.leaves, [stage.gradients for stage in run])
        except Exception as error:
            graphs = [[GradientEdge(node, 0, None) for node in nodes if node is not None] for nodes in joined.ends]
            raise worker.failure("backward", run[failed(graphs, error)], i, error) from error
        for stage in run:
            stage.gradients.count_more(number)
            stage.went_backward(flight.options)
        if worker.samples and worker.first == first.index:
            del worker.sizes[i]
        if first.index:
            worker.link.send("B", first.index - 1, i, flight.upstream())
        numbers = [stage.index for stage in reversed(run)]
        worker.ledger.add("B", numbers, [i] * len(run), [stage.version for stage in reversed(run)])

    # -- which stages make one graph -----------------------------------------------------------------------------

    def _divided(self, numbers: tuple[int, ...]) -> list[Run]:
        now = registered()
        if now < 0 or now != self._heard:
            self._heard, self._runs = now, {}
        runs = self._runs.get(numbers)
        if runs is None:
            runs = self._runs[numbers] = []
            before: Stage | None = None
            for stage in [self.worker.stages[s] for s in numbers]:
                fits = _fits(stage)
                if fits and before is not None and before.device == stage.device:
                    runs[-1] = [*runs[-1], stage]
                else:
                    runs.append([stage])
                before = stage if fits else None
        return runs if self._is_whole(numbers[0]) else [[self.worker.stages[s]] for s in numbers]

    def _is_whole(self, first: int) -> bool:
        """Whether the backwards of the part that begins with this stage are not split."""
        placed = self.worker.placed_by
        if placed is None:
            return True
        if self._whole[0] is not placed:
            parts = placed.whole_parts(placed.placement.owner[first])
            self._whole = placed, {part.start for part in parts}
        return first in self._whole[1]


def _fits(stage: Stage) -> bool:
    """Whether a stage may share a graph with others."""
    plain = stage.keeping is None and stage.stack is None and stage.home.slot is None and stage.call is stage.module
    return plain and listened(stage.module) is None
