"""Stage executor: does a worker's operations stage by stage, but the backwards of a wave in one autograd call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipeback.errors import StageError
from pipeback.runtime.executor import JoinedOperations, SplitOperations
from pipeback.runtime.joined_graphs import JoinedGraphs, able
from pipeback.runtime.one_by_one import OneByOne
from pipeback.runtime.split_executor import SplitExecutor
from pipeback.runtime.worker import Worker
from pipeback.schedules.order import Ops
from pipeback.stages.failed_graph import failed
from pipeback.stages.flight import Flight, weighed
from pipeback.stages.gradients import differentiate
from pipeback.stages.stage import Stage
from pipeback.tensors.copies import to_device


class StageExecutor(OneByOne):
    """The executor of the stages of `worker`; F is the forward, B the backward of a micro-batch at one stage."""

    whole = ""
    undoes = True  # every operation leaves its results in the stages and the link

    def __init__(self, worker: Worker) -> None:
        self.worker, self.stages, self.link = worker, worker.stages, worker.link
        self.split: SplitOperations | None = SplitExecutor(worker)
        self.joined: JoinedOperations | None = None
        if worker.residence.joins and able(worker.method):
            self.joined = JoinedGraphs(worker, self.first_bad)
        self.apart = any(stage.keeping is not None and stage.keeping.apart for stage in self.stages.values())

    def forward(self, ops: Ops) -> list[Flight]:
        """Do F of each (stage, micro-batch), in the order given; return the new flights."""
        worker, link, stages = self.worker, self.link, self.stages
        flights: list[Flight] = []
        for s, i in ops:
            stage = stages[s]
            x = link.recv("F", s, i)
            if worker.began is not None:
                worker.began(("F", s, i))
            try:
                y = stage.forward(i, x, to_device(stage.device, link.recv("Y", s, i)) if stage.judges else None)
            except (Exception, KeyboardInterrupt) as error:
                told = worker.failure("forward", stage, i, error)
                if isinstance(error, KeyboardInterrupt):
                    raise
                raise told from error
            flights.append(stage.flights[i])
            flights[-1].options = worker.options[i]
            if not stage.last:
                link.send("F", s + 1, i, y)
            elif worker.check_finite and stage.judges and not torch.isfinite(y):
                raise self.first_bad(i, y)
            else:
                worker.report(i, y)
            if s == worker.last:
                del worker.options[i]
        return flights

    def backward(self, ops: Ops) -> None:
        """Do B of each (stage, micro-batch), as one autograd call."""
        worker, link, stages = self.worker, self.link, self.stages
        roots: list[Any] = []
        seeds: list[Tensor] = []
        flights, graphs = [], []
        for s, i in ops:
            stage = stages[s]
            before = len(roots)
            grad = None if stage.judges else link.recv("B", s, i)
            if worker.samples and stage.last:
                grad = weighed(stage.flights[i].output, worker.sizes[i])
            try:
                flights.append(stage.begin_backward(i, grad, roots, seeds))
            except Exception as error:
                raise worker.failure("backward", stage, i, error) from error
            graphs.append(slice(before, len(roots)))
        try:
            leaves = [leaf for flight in flights for leaf in flight.leaves]
            differentiate(roots, seeds, leaves, [stages[s].gradients for s, _ in ops])
        except Exception as error:
            s, i = ops[failed([roots[graph] for graph in graphs], error)]
            raise worker.failure("backward", stages[s], i, error) from error
        for (s, i), flight in zip(ops, flights, strict=True):
            stage = stages[s]
            upstream = stage.end_backward(flight)
            if worker.samples:
                self.weigh(stage, i)
            if s:
                link.send("B", s - 1, i, upstream)

    def weigh(self, stage: Stage, i: int) -> None:
        """Count the samples of a micro-batch, if these weight the mean; the backward has counted it as 1."""
        sizes = self.worker.sizes
        size = sizes.pop(i) if stage.index == self.worker.first else sizes[i]
        stage.gradients.count_more(size - 1)

    # -- errors --------------------------------------------------------------------------------------------------

    def bad_loss(self, i: int, loss: Tensor) -> StageError:
        """The error of a micro-batch whose loss is not finite."""
        last = self.stages[self.worker.last]
        return self._not_finite(last, i, f"the loss is {loss.item()}")

    def first_bad(self, i: int, loss: Tensor) -> StageError:
        """The error of a micro-batch whose loss is not finite: of the first stage here whose output was not."""
        for s in sorted(self.stages):
            given = () if s == self.worker.last else self._output(s, i)
            if not all(bool(torch.isfinite(part).all()) for part in given):
                return self._not_finite(self.stages[s], i, f"the output is not finite (the loss is {loss.item()})")
        return self.bad_loss(i, loss)

    def _output(self, s: int, i: int) -> Sequence[Tensor]:
        """The output of a stage for a micro-batch, as far as it is here; not every flight keeps its own."""
        after = self.stages.get(s + 1)
        if after is not None and i in after.flights:
            return after.flights[i].leaves
        found = None if self.joined is None else self.joined.output(s, i)
        return () if found is None else found if type(found) is tuple else (found,)

    @staticmethod
    def _not_finite(stage: Stage, i: int, found: str) -> StageError:
        return StageError(f"{stage.label}, micro-batch {i}: {found}; {_CURE}", "forward", stage.index, i)


_CURE = "lower the learning rate, set clip_norm=, or train on with debug=pipeback.Debug(check_finite=False)"
