"""What outlives a fit: checkpoints, which a fit may go on from, and the weights at its end."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeback.lightning import lightning_internals, random_state
from pipeback.lightning.fit import Fit
from pipeback.streaming.disk_store import DiskStore
from pipeback.tensors import meta

KEY = "pipeback"  # of a checkpoint
KEPT = ("weight/", "buffer/", "optimizer/")  # what a checkpoint holds anyway: the model's state and the optimizer's


class Lasting(Fit):
    """A fit that is saved in checkpoints, taken up from one, and leaves its weights in the module."""

    def __init__(self, *given: Any) -> None:
        self.left = False  # the pipeline has ended, and its weights are in the module again
        self._end: dict[str, Any] | None = None  # the state of the pipeline at the end of the fit
        self._kept: dict[str, Any] | None = None  # a section, for a pipeline that comes with the first call
        self._loaded = False  # from a checkpoint, for such a pipeline
        _, found, *_ = given
        self._absent = meta.absent(found.module)  # at first: it may be larger than memory
        super().__init__(*given)

    def _begin(self, example: Any) -> None:
        section, self._kept = self._kept, None
        if section is not None:
            batches, per_batch = section["update"]
            self._due = batches, per_batch
        super()._begin(example)
        if self._loaded:
            self._take_up(section)

    def _at_once(self, count: int, expected: int) -> bool:
        # a section that is to be taken up may stand within a flush: the first batch goes slice by slice
        return self._kept is None and super()._at_once(count, expected)

    def leave(self) -> None:
        """The end of `fit`; it may have failed. What lives in a store is in the module again, in host memory.

        A module that came from the meta device goes back there where its weights are in files: memory may be too small.
        """
        if self.pipe is None or self.store is None or self.left:
            return
        on_disk = isinstance(self.store, DiskStore)
        if on_disk and self._absent:
            self.left = not self.lost
            self.pipe.close()
            self.optimizer.state.clear()
            meta.let_go(self.found.module)
            return
        if on_disk and not self.lost and not self.averaged:
            self._end = self._in_flight()
        try:
            with self.pipe.shown():
                values = [(p, p.data.clone() if on_disk else p.data) for p in self.found.module.parameters()]
                if on_disk:
                    self.twins.detach()
        except Exception as error:
            if not self.lost:
                raise
            warnings.warn(f"the weights in the store could not be read: {error}", stacklevel=2)
            values = []
        self.left = not self.lost
        for p, value in values:
            p.data = value
        if on_disk:
            self.pipe.close()  # others may use its folder

    @property
    def lost(self) -> bool:
        """Whether a stage has failed, and with it what was in flight."""
        return not self.left and self.pipe is not None and self.pipe.closed

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Meanwhile the module has all its weights, on rank 0, which writes checkpoints; and nothing moves."""
        with self.quiet(), self.shown():
            yield

    @contextmanager
    def shown(self, *, changes: bool = False) -> Iterator[None]:
        """Meanwhile what lives in a store is in memory, and can be read, or written with `changes`."""
        if self.store is None or self.pipe is None or self.left:
            yield
            return
        with self._at_work(), self.pipe.shown(changes=changes):
            yield

    def kept(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Weights that were read while they were shown, as they may be handed on."""
        if self.store is None or self.pipe is None or self.left:
            return values
        # a file of tensors that share memory needs them to be of one type
        if isinstance(self.store, DiskStore) or len({p.dtype for p in self.found.module.parameters()}) > 1:
            return {name: value.clone() if isinstance(value, Tensor) else value for name, value in values.items()}
        return values

    def optimizer_state(self) -> dict[str, Any]:
        """As if the user's optimizer had made the steps; on rank 0."""
        with self.shown():
            if self.sparse:
                assert self.pipe is not None
                return self.twins.dense_state_dict(self.pipe.expanded)
            found = self.twins.state_dict()
            return copy.deepcopy(found) if isinstance(self.store, DiskStore) else found

    def section(self) -> dict[str, Any]:
        """What a checkpoint lacks: micro-batches in flight, the method's state, random state; on rank 0."""
        now = {"mid_epoch": lightning_internals.mid_epoch(self.module.trainer), "random": random_state.save()}
        if self._kept is not None:
            return {**self._kept, **now}
        with self.quiet():
            state = self._in_flight()
        return {"update": list(self.update), **now, "state": state}

    def put_into(self, checkpoint: dict[str, Any], where: str | Path) -> None:
        """A checkpoint that holds the optimizer's state gets what it lacks."""
        if "optimizer_states" not in checkpoint or not self.sections or self.averaged:
            return
        if self.lost:
            warnings.warn(
                f"{where}: a stage has failed, so what was in flight is lost; the checkpoint holds the rest",
                stacklevel=3,
            )
        else:
            checkpoint[KEY] = self.section()

    @property
    def sections(self) -> bool:
        """Whether there is something that a checkpoint lacks."""
        return self.pipe is not None or self._kept is not None

    def _in_flight(self) -> dict[str, Any]:
        """The state of the pipeline without what a checkpoint holds anyway."""
        assert self.pipe is not None
        if self._end is not None:
            return self._end
        with self._at_work():
            state = self.pipe.state_dict()
        return {**state, "stages": [without(self.left_out, tensors) for tensors in state["stages"]]}

    @property
    def left_out(self) -> tuple[str, ...]:
        """What a section leaves out, since the rest of a checkpoint has it: not sparse weights, which it has dense for
        others than us, nor masters, which it has rounded.
        """
        return () if self.sparse or self.more.get("masters") else KEPT

    @property
    def sparse(self) -> bool:
        """Whether only survivors of the weights are kept."""
        return self.more.get("sparsity") is not None

    def _fresh(self) -> dict[str, Any]:
        """The state of a pipeline that has just been built."""
        assert self.pipe is not None
        return self.pipe.state_dict()

    def load(self, section: dict[str, Any] | None) -> None:
        """Take up a section; weights, buffers and the optimizer's state have been loaded where they live.

        A module that is followed takes it up when it is called first.
        """
        if section is not None:
            random_state.load(section["random"])
        if self.pipe is None and self.found.followed:
            self._loaded, self._kept = True, section
            return
        if self.pipe is None:
            batches = self.module.trainer.accumulate_grad_batches
            self.build(*((batches, 1) if section is None else section["update"]))
        self._take_up(section)

    def _take_up(self, section: dict[str, Any] | None) -> None:
        assert self.pipe is not None
        with self.shown(changes=True):
            self.twins.give(stored=self.store is not None)
        if section is None:
            return
        here, there = self._fresh()["stages"], section["state"]["stages"]
        if len(here) == len(there) and self.left_out:  # if not, load_state_dict says so
            there = [
                {**{k: v for k, v in mine.items() if k.startswith(self.left_out)}, **theirs}
                for mine, theirs in zip(here, there, strict=True)
            ]
        with self._at_work():
            self.pipe.load_state_dict({**section["state"], "stages": there})
        self.twins.take()


def without(prefixes: tuple[str, ...], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those whose names begin otherwise."""
    return {k: v for k, v in tensors.items() if not k.startswith(prefixes)}
