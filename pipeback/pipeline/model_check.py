"""Model check: whether a model still consists of the modules and weights of which its pipeline was built.

If a module were replaced unnoticed, the pipeline would go on training the old one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn

from pipeback.private import handles, listened, parametrized_once
from pipeback.splitting.module_hooks import Around
from pipeback.stages.stage import Stage
from pipeback.stages.tracing_lock import TRACING

_needs, _places, _slot = attrgetter("requires_grad"), attrgetter("home.places"), attrgetter("home.slot")
_COPY = "copy values into the weights in place, or build a new Pipeline"


class Places:
    """Entries of dictionaries, as they are now."""

    def __init__(self, entries: Iterable[tuple[dict[str, Any], str, Any]]) -> None:
        found = list(entries)
        self.homes = [home for home, _, _ in found]
        self.keys = [key for _, key, _ in found]
        self.values = [value for _, _, value in found]

    def changed(self) -> int | None:
        """The number of an entry that has been replaced; None if all are as they were."""
        if all(map(is_, map(dict.get, self.homes, self.keys), self.values)):
            return None
        return next(n for n, v in enumerate(self.values) if self.homes[n].get(self.keys[n]) is not v)


class WeightPlaces:
    """The weights of some stages: which module holds each by which name, and where in memory it lies."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages, self._noted = stages, [*map(_places, stages), *map(_slot, stages)]
        found = [(stage, *entry) for stage in stages for entry in stage.home.places]
        self._entries = Places((owner, key, p) for _, owner, key, p, _ in found)
        self._labels = [stage.label for stage, *_ in found]
        self._resident = [n for n, (stage, *_) in enumerate(found) if stage.home.slot is None]
        self._weights = [found[n][3] for n in self._resident]
        self._pointers = [found[n][4] for n in self._resident]
        first = {id(stage): n for n, (stage, *_) in reversed([*enumerate(found)])}
        self._slots = [(n, slot) for n in first.values() if (slot := found[n][0].home.slot) is not None]

    def current(self) -> bool:
        """Whether the stages have noted no other places, and moved to no store, since."""
        return all(map(is_, chain(map(_places, self._stages), map(_slot, self._stages)), self._noted))

    def written(self) -> str | None:
        """A stage whose weights are in a store, but into whose module somebody has written, which is lost."""
        return next((self._labels[n] for n, slot in self._slots if slot.written()), None)

    def changed(self) -> str | None:
        """The stage and the name of a weight that was replaced or moved; None if all are as they were."""
        n = self._entries.changed()
        if n is None:
            pointers = list(map(Tensor.data_ptr, self._weights))
            if pointers != self._pointers:
                n = next(self._resident[i] for i, there in enumerate(pointers) if there != self._pointers[i])
        if n is None:
            n = next((n for n, slot in self._slots if not slot.intact()), None)
        return None if n is None else f"{self._labels[n]}: {self._entries.keys[n]}"


class ModelCheck:
    """Checks a model and the stages that were built of it. sequence: whether its own forward is never run or traced."""

    def __init__(self, model: nn.Module, stages: Sequence[Stage], sequence: bool) -> None:
        self._around = Around([model] if sequence else [])
        self._was = self._around.now()
        self.stages, self.turn, self._handles = stages, 0, None
        named = [(f"{name}." if name else "", m._modules) for name, m in model.named_modules()]
        self.names = [prefix + key for prefix, children in named for key in children]
        self.modules = Places((children, key, child) for _, children in named for key, child in children.items())
        self._held = WeightPlaces(stages)
        self._weights = [p for stage in stages for p in stage.module.parameters()]
        trained = {id(p) for stage in stages for p in stage.params}
        self._needs = [id(p) in trained for p in self._weights]
        self._streamed = [stage for stage in stages if stage.home.slot is not None]
        self._stepped: list[Tensor] = [w for stage in stages if stage.home.slot is None for w in stage.weights]
        self._pointers: list[int] = []  # where they lay, beside their parameters

    def check(self, wait: Callable[[], object]) -> None:
        """Raise RuntimeError if a module or a weight was replaced, or lies elsewhere in memory, or is computed once.

        wait: waits for all updates.
        """
        if parametrized_once():
            raise RuntimeError(
                "torch.nn.utils.parametrize.cached() keeps weights that are computed of others, and micro-batches "
                "would go on with them after an update; push outside of that context"
            )
        n = self.modules.changed()
        if n is not None:
            raise RuntimeError(
                f"module {self.names[n]!r} of the model was replaced or removed after the pipeline was built, which "
                "trains the one it was built of; build a new Pipeline"
            )
        if self._around.now() != self._was:
            raise RuntimeError(
                "modules were added to the model, hooks were registered on it, or a forward was set on it after the "
                "pipeline was built, which runs those that it was built of, one after the other; build a new Pipeline"
            )
        if not self._held.current():
            self._held = WeightPlaces(self.stages)
        if (written := self._held.written()) is not None:
            raise RuntimeError(
                f"{written}: its weights are in the store, so that what was written into the module's is lost; "
                "write it once more within `with pipe.shown(changes=True):`"
            )
        if self._held.changed():
            with TRACING:  # which another thread may do, with other tensors in the places of weights
                changed = self._held.changed()
            if changed:
                wait()  # a forward in another thread may call a module with other tensors (`functional_call`)
                changed = self._held.changed()
            if changed:
                raise RuntimeError(f"{changed} was moved, cast or replaced; {_COPY}")
        self._check_stepped(wait)
        self.turn += 1
        self._check_hooks()
        if (needs := list(map(_needs, self._weights))) != self._needs:
            self._check_trained()
            self._needs = needs

    def _check_stepped(self, wait: Callable[[], object]) -> None:
        """Raise RuntimeError if a weight that an optimizer steps is not where its parameter is. An update in another
        thread may move it for a moment.
        """
        pointers = list(map(Tensor.data_ptr, self._stepped))
        anew = pointers != self._pointers
        for stage in self.stages if anew else self._streamed:
            n = self.turn % max(len(stage.weights), 1)
            for w, p in [*zip(stage.weights, stage.params)][slice(None) if anew else slice(n, n + 1)]:
                if stage.home.places and not stage.home.holds(w, p):
                    wait()
                    if not stage.home.holds(w, p):
                        name = next(name for name, other in stage.module.named_parameters() if other is p)
                        raise RuntimeError(f"{stage.label}: {name} was moved or cast in its optimizer; {_COPY}")
        self._pointers = list(map(Tensor.data_ptr, self._stepped)) if anew else pointers

    def _check_trained(self) -> None:
        """Raise RuntimeError if a weight to be trained has no optimizer, or is frozen in a store."""
        for stage in self.stages:
            mine = {id(p) for p in stage.params}
            for name, p in stage.module.named_parameters():
                if p.requires_grad and id(p) not in mine:
                    raise RuntimeError(
                        f"{stage.label}: {name} was frozen when the pipeline was built, which does not train it; build "
                        "a new Pipeline now that requires_grad is set"
                    )
                if not p.requires_grad and id(p) in mine and stage.home.slot is not None:
                    raise RuntimeError(
                        f"{stage.label} lives in a store, where {name} cannot be frozen in between; build a new "
                        "Pipeline once requires_grad is set"
                    )

    def _check_hooks(self) -> None:
        """Raise RuntimeError if hooks were added to stages that run as one."""
        seen, self._handles = self._handles, handles()
        stages: Sequence[Stage] = self.stages if seen != self._handles else ()
        for stage in stages:
            what = listened(stage.module) if stage.stack is not None and stage.stack.proved else None
            if what:
                raise RuntimeError(
                    f"{stage.label} runs as one with its neighbours, where no hooks are called, but {what} has got "
                    "some; register hooks before the first push, or build the pipeline with vectorize=False"
                )
