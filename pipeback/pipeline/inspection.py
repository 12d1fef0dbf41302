"""Inspection: what a pipeline holds, costs and has done; measured while it runs, or predicted before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import pipeback
from pipeback.pipeline import memory_use
from pipeback.pipeline.breakdown import StageRow, breakdown
from pipeback.pipeline.build import telling
from pipeback.pipeline.engine import Engine
from pipeback.pipeline.memory_use import Memory
from pipeback.runtime.ledger import Record
from pipeback.runtime.staleness import Watch
from pipeback.schedules.recording import Recording
from pipeback.stages.flight import Value
from pipeback.streaming.disk_store import DiskStore
from pipeback.streaming.streamed_weights import StreamedWeights
from pipeback.streaming.traffic import Traffic, together


class Inspection:
    """Inspects an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def ledger(self) -> Sequence[Record]:
        """As `Pipeline.ledger`."""
        engine = self._engine
        engine.wait()
        loops = [loop for loop in engine.loops if loop.replica == engine.ranks.replica]
        return loops[0].worker.ledger if len(loops) == 1 else [r for loop in loops for r in loop.worker.ledger]

    def memory(self) -> Memory:
        """As `Pipeline.memory`."""
        self._engine.wait()
        return memory_use.counted(self._engine.holding.mine, self._engine.owner)

    def traffic(self) -> Traffic:
        """As `Pipeline.traffic`."""
        self._engine.wait()
        streams, store = [loop.worker.residence for loop in self._engine.loops], self._engine.holding.store
        found = together(s.traffic for s in streams if isinstance(s, StreamedWeights))
        read, written = store.moved if isinstance(store, DiskStore) else (0, 0)
        return found._replace(read=read, written=written)

    def plan(self, x: Value, y: Any, pushes: int | None, expected: int) -> pipeback.Plan:
        """As `Pipeline.plan`."""
        from pipeback.plan.survey import survey  # here, since the import of Pipeline need not wait for it
        from pipeback.plan.training_plan import plan

        engine = self._engine
        with engine.lock, torch.enable_grad():
            engine.open()
            if x is not None:
                with telling(engine.ranks):
                    batches = engine.batches(x, y)
                    engine.rehearse(batches)
                here = len(engine.holding.everywhere)
                engine.like(expected if engine.outside else len(batches) // here, batches[0][2])
            count, samples = engine.pushed
            if not count:
                raise ValueError("plan: nothing was pushed yet; give it a push: pipe.plan(x, y)")
            return plan(survey(engine.holding, engine.setting, samples), count, pushes)

    def breakdown(self, x: Value, y: Any) -> list[StageRow]:
        """As `Pipeline.breakdown`."""
        engine = self._engine
        with engine.lock, torch.enable_grad():
            engine.open()
            if engine.ranks.several:
                raise RuntimeError("breakdown: other ranks have stages of the model; ask for it in one process")
            batches = engine.batches(x, y)
            engine.rehearse(batches)
            engine.wait()
            holding = engine.holding
            return breakdown(engine.stages, holding.seconds, engine.delays, *batches[0][:2], holding.present)

    def record(self, on: bool) -> None:
        """As `Pipeline.record`."""
        engine = self._engine
        engine.wait()
        engine.observing.record(engine.loops, engine.ranks, on)

    def recorded(self) -> Recording:
        """As `Pipeline.recorded`."""
        engine = self._engine
        engine.wait()
        tracks = engine.observing.tracks(engine.loops, engine.ranks, engine.owner)
        return Recording(tracks, engine.owner, repr(engine.method))

    def watch(self, on: bool) -> Watch:
        """As `Pipeline.watch`."""
        engine = self._engine
        if not engine.ranks.several and engine.threads and not engine.outside:  # there F runs through all stages alone
            raise ValueError("workers, replicas: watch does not follow threads; use workers=None and no replicas")
        if engine.holding.shards:
            raise ValueError("store: watch measures whole weights, of which a rank's store has a slice; use store=None")
        engine.wait()
        return engine.observing.watch(engine.loops, len(engine.stages), on)
