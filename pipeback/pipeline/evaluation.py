"""Evaluation: the model's outputs and weights, without training it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeback.distributed.rank_runner import RankRunner
from pipeback.pipeline.engine import Engine
from pipeback.stages.evaluation import evaluate
from pipeback.stages.flight import Value, cut
from pipeback.stages.stage import Stage


class Evaluation:
    """Evaluates the model of an engine. aliases: all names of each weight and buffer."""

    def __init__(self, engine: Engine, aliases: dict[str, list[str]]) -> None:
        self._engine, self._aliases = engine, aliases

    def evaluate(self, x: Value) -> Any:
        """As `Pipeline.evaluate`."""
        engine = self._engine
        with engine.lock, torch.no_grad():
            engine.wait()
            try:
                x = engine.entrance.enter(x, engine.wait, training=False)
                if isinstance(engine.runtime, RankRunner):
                    found = engine.do(partial(engine.runtime.relay, x, self._through_each, back=True))
                else:
                    found = self._through_each(engine.stages, x)
                return engine.entrance.leave(found, x, training=False)
            finally:
                engine.entrance.evaluated()

    def run(self, x: Value) -> Any:
        """As `Pipeline.run`."""
        engine = self._engine
        if engine.ranks.several:
            raise RuntimeError("run is for one process; over several, evaluate asks all ranks")
        with engine.lock, torch.no_grad():
            engine.wait()
            value = x = engine.entrance.enter(x, engine.wait)
            for stage in engine.stages:
                with engine.holding.present(stage):
                    value = stage.module(stage.enter(value)[1])
            return engine.entrance.leave(cut(value), x)

    def _through_each(self, stages: Sequence[Stage], value: Value) -> Value:
        for stage in stages:
            with self._engine.holding.present(stage):
                value = evaluate([stage], value)
        return value

    @contextmanager
    def present(self, stage: int) -> Iterator[None]:
        """As `Pipeline.present`."""
        engine = self._engine
        with engine.lock, torch.no_grad():
            engine.wait()
            with engine.holding.present(engine.stages[stage]):
                yield

    @contextmanager
    def shown(self, changes: bool) -> Iterator[None]:
        """As `Pipeline.shown`."""
        engine = self._engine
        with engine.lock:
            if engine.error is None:
                engine.wait()
            for loop in engine.loops if engine.error is not None else ():
                try:
                    loop.worker.residence.rest()
                except BaseException as error:  # whatever it is, the error before it is the one to be told
                    if not isinstance(error, Exception) and error is not engine.error:
                        raise
            with engine.holding.shown(changes=changes):
                yield

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
            if not stage.replica:
                found = holding.values(stage).items()
                yield stage.index, {name: v for key, v in found for name in self._aliases[stage.names[key]]}

    def expanded(self, weight: Tensor, value: Tensor) -> Tensor:
        """As `Pipeline.expanded`."""
        for stage in self._engine.holding.mine:
            for n, w in enumerate(stage.weights):
                if w is weight and stage.home.sparse is not None:
                    return stage.home.sparse.expanded(stage, n, value)
        return value
