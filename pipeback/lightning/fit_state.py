"""The state of a fit: what a checkpoint holds of it, how a fit goes on from one, and the weights at its end."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from pipeback.lightning import lightning_internals, random_state, requeue_signal
from pipeback.lightning.fit import Fit, Later
from pipeback.lightning.user_optimizer import UserOptimizer
from pipeback.pipeline.pipeline import Pipeline
from pipeback.streaming.disk_store import DiskStore

KEY = "pipeback"  # the key of our section in a checkpoint
KEPT = ("weight/", "buffer/", "optimizer/")  # what a checkpoint holds anyway: the model's state and the optimizer's


class StateOfRank(Protocol):
    """The handling of state that differs between a device that trains alone and one of several."""

    failed: bool  # whether the pipeline cannot go on

    def stepped(self, fit: Fit) -> None:
        """Hear that the updates of a step have been made."""

    def validation(self, state: FitState) -> AbstractContextManager[None]:
        """A context within which `validation_step` can call the modules that `training_step` calls."""

    def whole(self, state: FitState) -> AbstractContextManager[None]:
        """A context within which the module has all weights on rank 0, which writes checkpoints, and no work runs."""

    def optimizer_state(self, state: FitState) -> dict[str, Any]:
        """The state that the user's optimizer would have, had it made the steps; on rank 0."""

    def in_flight(self, state: FitState) -> dict[str, Any]:
        """The state of the pipeline without what a checkpoint holds anyway; on rank 0."""

    def fresh(self, pipe: Pipeline) -> dict[str, Any]:
        """The state of a pipeline that has just been built."""

    def taken_up(self, fit: Fit, section: dict[str, Any]) -> None:
        """Hear that the pipeline has loaded this section of a checkpoint."""

    def end(self, state: FitState) -> None:
        """Hear that the last batch is done."""

    def leave(self, state: FitState) -> None:
        """Give the module its weights again at the end of `fit`, which may have failed."""


class FitState:
    """The state that outlives a fit: its checkpoints, and the weights that it leaves in the module."""

    def __init__(self, fit: Fit, rank: StateOfRank) -> None:
        self.fit, self.rank = fit, rank
        self.stepped = False  # an update has been made
        self.left = False  # the pipeline has ended, and its weights are in the module again
        self.last: dict[str, Any] | None = None  # the state of the pipeline at the end of the fit
        self._validation = ExitStack()  # while validation runs
        self._optimizer = UserOptimizer(fit.optimizer)
        requeue_signal.put_off(fit.module.trainer)

    @property
    def lost(self) -> bool:
        """Whether a stage has failed, so that the micro-batches in flight are lost."""
        pipe = self.fit.pipe
        return not self.left and (self.rank.failed or (pipe is not None and pipe.closed))

    @property
    def sparse(self) -> bool:
        """Whether the weights are sparse, and only those that are not masked are kept."""
        return self.fit.options.streaming.sparsity is not None

    @property
    def left_out(self) -> tuple[str, ...]:
        """The tensors that a section leaves out, since the rest of the checkpoint has them. It keeps sparse weights,
        which the rest has in dense form for other readers, and masters, which the rest has rounded.
        """
        return () if self.sparse or self.fit.options.masters else KEPT

    # -- during a fit --------------------------------------------------------------------------------------------

    def stepping(self) -> AbstractContextManager[None]:
        """A context in which a step of the user's optimizer runs U of every stage for which it is due."""
        return self._optimizer.stepping(self._step)

    def _step(self) -> None:
        self.stepped = True
        if self.fit.pipe is not None:
            self.fit.twins.check_groups(more=True)
        self.fit.step()
        self.rank.stepped(self.fit)

    def end(self) -> None:
        """Finish all micro-batches in flight, unless someone else has written the weights since the last step."""
        if self.fit.later is not None and _unfinished(self.fit.later.section):
            rank_zero_warn(
                f"the checkpoint has micro-batches in flight, but {self.fit.found.shown} is cut into stages by the "
                "first batch, and none was left to train on: their updates are not made; raise max_epochs or max_steps "
                "to go on with them"
            )
        self.rank.end(self)

    def leave(self) -> None:
        """Give the module its weights again; close the pipeline if others need its processes or files."""
        self.rank.leave(self)

    def begin_validation(self) -> None:
        """Wait until all work is done, drain if that was asked for, and let `validation_step` call the modules."""
        if self.fit.options.drain == "validation":
            self.fit.drain()
        else:
            with self.fit.quiet():
                pass
        self._validation.enter_context(self.rank.validation(self))

    def end_validation(self) -> None:
        self._validation.close()

    # -- reading -------------------------------------------------------------------------------------------------

    def whole(self) -> AbstractContextManager[None]:
        """Within this context the module has all weights on rank 0, which writes checkpoints, and no work runs."""
        if self.fit.called and lightning_internals.running_hook(self.fit.module) == "training_step":
            raise ValueError(
                f"a checkpoint is saved in training_step after the call of {self.fit.found.shown}, where the "
                "micro-batch has gone forward and not backward; save it in on_train_batch_end"
            )
        return self.rank.whole(self)

    @contextmanager
    def shown(self, *, changes: bool = False) -> Iterator[None]:
        """Within this context the weights in a store can be read in memory and, with `changes`, written."""
        fit = self.fit
        if fit.store is None or fit.pipe is None or self.left:
            yield
            return
        with fit.at_work(), fit.pipe.shown(changes=changes):
            yield

    def kept(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Weights that were read within `shown`, copied where they would not stay valid."""
        fit = self.fit
        if fit.store is None or fit.pipe is None or self.left:
            return values
        # a file of tensors that share memory needs them to be of one type
        if isinstance(fit.store, DiskStore) or len({p.dtype for p in fit.found.module.parameters()}) > 1:
            return {name: value.clone() if isinstance(value, Tensor) else value for name, value in values.items()}
        return values

    def optimizer_state(self) -> dict[str, Any]:
        """The state that the user's optimizer would have, had it made the steps; on rank 0."""
        return self.rank.optimizer_state(self)

    def section(self) -> dict[str, Any]:
        """What Lightning does not save: micro-batches in flight, the method's state, random state; on rank 0."""
        fit = self.fit
        trainer = fit.module.trainer
        now = {
            "mid_epoch": lightning_internals.mid_epoch(trainer),
            "validates": lightning_internals.validates_next(trainer),
            "random": random_state.save(),
        }
        if fit.later is not None and fit.later.section is not None:
            return {**fit.later.section, **now}
        with fit.quiet():
            state = self.in_flight()
        return {"update": list(fit.update), "samples": fit.size.samples, **now, "state": state}

    def in_flight(self) -> dict[str, Any]:
        """The state of the pipeline without what a checkpoint holds anyway."""
        return self.rank.in_flight(self) if self.last is None else self.last

    def put_into(self, checkpoint: dict[str, Any], where: str | Path) -> None:
        """Add our section to a checkpoint that holds the state of the optimizer."""
        fit = self.fit
        known = fit.pipe is not None or (fit.later is not None and fit.later.section is not None)
        if "optimizer_states" not in checkpoint or not known or fit.averaged:
            return
        if self.lost:
            warnings.warn(
                f"{where}: a stage has failed, so what was in flight is lost; the checkpoint holds the rest",
                stacklevel=3,
            )
        else:
            checkpoint[KEY] = self.section()

    # -- loading -------------------------------------------------------------------------------------------------

    def load(self, section: dict[str, Any] | None) -> None:
        """Load a section, after Lightning has loaded weights, buffers and the state of the optimizer.

        If the module is traced, the pipeline loads it when the first call of the module has built it.
        """
        fit = self.fit
        if self.stepped and fit.rank.several:
            raise ValueError(
                "a checkpoint is loaded amid a fit on several devices, as Tuner.lr_find and LearningRateFinder do to "
                "take their trials back, but each rank has some weights only; find the rate with Trainer(devices=1)"
            )
        if section is not None:
            random_state.load(section["random"])
            fit.size.samples = section.get("samples")  # earlier checkpoints have none
        if fit.pipe is None and fit.found.followed:
            fit.later = Later(section, partial(self._take_up, section))
            return
        if fit.pipe is None:
            batches = fit.module.trainer.accumulate_grad_batches
            fit.build(*((batches, 1) if section is None else section["update"]))
        self._take_up(section)

    def _take_up(self, section: dict[str, Any] | None) -> None:
        fit = self.fit
        assert fit.pipe is not None
        with self.shown(changes=True):
            fit.twins.give()
        if section is None:
            return
        here, there = self.rank.fresh(fit.pipe)["stages"], section["state"]["stages"]
        if len(here) == len(there) and self.left_out:  # if not, load_state_dict says so
            there = [
                {**{k: v for k, v in mine.items() if k.startswith(self.left_out)}, **theirs}
                for mine, theirs in zip(here, there, strict=True)
            ]
        with fit.at_work():
            fit.pipe.load_state_dict({**section["state"], "stages": there})
        fit.twins.take()
        if section.get("validates") and fit.options.drain == "validation":  # before one that Lightning leaves out now
            fit.drain()
        self.rank.taken_up(fit, section)


def _unfinished(section: dict[str, Any] | None) -> bool:
    """Whether a section has micro-batches with work that is not done."""
    stages = [] if section is None else section["state"]["plain"]["stages"]
    return any(stage["flights"] or stage["count"] for stage in stages)


def without(prefixes: tuple[str, ...], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with none of the prefixes."""
    return {k: v for k, v in tensors.items() if not k.startswith(prefixes)}
