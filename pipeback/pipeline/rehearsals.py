"""Rehearsals: which micro-batches are rehearsed before they are let in, by the stages of every replica and rank.

An error in a forward is found here, before anything was trained on the micro-batch, so the pipeline goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from pipeback.distributed.held_stages import HeldStages
from pipeback.pipeline.slices import unlike
from pipeback.runtime.loop import Batch
from pipeback.runtime.runners import Runner
from pipeback.stages import split_backward
from pipeback.stages.flight import Value, keep_settings
from pipeback.stages.module_settings import Mirror, Settings
from pipeback.stages.rehearsal import rehearse, rehearse_form, rehearse_shape
from pipeback.stages.stage import Stage
from pipeback.stages.trained_weights import Trained, note_frozen
from pipeback.tensors import accelerators

Form = tuple[Any, ...]
Relay = Callable[[Value, Callable[[Sequence[Stage], Value], Value]], object]  # over processes: each rank does its part


class Rehearsals:
    """What is rehearsed, and when:

    everything            before the first micro-batch, and after modules were set to train or to evaluate
    outputs of stages     for a micro-batch that is smaller than all before, or of another kind: types, and all sizes
                          except the number of samples
    what graphs save      for a micro-batch of another form than all before: shapes, types, autocast

    If numbers in modules have changed (a dropout probability), a stage may draw random numbers from then on, and the
    graphs of stages that run as one are traced anew. If weights were frozen, such stages run one by one meanwhile.

    delays: of every stage. weights: the names of those that the model trains, by identity. warn: layers that save
    functions of their weights give a warning and not an error.
    """

    def __init__(self, holding: HeldStages, delays: Sequence[int], weights: Mapping[int, str], warn: bool) -> None:
        self._holding, self._delays, self._weights, self._warn = holding, delays, weights, warn
        self._smallest: int | None = None  # samples of the smallest micro-batch so far
        self._kinds: set[Any] = set()
        self._forms: set[Form] = set()  # of the micro-batches so far
        self._modes = Settings([], "modes")  # of all modules
        self._settings: list[tuple[Stage, Settings]] = []  # of each stage
        self._joined = Settings.joined(())  # the same, for one pass before every push
        self._trained = Trained(())  # which weights need a gradient, as the last push found them
        every = [[m for stage in stages for m in stage.module.modules()] for stages in holding.everywhere]
        self._mirror = Mirror(every) if len(every) > 1 else None  # the user sets those of the first replica

    @property
    def _anew(self) -> bool:
        return self._smallest is None or self._modes.changed()

    @property
    def _set_anew(self) -> bool:
        if self._mirror is not None and self._mirror.changed():
            return True
        return self._joined.changed()

    @property
    def set_otherwise(self) -> bool:
        """Whether modules have other modes or numbers than at the last look."""
        return self._modes.changed() or self._set_anew

    def due(self, batches: Sequence[Batch]) -> bool:
        """Whether one of these micro-batches has to be rehearsed."""
        if self._smallest is None or self._anew or self._set_anew or self._trained.changed():
            return True
        # with shards, replicas would have to gather weights for it all at once, whatever they push
        other = smallest(batches)[2] < self._smallest or _kind(batches[0]) not in self._kinds
        return (other or bool(self._new(batches))) and not self._holding.shards

    def run(self, batches: Sequence[Batch], relay: Relay | None = None) -> bool:
        """Rehearse what is due; the pipeline must be quiet. relay: None: all stages are in this process.

        Returns whether everything was rehearsed anew, or outputs for fewer samples.
        """
        if self._mirror is not None:
            self._mirror.follow()
        anew, fewer = self._anew, self._smallest is None or smallest(batches)[2] < self._smallest
        other = not anew and _kind(batches[0]) not in self._kinds
        if anew:
            self.whole(batches[0], relay)
        elif other:
            self._through(batches[0], self._shape, relay)
        stacks: dict[int, Any] = {}
        for stage, settings in self._settings:
            if settings.changed():
                if not anew and stage.random.state is None:  # else it is known whether it draws
                    stage.random.begin(stage.generator)
                if stage.stack is not None:
                    stacks[id(stage.stack)] = stage.stack
        if anew or self._trained.changed():  # since a state was loaded, weights may have been frozen unseen
            self._follow_frozen()
        for stack in stacks.values():
            stack.renew()  # once, however many of its stages are set otherwise
        if anew or self._set_anew:
            self.look()
        if ((anew or other) and smallest(batches)[2] < batches[0][2]) or (fewer and not anew and not other):
            self._through(smallest(batches), self._shape, relay)
        for form, batch in self._new(batches).items():
            if not anew or form != form_of(batches[0]):
                self._through(batch, self._form, relay)
        return anew or fewer

    def drain(self, runtime: Runner) -> None:
        """Drain the runtime. Weights that were frozen get no gradients from then on."""
        if self._trained.changed():
            runtime.wait()
            self._follow_frozen()
        runtime.drain()

    def as_pushed(self) -> AbstractContextManager[None]:
        """A context within which weights need a gradient as the last push found them."""
        return self._trained.as_they_were()

    def _follow_frozen(self) -> None:
        """Let stages whose weights were frozen run one by one, until these are trained again."""
        every = [stage for stages in self._holding.everywhere for stage in stages]
        with self.as_pushed():  # of a backward in two parts, the second is done as that of a whole one would have been
            for stage in every:
                split_backward.finish(stage)
        stacks: dict[int, Any] = {id(stage.stack): stage.stack for stage in every if stage.stack is not None}
        for stack in stacks.values():
            if stack.sums.note_frozen():
                stack.renew()
        self._look_at_weights(every)

    def _look_at_weights(self, every: Sequence[Stage]) -> None:
        note_frozen(self._holding.everywhere)
        self._trained = Trained(p for stage in every for p in stage.params)

    def look(self) -> None:
        """Note how the modules are set: their modes, and the numbers in them."""
        every = [stage for stages in self._holding.everywhere for stage in stages]
        self._modes = Settings((m for stage in every for m in stage.module.modules()), "modes")
        for stage in every:
            keep_settings(stage.flights.values(), stage.learnt.settings)
            stage.learn(settings=Settings.of(stage.module))
        as_one = any(stage.stack is not None for stage in every)  # then the last stage may be a graph, too
        self._settings = [
            (stage, Settings(stage.module.modules(), "all" if stage.stack or (as_one and stage.last) else "numbers"))
            for stage in every
        ]
        self._joined = Settings.joined(settings for _, settings in self._settings)
        self._look_at_weights(every)

    def _new(self, batches: Sequence[Batch]) -> dict[Form, Batch]:
        """One micro-batch of each new form, if B runs on other weights than F."""
        method = self._holding.method
        if method.copies == "stash" or not any(self._delays):
            return {}
        return {form: batch for batch in reversed(unlike(batches)) if (form := form_of(batch)) not in self._forms}

    def whole(self, batch: Batch, relay: Relay | None = None) -> None:
        """Rehearse one micro-batch in full, and time F and B of each stage."""
        self._holding.measured(self._through(batch, self._full, relay))

    def done(self, batches: Sequence[Batch]) -> None:
        """These micro-batches will be let in."""
        self._forms.update(self._new(batches))
        least = smallest(batches)[2]
        self._kinds.add(_kind(batches[0]))
        self._smallest = least if self._smallest is None else min(least, self._smallest)

    def forget(self) -> None:
        """Weights and buffers were replaced: rehearse everything anew."""
        self._smallest = None
        self._forms, self._kinds = set(), set()

    def _through(
        self, batch: Batch, rehearsal: Callable[..., tuple[list[float], Value]], relay: Relay | None
    ) -> list[float]:
        x, y, _ = batch
        if relay is not None:
            relay(x, lambda stages, value: rehearsal(stages, value, y)[1])
            return []
        seconds = [rehearsal(stages, x, y)[0] for stages in self._holding.everywhere]
        return seconds[0]

    def _full(self, stages: Sequence[Stage], x: Value, y: Any) -> tuple[list[float], Value]:
        holding = self._holding
        return rehearse(
            stages, holding.method, self._delays, x, y, warn=self._warn, weights=self._weights, present=holding.present
        )

    def _shape(self, stages: Sequence[Stage], x: Value, y: Any) -> tuple[list[float], Value]:
        value = x
        for stage in stages:
            with self._holding.present(stage):
                value = rehearse_shape([stage], value, y, alone=not self._holding.ranks.several)
        return [], value

    def _form(self, stages: Sequence[Stage], x: Value, y: Any) -> tuple[list[float], Value]:
        value = x
        for stage in stages:
            with self._holding.present(stage):
                value = rehearse_form(
                    [stage], self._holding.method, self._delays, value, y, warn=self._warn,
                    alone=not self._holding.ranks.several,
                )  # fmt: skip
        return [], value


def form_of(batch: Batch) -> Form:
    """The shapes and types of a micro-batch's inputs, and the autocast that it runs under."""
    parts = batch[0] if isinstance(batch[0], tuple) else (batch[0],)
    return tuple((part.shape, part.dtype) for part in parts), accelerators.casting()


def smallest(batches: Sequence[Batch]) -> Batch:
    """The first of the micro-batches with the fewest samples."""
    return min(unlike(batches), key=lambda batch: batch[2])


def _kind(batch: Batch) -> Any:
    """The properties that all micro-batches of a push share, because they are cut from one x."""
    x, y, length = batch

    def kind(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(kind, value))
        if not isinstance(value, torch.Tensor):
            return type(value)
        return value.dtype, value.shape[:1] == (length,) or value.shape[:1], value.shape[1:]

    return kind(x), kind(y)
