"""Inspection: what a pipeline holds, costs and has done; measured while it runs, or predicted before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pipeback
from pipeback.counts import counted
from pipeback.notebook import Drawing, table
from pipeback.pipeline import memory_use
from pipeback.pipeline.breakdown import Breakdown, breakdown
from pipeback.pipeline.build import telling
from pipeback.pipeline.engine import Engine
from pipeback.pipeline.grad_modes import recording
from pipeback.pipeline.memory_use import Memory
from pipeback.plan.assumed_device import assumed
from pipeback.planner.hardware import Device
from pipeback.planner.hardware import device as find_device
from pipeback.planner.models import Model
from pipeback.runtime.ledger import Ledger, Record
from pipeback.runtime.staleness import Watch
from pipeback.schedules.recording import Recording
from pipeback.schedules.split import splits
from pipeback.stages.flight import Value
from pipeback.streaming.disk_store import DiskStore
from pipeback.streaming.streamed_weights import StreamedWeights
from pipeback.streaming.traffic import Traffic, together
from pipeback.tensor_parallel import ExpertLoad


class Inspection:
    """Inspects an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def ledger(self) -> Sequence[Record]:
        """As `Pipeline.ledger`."""
        engine = self._engine
        engine.wait()
        loops = [loop for loop in engine.loops if loop.replica == engine.ranks.replica]
        return loops[0].worker.ledger if len(loops) == 1 else Ledger.joined([loop.worker.ledger for loop in loops])

    def text(self) -> str:
        """The pipeline in one line. It waits for nothing: what is in flight is what the order has let in."""
        engine = self._engine
        state = f"{max(self.in_flight(), default=0)} in flight" if engine.error is None else "closed"
        delays = ", ".join(map(str, engine.delays[:4])) + (", …" if len(engine.delays) > 4 else "")
        what = f"{counted(len(engine.stages), 'stage')}, {engine.method!r}, delays {delays}"
        return f"Pipeline({what}; {engine.arrived} pushed, {state})"

    def html(self) -> str:
        """The pipeline as a table of its stages. It waits for nothing either."""
        engine = self._engine
        here, flights = {stage.index for stage in engine.holding.mine}, self.in_flight()
        rows = [
            (
                s,
                part.name,
                type(part.module).__name__,
                engine.delays[s],
                flights[s],
                "" if s in here else "another rank",
            )
            for s, part in enumerate(engine.split.parts)
        ]
        elsewhere = len(here) < len(rows)
        head = ["stage", "name", "module", "delay", "in flight", *(["where"] if elsewhere else [])]
        return table(self.text(), head, rows if elsewhere else [row[:-1] for row in rows])

    def in_flight(self) -> list[int]:
        """Micro-batches of which each stage has done F and not B, as this process's order counts them."""
        engine = self._engine
        if engine.error is not None or not engine.loops:
            return [0] * len(engine.stages)
        order = engine.loops[0].order
        return [f - b for f, b in zip(order.forwards, order.backwards, strict=True)]

    def draw(self, micro_batches: int | None) -> Drawing:
        """As `Pipeline.draw`."""
        from io import StringIO

        from pipeback.draw.figures import picture
        from pipeback.draw.pyplot import pyplot
        from pipeback.schedules.timeline import timeline

        engine = self._engine
        stages = len(engine.stages)
        count = 2 * stages + 4 if micro_batches is None else micro_batches
        slots = list(timeline(engine.method.schedule, stages, count))
        wide = min(10.0, max(6.0, 0.34 * float(max((slot.end for slot in slots), default=1)) + 1.2))
        figure = pyplot().Figure(figsize=(wide, 0.42 * stages + 1.3), layout="constrained")
        picture(slots, figure.subplots(), title=repr(engine.method))
        text = StringIO()
        figure.savefig(text, format="svg")
        return Drawing(text.getvalue())

    def unsplit(self) -> dict[str, str]:
        """As `Pipeline.unsplit`."""
        engine, found = self._engine, dict[str, str]()
        if not splits(engine.method.schedule):
            return found
        engine.wait()
        for worker in (loop.worker for loop in engine.loops):
            for stage in worker.stages.values():
                whole = stage.gradients.split.why if worker.split is not None else worker.whole
                found.update({stage.label: whole} if whole else {})
        return found

    def memory(self) -> Memory:
        """As `Pipeline.memory`."""
        self._engine.wait()
        return memory_use.counted(self._engine.holding.mine, self._engine.owner)

    def expert_load(self) -> dict[str, ExpertLoad]:
        """As `Pipeline.expert_load`."""
        self._engine.wait()
        spread = self._engine.holding.spread
        blocks = {} if spread is None else spread.blocks
        return {path: block.load for path, block in blocks.items() if not any(p.is_meta for p in block.parameters())}

    def traffic(self) -> Traffic:
        """As `Pipeline.traffic`."""
        self._engine.wait()
        streams, store = [loop.worker.residence for loop in self._engine.loops], self._engine.holding.store
        found = together(s.traffic for s in streams if isinstance(s, StreamedWeights))
        read, written = store.moved if isinstance(store, DiskStore) else (0, 0)
        return found._replace(read=read, written=written)

    def plan(self, x: Value, y: Any, pushes: int | None, expected: int, device: str | Device | None) -> pipeback.Plan:
        """As `Pipeline.plan`."""
        from pipeback.plan.survey import survey  # here, since the import of Pipeline need not wait for it
        from pipeback.plan.training_plan import plan

        engine = self._engine
        there = device if device is None or isinstance(device, Device) else find_device(device)
        if there is not None and x is None:
            raise ValueError(f'plan: give it a push, whose FLOP are counted: pipe.plan(x, y, device="{there.name}")')
        with engine.lock, recording():
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
            facts = survey(engine.holding, engine.setting, samples, timed=there is None)
            if there is not None:
                facts = assumed(facts, self._measured(x, y, samples), there)
            return plan(facts, count, pushes)

    def _measured(self, x: Value, y: Any, samples: int) -> Model:
        """The stages as a model of the planner."""
        first = next((w for stage in self._engine.stages for w in stage.module.parameters()), None)
        size = 4 if first is None else first.element_size()
        return Model.measured(self.breakdown(x, y, 0), samples, name="the model at hand", weight_bytes=size)

    def breakdown(self, x: Value, y: Any, repeats: int) -> Breakdown:
        """As `Pipeline.breakdown`."""
        if type(repeats) is not int or repeats < 0:
            raise ValueError(
                f"repeats={repeats!r}: write a whole number, such as repeats=15; 0 asks the rehearsal alone"
            )
        engine = self._engine
        with engine.lock, recording():
            engine.open()
            if engine.ranks.several:
                raise RuntimeError("breakdown: other ranks have stages of the model; ask for it in one process")
            batches = engine.batches(x, y)
            engine.rehearse(batches)
            engine.wait()
            holding = engine.holding
            return breakdown(engine.stages, holding.seconds, engine.delays, *batches[0][:2], holding.present, repeats)

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
        if engine.kept is not None:
            raise ValueError(
                "take_back: watch would see micro-batches twice that are trained again; build the pipeline without "
                "take_back"
            )
        engine.wait()
        return engine.observing.watch(engine.loops, len(engine.stages), on)
