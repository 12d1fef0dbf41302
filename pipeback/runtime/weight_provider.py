"""Weight provider: puts the weights into place on which forwards (F) and backwards (B) run.

Graphs refer to the storage of the live weights, so other weights are written there for the duration of an operation.
`ResidentWeights` is the provider for weights that stay on their device.

With masters=True, weights of a half type are rounded from float32 masters beside them:

    F, B   on round(w̃), w̃ = the method's weights from the masters w        U   w ← step(w, g),  then round(w)

F is the forward, B the backward and U the update. The weights that the method chooses are written to the masters'
memory; then the half weights, which graphs refer to, are rounded from it. Between operations they are the newest
masters, rounded to nearest, ties to even.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch

from pipeback.methods.base import Method, Past, Shift, overrides, sampled
from pipeback.runtime.chosen_weights import ChosenWeights, HookCall
from pipeback.schedules.ops import Kind
from pipeback.schedules.order import Ops, Wave
from pipeback.stages.gradients import GradientSums
from pipeback.stages.stage import Stage
from pipeback.stages.team import StageGroup
from pipeback.stages.trained_weights import unshifted
from pipeback.tensors import accelerators
from pipeback.tensors.weight_list import Weights, add_scaled, copy, copy_all, set_aside

Ask = Callable[[Kind, Ops], list[HookCall]]


class WeightProvider(Protocol):
    """The interface that a worker uses. held: the value of `forward` or `backward`, empty if there is no undo."""

    ask: Ask  # set by the worker
    chosen: ChosenWeights  # what it asks the method; its `failure` is set by the worker
    joins: bool  # whether one call of a hook or an optimizer may serve several stages
    alone: bool  # whether no other rank takes part in what it does

    @property
    def moves(self) -> list[tuple[float, float, str, int]]:
        """The recorded transfers: (start, end, "fetch" or "store", stage), in seconds."""

    def compare(self, given: int) -> None: ...
    def ahead(self, waves: Iterable[Wave]) -> Iterable[Wave]: ...
    def forward(self, ops: Ops) -> Sequence[Any]: ...
    def after_forward(self, held: Sequence[Any], ops: Ops) -> None: ...
    def backward(self, ops: Ops) -> tuple[Sequence[Any], dict[int, int]]: ...
    def after_backward(self, held: Sequence[Any]) -> None: ...
    def collect(self, stage: Stage) -> None: ...
    def update(self, stages: Sequence[Stage], make: Callable[[Sequence[GradientSums]], None]) -> None: ...
    def ready(self, kind: Kind, stage: int, mb: int) -> None: ...
    def record(self, on: bool) -> None: ...
    def newest(self, stage: Stage) -> AbstractContextManager[None]: ...
    def rest(self) -> None: ...
    def close(self) -> None: ...


class ResidentWeights:
    """Weights that stay on the device; shifted and older ones take their place for the duration of an operation."""

    joins = alone = True

    def __init__(self, stages: Mapping[int, Stage], method: Method) -> None:
        self.stages, self.chosen = stages, ChosenWeights(method)
        self.ask: Ask = lambda kind, ops: []
        self.moves: list[tuple[float, float, str, int]] = []
        self._rounds = any(stage.masters.weights for stage in stages.values())
        self._stash = method.copies == "stash"
        told = sampled(method)
        self._forward_hook = overrides(method, "forward_weights") and (
            told is None or len(told.ahead) > 0 or told.entry
        )
        self._backward_hook = overrides(method, "backward_weights") or self._stash
        # whether every B runs on what F used, so that the method need not be asked
        self._on_used = self._stash and told is not None and told.used and not told.back

    def compare(self, given: int) -> None:
        """Do nothing, since nothing is fetched together with other replicas."""

    def ahead(self, waves: Iterable[Wave]) -> Iterable[Wave]:
        return waves

    def forward(self, ops: Ops) -> list[Held]:
        """Put the weights into place on which these forwards run."""
        if not self._forward_hook:
            return []
        held: list[Held] = []
        try:
            with torch.no_grad():
                self._forward(self.ask("F", ops), held)
        except BaseException:
            self.after_backward(held)
            raise
        forget_casts()
        self._round(held)
        return held

    def _forward(self, calls: Iterable[HookCall], held: list[Held]) -> None:
        for call in calls:
            team, chosen = call.team, self.chosen.forward(call)
            if chosen is team.weights:
                continue
            if isinstance(chosen, Past):
                if chosen.version != team.first.version:
                    older = team.first.past(chosen.version)
                    held.append(_exchange([(team.first, older)], version=chosen.version))
            else:
                held.append(_place(team, chosen, stash=self._stash))

    def after_forward(self, held: Sequence[Held], ops: Ops) -> None:
        """Put the newest weights back; the flights keep the weights that they used."""
        mbs = dict(ops)
        with torch.no_grad():
            for h in held:
                h.undo()
        for h in held:
            if h.version is None and not self._stash:
                continue
            for stage in h.stages:
                flight = stage.flights.get(mbs[stage.index])
                if flight is None:  # its forward failed
                    continue
                if h.version is not None:
                    flight.version = h.version
                elif h.buffer is not None:
                    stage.versions.own(flight, h.buffer)
        forget_casts()
        self._round(held)

    def backward(self, ops: Ops) -> tuple[list[Held], dict[int, int]]:
        """Put the weights into place on which these backwards run; also return the older versions, by stage."""
        if not self._backward_hook:
            return [], {}
        held: list[Held] = []
        versions: dict[int, int] = {}
        if self._on_used:
            return self._used(ops)
        try:
            with torch.no_grad():
                self._backward(self.ask("B", ops), held, versions)
        except BaseException:
            self.after_backward(held)
            raise
        self._round(held)
        return held, versions

    def _backward(self, calls: Iterable[HookCall], held: list[Held], versions: dict[int, int]) -> None:
        for call in calls:
            team, mb, _ = call
            stage = team.first
            used = stage.used(mb) if self._stash else None  # one stage per team
            chosen = self.chosen.backward(call, used)
            if used is not None and chosen is used:
                versions[stage.index] = stage.flights[mb].version
                if used is not team.weights:
                    held.append(_exchange([(stage, used)]))
            elif isinstance(chosen, Past):
                versions[stage.index] = chosen.version
                if chosen.version != stage.version:
                    held.append(_exchange([(stage, stage.past(chosen.version))]))
            elif chosen is not team.weights:
                held.append(_place(team, chosen, stash=self._stash))

    def _used(self, ops: Ops) -> tuple[list[Held], dict[int, int]]:
        """Put the weights into place on which the forwards of these micro-batches ran."""
        some = [(self.stages[s], mb) for s, mb in ops if self.stages[s].weights]
        older = [(stage, used) for stage, mb in some if (used := stage.used(mb)) is not stage.weights]
        with torch.no_grad():
            held = [_exchange(older)] if older else []
        self._round(held)
        return held, {stage.index: stage.flights[mb].version for stage, mb in some}

    def after_backward(self, held: Sequence[Held]) -> None:
        """Put the newest weights back."""
        with torch.no_grad():
            for h in held:
                h.undo()
        self._round(held)

    def _round(self, held: Iterable[Held]) -> None:
        """Round the masters that other weights were just written to, or put back to."""
        if self._rounds:
            for h in held:
                for stage in h.stages:
                    stage.masters.round()

    def update(self, stages: Sequence[Stage], make: Callable[[Sequence[GradientSums]], None]) -> None:
        """Do the update of these stages at once."""
        make([stage.gradients.sums() for stage in stages])
        if self._rounds:
            for stage in stages:
                stage.masters.round()

    def ready(self, kind: Kind, stage: int, mb: int) -> None:
        """Do nothing, since the weights of an operation are always there."""

    def record(self, on: bool) -> None:
        """Do nothing, since there are no transfers to measure."""

    def newest(self, stage: Stage) -> AbstractContextManager[None]:
        """A context in which `stage.weights` are the newest and can be read, as they always can."""
        return nullcontext()

    def collect(self, stage: Stage) -> None:
        """Do nothing, since the gradient sums stay where backward left them."""

    def rest(self) -> None:
        """Do nothing, since no transfer is ever running."""

    def close(self) -> None:
        """Do nothing, since there is nothing to free."""


class Held:
    """The live weights hold other values for now. undo: puts the newest back. buffer: holds the newest, or after `undo`
    the others if these are to be kept. version: that of the others, if they are one.
    """

    __slots__ = ("buffer", "stages", "undo", "version")

    def __init__(
        self,
        stages: Sequence[Stage],
        undo: Callable[[], None],
        *,
        buffer: Weights | None = None,
        version: int | None = None,
    ) -> None:
        self.stages, self.undo, self.buffer, self.version = stages, undo, buffer, version


def _exchange(older: Sequence[tuple[Stage, Weights]], version: int | None = None) -> Held:
    """Put older weights of these stages into the live storage, to which graphs in flight refer."""
    undo = set_aside(stage.weights for stage, _ in older)
    copy_all((stage.weights, weights) for stage, weights in older)
    return Held([stage for stage, _ in older], undo, version=version)


def _place(team: StageGroup, chosen: Weights | Shift, *, stash: bool) -> Held:
    """Put shifted weights into the live storage."""
    weights = team.weights
    if still := team.frozen:
        chosen = unshifted(chosen, weights, still)
    if stash:
        buffer = [w.detach().clone() for w in weights]
    else:
        buffer = team.scratch
        copy(buffer, weights)
    if isinstance(chosen, Shift):
        add_scaled(weights, chosen.coefficients, chosen.directions)
    else:
        torch._foreach_copy_(weights, chosen)
    return Held(team.stages, partial(_swap if stash else copy, weights, buffer), buffer=buffer)


def _swap(a: Weights, b: Weights) -> None:
    """Exchange the values and not the storages, to which graphs in flight refer."""
    kept = [w.detach().clone() for w in a]
    torch._foreach_copy_(a, b)
    torch._foreach_copy_(b, kept)


def forget_casts() -> None:
    """Clear torch's autocast cache, which keeps casts of weights by identity although they change in place."""
    if accelerators.autocast():
        torch.clear_autocast_cache()
