"""The part of a fit that is special to a single device; `ranks.shared_fit` has that of several devices."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn

from pipeback.lightning.find_stages import TrainedModule
from pipeback.lightning.fit import Fit
from pipeback.lightning.fit_state import FitState, without
from pipeback.pipeline.pipeline import Pipeline
from pipeback.runtime.runners import Judge
from pipeback.splitting.split import Split
from pipeback.stages.module_settings import Mirror
from pipeback.streaming.disk_store import DiskStore
from pipeback.streaming.store import DeviceStore, Store
from pipeback.tensors import meta


class OneDevice:
    """A device that holds all stages and computes the loss."""

    failed = several = False

    def __init__(self, found: TrainedModule, threads: int | None) -> None:
        self.found, self._threads = found, threads
        self._absent = meta.absent(found.module)  # whether the model had no values when fit began
        self._params: list[nn.Parameter] = []  # of the module, once it is trained
        self._versions: list[int] = []  # their counters of writes after the last step
        self._mirror: Mirror | None = None  # where stages have modules of their own

    # -- F, B and U ----------------------------------------------------------------------------------------------

    def elsewhere(self, store: Store | None) -> str | None:
        stored = not isinstance(store, DeviceStore | None)
        return "with a store, .grad is None for weights of stages that are not on the device" if stored else None

    def split(self, example: Any) -> Split:
        return self.found.split or self.found.cut(self._model(), example)

    def _model(self) -> nn.Module:
        """The module to cut. `training_step` that makes several calls runs frozen modules between them, too: where a
        store takes the weights of stages, these have others.
        """
        module, step = self.found.module, self.found.step
        frozen = [p for p in module.parameters() if not p.requires_grad]
        if step is None or not step.far or step.single is not None or not frozen:
            return module
        known: dict[int, Any] = {id(t): t for t in (*module.parameters(), *module.buffers())}
        known |= {id(p): nn.Parameter(p.data, requires_grad=False) for p in frozen}
        copied = step.apart({**known, id(step.module.trainer): step.module.trainer})
        self._mirror = Mirror([list(each.modules())[1:] for each in (module, copied)])
        return copied

    def trained(self, split: Split) -> list[list[nn.Parameter]]:
        return trained(split)

    def piece(self, p: nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
        return state

    def pipeline(self, split: Split, **options: Any) -> Pipeline:
        self._note()
        return Pipeline(split, loss=None, workers=self._threads, **options)

    def training_step(self) -> AbstractContextManager[None]:
        return nullcontext()

    def judging(self) -> AbstractContextManager[None]:
        return nullcontext()

    def enter(self, fit: Fit, xs: list[Any], expected: int, judge: Judge | None = None) -> list[Any]:
        assert fit.pipe is not None
        if self._mirror is not None and self._mirror.changed():
            with fit.quiet():
                self._mirror.follow()
        return fit.pipe.forward_many(xs, expected=expected, judge=judge)

    def forget(self, pipe: Pipeline) -> None:
        pipe.forget()

    def clips(self, norm: float | None, value: float | None) -> bool:
        return True

    def stepped(self, fit: Fit) -> None:
        if fit.pipe is not None:
            self._note()
            if fit.vectorize or fit.store is not None:
                fit.twins.collect()

    def _note(self) -> None:
        """Note the weights as they are: whoever writes them before the next step is not the pipeline."""
        self._params = self._params or list(self.found.module.parameters())
        self._versions = [p._version for p in self._params]

    # -- the state -----------------------------------------------------------------------------------------------

    def validation(self, state: FitState) -> AbstractContextManager[None]:
        visits = state.fit.visits
        return nullcontext() if visits is None else visits.open(state.shown())

    @contextmanager
    def whole(self, state: FitState) -> Iterator[None]:
        with state.fit.quiet(), state.shown():
            yield

    def optimizer_state(self, state: FitState) -> dict[str, Any]:
        fit = state.fit
        with state.shown():
            if state.sparse:
                assert fit.pipe is not None
                return fit.twins.dense_state_dict(fit.pipe.expanded)
            fit.twins.collect()  # the state of stages that run as one lies elsewhere since then
            found = fit.twins.state_dict()
            return copy.deepcopy(found) if isinstance(fit.store, DiskStore) else found

    def in_flight(self, state: FitState) -> dict[str, Any]:
        fit = state.fit
        assert fit.pipe is not None
        with fit.at_work():
            found = fit.pipe.state_dict()
        return {**found, "stages": [without(state.left_out, tensors) for tensors in found["stages"]]}

    def fresh(self, pipe: Pipeline) -> dict[str, Any]:
        return pipe.state_dict()

    def taken_up(self, fit: Fit, section: dict[str, Any]) -> None:
        self._note()

    # -- the end -------------------------------------------------------------------------------------------------

    def end(self, state: FitState) -> None:
        """Drain the pipeline, unless someone else has written the weights since the last step."""
        fit = state.fit
        if fit.pipe is None:
            return
        if not fit.averaged and self._versions == [p._version for p in self.found.module.parameters()]:
            fit.drain()
            return
        fit.averaged = True
        if any(fit.pipe.in_flight):
            warnings.warn(
                "a callback has put other weights into the model since the last step, as weight averaging does; what "
                "was still in flight was computed on those before and is not applied",
                stacklevel=3,
            )

    def leave(self, state: FitState) -> None:
        """Bring what lives in a store back into the module, in host memory.

        A module that came from the meta device goes back there if its weights are in files: memory may be too small.
        """
        fit = state.fit
        if fit.pipe is None or fit.store is None or state.left:
            return
        fit.leave_off()
        on_disk = isinstance(fit.store, DiskStore)
        if on_disk and self._absent:
            state.left = not state.lost
            fit.pipe.close()
            fit.optimizer.state.clear()
            meta.let_go(self.found.module)
            return
        if on_disk and not state.lost and not fit.averaged:
            state.last = state.in_flight()
        try:
            with fit.pipe.shown():
                values = [(p, p.data.clone() if on_disk else p.data) for p in self.found.module.parameters()]
                if on_disk:
                    fit.twins.detach()
        except Exception as error:
            if not state.lost:
                raise
            warnings.warn(f"the weights in the store could not be read: {error}", stacklevel=3)
            values = []
        state.left = not state.lost
        for p, value in values:
            p.data = value
        if on_disk:
            fit.pipe.close()  # others may use its folder


def trained(split: Split) -> list[list[nn.Parameter]]:
    """The parameters that each stage trains."""
    return [[p for p in part.module.parameters() if p.requires_grad] for part in split.parts]
