"""Split executor: does I, the gradient of a stage's input, and W, that of its weights, one stage after the other."""

from __future__ import annotations

from pipeback.runtime.worker import Worker
from pipeback.schedules.order import Ops
from pipeback.stages import split_backward
from pipeback.stages.flight import weighed


class SplitExecutor:
    """Does I and W of the stages of `worker`, of each (stage, micro-batch)."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def of_input(self, ops: Ops) -> None:
        """Do I, and send what the stage before waits for."""
        worker, link = self.worker, self.worker.link
        for s, i in ops:
            stage, number = worker.stages[s], 1.0
            grad = None if stage.judges else link.recv("B", s, i)
            if worker.samples:
                number = worker.sizes.pop(i) if s == worker.first else worker.sizes[i]
                grad = weighed(stage.flights[i].output, number) if stage.last else grad
            try:
                upstream = split_backward.of_input(stage, i, grad, number)
            except Exception as error:
                raise worker.failure("backward", stage, i, error) from error
            if s:
                link.send("B", s - 1, i, upstream)

    def of_weights(self, ops: Ops) -> None:
        """Do W."""
        for s, i in ops:
            try:
                split_backward.of_weights(self.worker.stages[s], i)
            except Exception as error:
                raise self.worker.failure("backward", self.worker.stages[s], i, error) from error
