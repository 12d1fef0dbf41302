"""Evaluation: the model's outputs and weights, without training it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeback.distributed.rank_runner import RankRunner
from pipeback.pipeline.engine import Engine
from pipeback.pipeline.grad_modes import unrecorded
from pipeback.pipeline.held_out import Judge, Means, is_loader, joined, pairs
from pipeback.pipeline.option_checks import at_least_one
from pipeback.pipeline.replica_sync import copy_shown
from pipeback.splitting.control_flow import as_written
from pipeback.stages.evaluation import evaluate
from pipeback.stages.flight import Value, cut
from pipeback.stages.own_memory import apart
from pipeback.stages.stage import Stage
from pipeback.tensors.copies import to_device


class Evaluation:
    """Evaluates the model of an engine. aliases: all names of each weight and buffer. changing: is called before the
    user writes into what is shown.
    """

    def __init__(self, engine: Engine, aliases: dict[str, list[str]], changing: Callable[[], None]) -> None:
        self._engine, self._aliases, self._changing = engine, aliases, changing

    def evaluate(
        self, x: Any, y: Any = None, batch_size: int | None = None, metrics: Mapping[str, Judge] | None = None
    ) -> Any:
        """As `Pipeline.evaluate`."""
        at_least_one("batch_size", batch_size)
        loads = is_loader(x)
        if loads and y is not None:
            raise TypeError("evaluate got a y beside batches (x, y), which have their own; leave y out")
        if not loads and y is None and metrics is None:
            found: list[tuple[Any, int]] = []
            self._each(x, None, batch_size, lambda output, _, n: found.append((output, n)))
            return found[0][0] if len(found) == 1 else joined(*zip(*found, strict=True))
        means = Means(self._engine.stages[-1].loss, metrics)
        for some_x, some_y in pairs(x) if loads else ((x, y),):
            self._each(some_x, some_y, batch_size, means.add, count=True)
        return means.found()

    def _each(
        self, x: Any, y: Any, size: int | None, take: Callable[[Any, Any, int], object], count: bool = False
    ) -> None:
        """Give `take` the output, y and number of samples of each `size` samples; count: also if size is None."""
        engine = self._engine
        through = engine.casting.around(self._through_each)
        with engine.lock, unrecorded():
            engine.wait()
            try:
                if size is None and not count:
                    batches = [(engine.entrance.enter(x, engine.wait, training=False), y, 0)]
                else:
                    batches = engine.entrance.held_out(x, y, size, engine.wait)
                for x, y, samples in batches:
                    if isinstance(engine.runtime, RankRunner):
                        found = engine.do(partial(engine.runtime.relay, x, through, back=True, y=y))
                    else:
                        found = through(engine.stages, x)
                    output = engine.entrance.leave(found, x, training=False)
                    take(output, to_device(engine.stages[-1].device, y), samples)
                engine.ranks.meet("evaluate()")
            finally:
                engine.entrance.evaluated()

    def run(self, x: Value) -> Any:
        """As `Pipeline.run`."""
        engine = self._engine
        if engine.ranks.several:
            raise RuntimeError("run is for one process; over several, evaluate asks all ranks")
        with engine.lock, unrecorded():
            engine.wait()
            value = x = engine.entrance.enter(x, engine.wait)
            for stage in engine.stages:
                with engine.holding.present(stage), as_written():
                    value = apart(stage.module, (), stage.module(stage.enter(value)[1]))
            return engine.entrance.leave(cut(value), x)

    def _through_each(self, stages: Sequence[Stage], value: Value) -> Value:
        for stage in stages:
            with self._engine.holding.present(stage), self._engine.holding.together():
                value = evaluate([stage], value)
        return value

    @contextmanager
    def present(self, stage: int) -> Iterator[None]:
        """As `Pipeline.present`."""
        engine = self._engine
        with engine.lock, torch.no_grad():
            engine.wait()
            held = engine.stages[stage]
            lasting = held.here and held.home.slot is None  # the weights are there anyway
            showing = engine.holding.showing.by(None if lasting else f"present({stage})")
            with showing, engine.holding.present(held):
                yield

    @contextmanager
    def shown(self, changes: bool) -> Iterator[None]:
        """As `Pipeline.shown`."""
        engine = self._engine
        with engine.lock:
            engine.release.check()
            if engine.error is None:
                engine.wait()
            for loop in engine.loops if engine.error is not None else ():
                try:
                    loop.worker.residence.rest()
                except BaseException as error:  # whatever it is, the error before it is the one to be told
                    if not isinstance(error, Exception) and error is not engine.error:
                        raise
            if changes:
                self._changing()
            how = f"shown({'changes=True' if changes else ''})"
            showing = engine.holding.showing.by(None if engine.holding.store is None else how)
            try:
                with showing, engine.holding.shown(changes=changes):
                    try:
                        yield
                    finally:
                        if changes:
                            copy_shown(zip(*engine.holding.everywhere, strict=True))
            finally:
                for loop in engine.loops if changes else ():
                    loop.worker.outside[0].written()

    def whole(self) -> nn.Module:
        """As `Pipeline.model`."""
        engine = self._engine
        engine.wait()
        slots = [stage.home.slot for stage in engine.stages]
        if not engine.ranks.several and all(slot is None or slot.shows for slot in slots):
            return engine.model
        if engine.runtime is None and engine.ranks.several:
            return engine.model
        return engine.holding.whole(engine.model)

    def values(self) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """As `Pipeline.values`."""
        self._engine.wait()
        holding = self._engine.holding
        for stage in holding.mine:
            if not stage.replica or stage.home.share is not None:  # which all replicas gather
                found = holding.values(stage).items()
                if not stage.replica:
                    yield stage.index, {name: v for key, v in found for name in self._aliases[stage.names[key]]}

    def expanded(self, weight: Tensor, value: Tensor) -> Tensor:
        """As `Pipeline.expanded`."""
        for stage in self._engine.holding.mine:
            for n, w in enumerate(stage.weights):
                if w is weight and stage.home.sparse is not None:
                    return stage.home.sparse.expanded(stage, n, value)
        return value
