"""Ownership: each module, parameter and buffer of a traced model belongs to the first stage that uses it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from pipeback.splitting.buffer_copies import BufferCopies
from pipeback.splitting.call_trace import Attribute, Call, CallTrace
from pipeback.splitting.cut_points import given
from pipeback.splitting.lent import Lent
from pipeback.splitting.module_walk import held, walked
from pipeback.splitting.refusals import one_call
from pipeback.tensors.structures import Ref


class Ownership:
    """Says which of `count` stages owns what.

    modules: all of the model, by their paths. staged: every call of the record with its stage.

    Raises ValueError, which names the layer and the cure, if several stages use what only one can hold.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Mapping[str, nn.Module],
        staged: Sequence[tuple[int, Call]],
        count: int,
        record: CallTrace,
    ) -> None:
        self.model = model
        self.owner: dict[int, int] = {}  # the stage that owns each parameter, by identity
        self.names: dict[int, str] = {}  # the name of each parameter in its stage, by identity
        self.owned: list[dict[str, Any]] = [{} for _ in range(count)]
        self.copied: list[set[str]] = [set() for _ in range(count)]  # copies of other stages' buffers
        where: dict[str, int] = {}
        self._buffers = dict(held(modules, "_buffers"))
        self._first: dict[str, tuple[int, int]] = {}  # the stage that reads a buffer first, and the number of the call
        self._parameters = dict(held(modules, "_parameters"))
        self._known = {*self._buffers, *self._parameters}
        calls: list[Call] = []
        first: dict[str, int] = {}  # the number of the first call of each module
        # the last call that writes into a parameter or a buffer, and its stage
        self._last = {name: min(numbers[-1], len(staged) - 1) for name, numbers in record.writes.items()}
        self._writers = {name: staged[n][0] for name, n in self._last.items()}
        for s, call in staged:
            calls.append(call)
            self._take_buffers(s, calls, record.changed)
            for name in given(self._parameters, call):
                p = self._parameters[name]
                if id(p) not in self.owner:
                    self.owner[id(p)], self.names[id(p)] = s, name
                    self.owned[s][name] = p
            if not call.module:
                continue
            module = model.get_submodule(call.target)
            if call.target in where:
                if where[call.target] != s and any(True for _ in module.parameters()):
                    self._again(call.target, where[call.target], s, calls[first[call.target] :])
                if where[call.target] == s:
                    continue
            where.setdefault(call.target, s)
            first.setdefault(call.target, len(calls) - 1)
            tied = []
            for name, p in held(walked(module), "_parameters"):
                self.names.setdefault(id(p), f"{call.target}.{name}")
                if self.owner.setdefault(id(p), s) != s:
                    tied.append(name)
            if tied:
                self.owned[s][call.target] = Lent(module, tied)
            else:
                self.owned[s][call.target] = module
        self.copies = BufferCopies(modules, self.owned, self.copied)
        self._check_writers(calls)

    def _check_writers(self, calls: Sequence[Call]) -> None:
        """Raise ValueError if a later stage than its owner writes into a parameter or a buffer."""
        for name, s in self._writers.items():
            owner, _ = self._first.get(name, (self.owner.get(id(self._parameters.get(name)), s), 0))
            if owner < s:
                used = [call for n, call in enumerate(calls) if name in call.attributes() or n == self._last[name]]
                whole = one_call(self.model, (call.where for call in used))
                raise ValueError(
                    f"{name!r} is written into by the forward in stage {s}, and stage {owner} reads it; cut so that "
                    f"one stage alone does, or {whole}"
                )

    def _take_buffers(self, s: int, calls: Sequence[Call], changed: Container[str]) -> None:
        """Give stage s the buffers that the last call reads, or copies, unless an earlier stage will lend them."""
        for name in calls[-1].attributes():
            if name not in self._buffers or name in self.owned[s]:
                continue
            owner, first = self._first.setdefault(name, (s, len(calls) - 1))
            if owner == s:
                self.owned[s][name] = self._buffers[name]
            elif self._writers.get(name, s) < s:
                continue  # it is changed by an earlier stage alone
            elif name in changed:
                whole = one_call(self.model, (call.where for call in calls[first:]))
                raise ValueError(
                    f"buffer {name!r} is changed by the forward, and stages {owner} and {s} read it; cut so that one "
                    f"stage alone does, or {whole}"
                )
            else:
                self.copied[s].add(name)
                self.owned[s][name] = self._buffers[name].detach().clone()

    def lent(self, record: CallTrace, staged: Iterable[tuple[int, Call]]) -> list[tuple[int, Call]]:
        """Return calls, with their stages, that take the buffers of earlier stages as values, and those that give them.

        An earlier stage gives what a buffer is after the stage's last call.
        """
        given: dict[str, tuple[int, int]] = {}  # the owner of each, and its number
        found: list[tuple[int, Call]] = []
        for s, call in staged:
            numbers = {}
            for name in call.attributes():
                owner, _ = self._first.get(name, (s, 0))
                if owner < s and name not in self.owned[s]:
                    if name not in given:
                        given[name] = owner, len(record.forms)
                        record.forms.append((self._buffers[name].shape, self._buffers[name].dtype))
                        record.grads.append(False)
                    numbers[name] = Ref(given[name][1])
            found.append((s, call.given(numbers) if numbers else call))
        for name, (owner, number) in given.items():
            at = max(n for n, (s, _) in enumerate(found) if s == owner) + 1
            found.insert(at, (owner, Call(Tensor.clone, (Attribute(name),), {}, "", False, [number])))
        return found

    def _again(self, path: str, first: int, second: int, calls: Sequence[Call]) -> None:
        """Raise ValueError if a module that two stages call has buffers, since weights can travel and buffers cannot.

        calls: those from its first call to its second.
        """
        module = self.model.get_submodule(path)
        if kept := next((name for name, _ in module.named_buffers()), None):
            whole = one_call(self.model, (call.where for call in calls))
            raise ValueError(
                f"{type(module).__name__} {path!r} is called in stages {first} and {second}, and its buffer {kept!r} "
                "belongs to one stage alone, while weights may travel; cut so that both calls lie in one stage, use "
                f"two modules (which may share their weights), or {whole}"
            )

    def names_of(self, s: int, parameters: Iterable[str]) -> set[str]:
        """Return which of these parameters a stage owns, by their names there."""
        found = [self._parameters[name] for name in parameters]
        return {self.names[id(p)] for p in found if self.owner.get(id(p)) == s}

    def unknown(self, calls: Iterable[Call]) -> Call | None:
        """Return the first call of a module that no stage has, since the example did not call it."""
        return next((c for c in calls if c.module and not any(c.target in own for own in self.owned)), None)

    def staged(self, calls: Iterable[Call]) -> list[tuple[int, Call]] | None:
        """Return every call with the first stage that can make it after the calls before; None if no stage can.

        So a micro-batch may skip the first calls of a stage, such as heads that a model calls only in training.
        """
        s, found = 0, []
        for call in calls:
            able = (t for t in range(s, len(self.owned)) if self.able(t, call))
            s = next(able, -1)
            if s < 0:
                return None
            found.append((s, call))
        return found

    def able(self, s: int, call: Call) -> bool:
        """Whether a stage owns or borrows all modules, weights and buffers of a call."""
        if call.module and call.target not in self.owned[s]:
            return False
        own = self.owned[s]
        return all(
            name in own
            or self._first.get(name, (s, 0))[0] < s
            or self.owner.get(id(self._parameters.get(name)), len(self.owned)) <= s
            for name in call.attributes()
            if name in self._known
        )

    def borrowed(self, s: int, call: Call) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the weights of earlier stages that a call uses, by the names under which the segment looks them up."""
        found = self.owned[s].get(call.target) if call.module else None
        if isinstance(found, Lent):
            module = self.model.get_submodule(call.target)
            for name in found.__names__:
                yield f"{call.target}.{name}", module.get_parameter(name)
        for name in given(self._parameters, call):
            p = self._parameters[name]
            if self.owner.get(id(p), s) != s:
                yield name, p
