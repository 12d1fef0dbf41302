"""Renewed options: those of the optimizers that were set between the forward of micro-batches and their updates."""

from __future__ import annotations

from pipeback.runtime.loop import Loop
from pipeback.stages.joint_optimizer import Options


def renew(first: int, now: Options, loop: Loop) -> None:
    """Have the micro-batches from `first` on updated under these options; what was done stays as it is."""
    worker = loop.worker
    joined = worker.executor.joined
    flying = [] if joined is None else list(joined.flying)
    worker.options.update(dict.fromkeys([mb for mb in worker.options if mb >= first], now))
    for mb, each in [pair for run in flying for pair in run.items()]:
        if mb >= first:
            each.flight.options = now
    for stage in worker.stages.values():
        waiting = stage.gradients.split.waiting
        for mb, flight in stage.flights.items():
            if mb >= first:
                flight.options = now
        for mb in [mb for mb in waiting if mb >= first]:
            waiting[mb] = waiting[mb]._replace(options=now)
        left = [*worker.options, *stage.flights, *waiting, *(mb for run in flying for mb in run)]
        if min(left, default=loop.order.arrived) > first:  # the last that went backward is one of these
            stage.went_backward(now)
