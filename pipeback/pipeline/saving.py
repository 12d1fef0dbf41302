"""Saving: saves and loads the whole state of a pipeline, splits it over processes, and commits it to a disk store."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from pipeback.checkpoint import commits, pipeline_state
from pipeback.checkpoint.collection import uncollected
from pipeback.counts import counted
from pipeback.errors import StoreError
from pipeback.pipeline.build import Built
from pipeback.pipeline.engine import Engine
from pipeback.pipeline.grad_modes import recording
from pipeback.runtime.gone_ahead import Ahead
from pipeback.runtime.loop import Messages
from pipeback.stages.joint_optimizer import Options, plain_groups
from pipeback.stages.stage import Stage
from pipeback.streaming.disk_store import DiskStore


class Saving:
    """Saves and loads the state of an engine. ahead: micro-batches between a call of forward and that of backward."""

    def __init__(self, engine: Engine, ahead: Ahead, built: Built) -> None:
        self._engine, self._ahead = engine, ahead
        self._weights, self._replicas = built.options.micro_batches.weights, built.replicas
        self._commits = commits.Commits(engine.method, engine.holding.store)

    # -- the state -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Do what `Pipeline.state_dict` does."""
        with self._engine.lock:
            return pipeline_state.merge(self._engine.ranks.gather(self.share(None), "state_dict()"), self.plain())

    def kept(self) -> dict[str, Any]:
        """The state for `put_back`: over processes, the part of this one, of micro-batches that have arrived here."""
        engine = self._engine
        if not engine.ranks.several:
            return self.state_dict()
        mine = pipeline_state.share(engine.holding.mine, engine.loops, engine.holding.saving, alone=True)
        return pipeline_state.of_one(mine, self.plain(), len(engine.stages))

    def share(self, take: Callable[[Stage, dict[str, Tensor]], None] | None) -> pipeline_state.Share:
        """Do what `Pipeline.share` does."""
        engine = self._engine
        with engine.lock, recording():
            if self._ahead.count:
                raise RuntimeError("a micro-batch has gone forward; call backward or forget before taking the state")
            engine.wait()
            with uncollected():
                return pipeline_state.share(engine.holding.mine, engine.loops, engine.holding.saving, take)

    def plain(self) -> dict[str, Any]:
        """Do what `Pipeline.plain` does."""
        engine, current = self._engine, self._engine.current
        if not current.current(engine.optimizers):
            current = Options(engine.optimizers, engine.arrived)
        return {
            "method": type(engine.method).__name__,
            "method_options": engine.method.options(),
            "optimizer": [type(opt).__name__ for opt in engine.optimizers],
            "arrived": engine.arrived,
            **engine.progress.plain(),
            "weights": self._weights,
            "sparsity": repr(engine.holding.sparsity),
            "replicas": self._replicas,
            "seconds": engine.holding.seconds,
            **({"workers": engine.holding.workers} if engine.setting.skewed else {}),  # which made the stacks
            "groups": {str(current.since): [plain_groups(g) for g in current.groups]},
            "current": current.since,
            **({} if engine.traced is None else {"forms": engine.traced.forms()}),
        }

    def load(self, state_dict: dict[str, Any]) -> None:
        """Do what `Pipeline.load_state_dict` does. A version in the store's folder is replaced at once."""
        engine = self._engine
        with engine.lock:
            self._load(state_dict)
            if self._commits.stale:
                self._commits.overdue()
                if self._can_commit:
                    self.commit()

    def _load(self, state_dict: dict[str, Any]) -> None:
        engine = self._engine
        with engine.lock, recording():
            engine.release.check()
            engine.holding.showing.check("load_state_dict")
            plain = pipeline_state.fits(
                state_dict, engine.stages, engine.method, engine.optimizers,
                weights=self._weights, replicas=self._replicas, sparsity=repr(engine.holding.sparsity),
                size=engine.size,
            )  # fmt: skip
            engine.check(plain)
            engine.reopen()
            with uncollected():
                engine.do(partial(self._take_up, state_dict, plain))
            engine.remember()

    def put_back(self, state_dict: dict[str, Any]) -> None:
        """Put back a state in which this pipeline was; the options of its optimizers stay as the user has set them."""
        self._take_up(state_dict, state_dict["plain"], options_too=False)
        self._engine.remember()

    def would_hold(self, plain: dict[str, Any]) -> list[int] | None:
        """Do what `Pipeline.would_hold` does."""
        return self._engine.holding.would_hold(plain["seconds"]) if plain["loops"] else None

    def _take_up(self, saved: dict[str, Any], plain: dict[str, Any], *, options_too: bool = True) -> None:
        engine, holding = self._engine, self._engine.holding
        if options_too:
            pipeline_state.put_options(plain, engine.optimizers)
        options = pipeline_state.options_of(plain, engine.optimizers)
        engine.take_up(plain, options[plain["current"]])
        messages: dict[int, Messages] = {}
        with recording():
            for stage in holding.mine:
                opened = partial(holding.opened, changes=True)
                loaded = pipeline_state.load(stage, saved, options, opened, holding.present_as_one)
                messages.setdefault(stage.replica, {}).update(loaded)
        if engine.traced is not None:
            engine.traced.ownership.copies.follow()
        loops = plain["loops"]
        self._commits.restart(loops[0]["order"]["start"] if loops and not loops[0]["fresh"] else engine.arrived)
        for loop in engine.start() if loops else ():
            loop.resume(loops[loop.replica], messages.get(loop.replica, {}), options)
        places = [place for place in loops[:1] if not place["fresh"]]
        begun = sum(engine.arrived - place["order"]["start"] for place in places)
        self._ahead.take_up(begun, sum(place.get("pushed", 1) for place in places))

    # -- commits of a disk store ---------------------------------------------------------------------------------

    def commit(self) -> None:
        """Do what `Pipeline.commit` does."""
        engine = self._engine
        with engine.lock, recording():
            store, ranks, holding = engine.holding.store, engine.ranks, engine.holding
            if not isinstance(store, DiskStore):
                raise RuntimeError(
                    'commit: weights are not on disk; use store="disk:FOLDER", or pipeback.checkpoint.save'
                )
            if not self._can_commit:
                raise RuntimeError("commit: no rank has its stages before the first push; call it afterwards")
            holding.showing.check("commit")
            engine.wait()
            saving = partial(holding.saving, opened=False)
            engine.do(partial(commits.commit, store, ranks, holding.mine, engine.loops, self.plain(), saving))
            self._commits.made(engine.arrived)

    @property
    def _can_commit(self) -> bool:
        """Whether this rank has its stages; before the first push no rank has."""
        return self._engine.runtime is not None or not self._engine.ranks.several

    def commit_if_due(self) -> None:
        """Commit if a version of the store is due."""
        if self._commits.due(self._engine.arrived):
            self.commit()

    def drained(self) -> None:
        """Note that the pipeline is empty, so that the next push fills it anew."""
        self._commits.restart(self._engine.arrived)
        self._ahead.restart()
        if self._commits.due(self._engine.arrived, drained=True):
            self.commit()

    def resume(self) -> None:
        """Resume from the version in the store's folder, if it holds one."""
        engine, store = self._engine, self._engine.holding.store
        if not isinstance(store, DiskStore) or store.versions.newest is None:
            return
        mine = self.would_hold(store.versions.newest["state"]["plain"])
        saved = commits.found(store, engine.ranks, mine, len(engine.stages))
        try:
            self._load(saved or {})
        except ValueError as error:
            raise StoreError(f"{store.folder}: {error}; or give the store another folder") from error
        after = f"{counted(engine.arrived, 'micro-batch')} in {counted(engine.progress.pushes, 'push')}"
        warnings.warn(
            f"store: {store.folder} holds a version of an earlier training, and this one goes on, after {after}; "
            "give the store another folder to begin anew",
            stacklevel=4,
        )
        self._commits.made(engine.arrived)
