"""Weight list: lists of weights, with arithmetic over all of them in one call: one operation if they lie in a strip.

add_scaled   w ← w + c·x        copy   w ← x        exchange   w ↔ x
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from pipeback.private import identity
from pipeback.tensors.flat_buffer import FlatBuffer, dense, places

# the names of the rooms of a strip
WEIGHTS, SCRATCH, VELOCITIES, GRADIENTS, DECAYED = "weights", "scratch", "velocities", "gradients", "decayed"
MOVED = "moved"
RUNS = 8  # the most ways of cutting a strip that are remembered
Weights = list[Tensor]  # the trainable parameters of a stage, in the order of module.parameters()


class WeightList(list[Tensor]):
    """The weights of one or several stages, or tensors like these; caches what joint calls over them need."""

    velocities: list[Tensor] | None = None  # their momentum buffers; None until all have one
    strip: Arena | None = None  # the arena in which they lie, if any: its room and first number
    name, first = "", 0
    noting = False  # whether their room for copies is taken
    _ones: list[Tensor] | None = None
    _factor: tuple[float, Tensor] | None = None
    _chosen: tuple[tuple[int, ...], WeightList] | None = None
    _flat: Tensor | None = None
    _runs: dict[tuple[int, ...], WeightList]  # F and B may be shifted by other numbers
    _rooms: dict[str, WeightList]

    @property
    def ones(self) -> list[Tensor]:
        """A tensor 1 per weight, of its dtype and on its device."""
        if self._ones is None:
            kinds = {(w.dtype, w.device) for w in self}
            units = {kind: torch.ones((), dtype=kind[0], device=kind[1]) for kind in kinds}
            self._ones = [units[w.dtype, w.device] for w in self]
        return self._ones

    def factor(self, value: float) -> float | Tensor:
        """Return a factor in the form that foreach multiplies by fastest: on the CPU a 0-d tensor of the same bits."""
        unit = self.ones[0]
        plain = unit.device.type == "cpu" and unit.dtype in (torch.float32, torch.float64)
        if not plain or any(one is not unit for one in self.ones):
            return value
        if self._factor is None or self._factor[0] != value:
            self._factor = (value, torch.full_like(unit, value))
        return self._factor[1]

    def forget(self) -> None:
        """Forget all caches, since the weights lie elsewhere now."""
        self.velocities = self._ones = self._factor = self._chosen = self.strip = self._flat = None
        self._runs, self._rooms = {}, {}

    def forget_velocities(self) -> None:
        """Forget the momentum buffers, also those of some of the weights, since the optimizer may have others now."""
        self.velocities = self._chosen = None

    def only(self, numbers: Sequence[int]) -> WeightList:
        """Return the weights of these numbers; always the same list for the same numbers."""
        if self._chosen is None or self._chosen[0] != tuple(numbers):
            found = WeightList(self[n] for n in numbers)
            if self.strip is not None and list(numbers) == list(range(numbers[0], numbers[0] + len(numbers))):
                found.lie(self.strip, self.name, self.first + numbers[0])
            self._chosen = (tuple(numbers), found)
        return self._chosen[1]

    # -- in a strip ----------------------------------------------------------------------------------------------

    def lie(self, strip: Arena, name: str, first: int) -> None:
        self.strip, self.name, self.first = strip, name, first
        self._flat, self._runs, self._rooms = None, {}, {}

    def runs(self, begins: tuple[int, ...]) -> WeightList:
        """Return vectors, each with the weights from one of these numbers up to the next; always the same ones."""
        found = self._runs.get(begins)
        if found is None:
            assert self.strip is not None
            ends = (*begins[1:], len(self))
            parts = (self.strip.flat(self.name, self.first + a, b - a) for a, b in zip(begins, ends, strict=True))
            if len(self._runs) >= RUNS:
                self._runs.clear()
            found = self._runs[begins] = WeightList(parts)
        return found

    @property
    def flat(self) -> Tensor | None:
        """All weights, with the gaps between them, as one vector; None unless they lie one after the other."""
        if self._flat is None and self.strip is not None and self:
            self._flat = self.strip.flat(self.name, self.first, len(self))
        return self._flat

    def room(self, name: str) -> WeightList:
        """Return the tensors beside them in another room of their strip, at first zeros; always the same list."""
        assert self.strip is not None
        found = self._rooms.get(name)
        if found is None:
            found = self._rooms[name] = self.strip.room(name, self.first, len(self))
        return found


def joined(bundles: Iterable[Sequence[Tensor]]) -> WeightList:
    """Return the lists as one, which is in a strip if they follow each other there."""
    some = [bundle for bundle in bundles if len(bundle)]
    found = WeightList(w for bundle in some for w in bundle)
    first = some[0] if some else None
    if isinstance(first, WeightList) and first.strip is not None:
        at = first.first
        for bundle in some:
            if not isinstance(bundle, WeightList) or (bundle.strip, bundle.name, bundle.first) != (
                first.strip, first.name, at,
            ):  # fmt: skip
                return found
            at += len(bundle)
        found.lie(first.strip, first.name, first.first)
    return found


def chosen(values: Sequence[Any], numbers: Sequence[int]) -> Any:
    """Return the values of these numbers, still in a strip if they are neighbours there."""
    return values.only(numbers) if isinstance(values, WeightList) else [values[n] for n in numbers]


def alike(*lists: Sequence[Any]) -> bool:
    """Whether all lists lie in strips, as vectors of the same shape."""
    shape: torch.Size | None = None
    for some in lists:
        flat = some.flat if isinstance(some, WeightList) else None
        if flat is None or len(some) != len(lists[0]) or (shape is not None and flat.shape != shape):
            return False
        shape = flat.shape
    return True


def whole(*lists: Sequence[Any]) -> list[Any]:
    """Return the lists, each as one vector if all of them lie in strips in the same way."""
    return [[some.flat] for some in lists] if alike(*lists) else list(lists)  # type: ignore[attr-defined]


def by_number(numbers: Sequence[float], *lists: Sequence[Any]) -> tuple[Sequence[float], list[Any]]:
    """Return lists with a number for each of their entries: neighbours of the same number are one vector, if all lists
    lie in strips in the same way.

    numbers: one per weight.
    """
    if not alike(*lists):
        return numbers, list(lists)
    begins, few = _begins(tuple(numbers))
    return few, [some.runs(begins) for some in lists]  # type: ignore[attr-defined]


@lru_cache(maxsize=256)
def _begins(numbers: tuple[float, ...]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Where neighbours of the same number begin, and these numbers."""
    begins = (0, *(n for n in range(1, len(numbers)) if numbers[n] != numbers[n - 1]))
    return begins, tuple([numbers[n] for n in begins])


def add_scaled(weights: Weights, coefficients: Sequence[float], directions: Sequence[Tensor | None]) -> None:
    """w ← w + c·x in place for every weight that has a direction: one call, one rounding for any number of weights."""
    # c·x is rounded before the sum; with a factor of one, some kernels would fuse both for long tensors only
    coefficients, (weights, directions) = by_number(coefficients, weights, directions)
    given = [x for x in directions if x is not None]
    if len(given) < len(directions):
        there = [n for n, x in enumerate(directions) if x is not None]
        if not there:
            return
        weights, coefficients = [weights[n] for n in there], [coefficients[n] for n in there]
    ones = weights.ones if isinstance(weights, WeightList) else WeightList(weights).ones
    torch._foreach_addcmul_(weights, given, ones, list(coefficients))


def copy(weights: Weights, values: Sequence[Tensor]) -> None:
    """w ← x in place."""
    torch._foreach_copy_(*whole(weights, values))


def noted(weights: Weights) -> Weights:
    """Return copies of the weights for `moved`; a second time before that, other ones."""
    if not isinstance(weights, WeightList) or weights.flat is None or weights.noting:
        return [w.detach().clone() for w in weights]
    room, weights.noting = weights.room(MOVED), True
    copy(room, weights)
    return room


def moved(weights: Weights, before: Weights) -> Weights:
    """w − before, in the place of what `noted` has returned if the weights lie in a strip."""
    if not alike(weights, before):
        return list(torch._foreach_sub(weights, before))
    weights.noting = False  # type: ignore[attr-defined]
    (now,), (old,) = whole(weights, before)
    torch.sub(now.detach(), old, out=old)
    return before


def like(weights: Weights) -> Weights:
    """Return new tensors like these, in a strip of their own if these lie in one."""
    if getattr(weights, "flat", None) is None:
        return [torch.empty_like(w) for w in weights]
    return Arena([w.detach() for w in weights]).room(WEIGHTS, 0, len(weights))


def copy_all(pairs: Iterable[tuple[Weights, Sequence[Tensor]]]) -> None:
    """w ← x in place for every pair, in one call."""
    into: list[Tensor] = []
    values: list[Tensor] = []
    for w, x in pairs:
        a, b = getattr(w, "flat", None), getattr(x, "flat", None)  # as `whole` has them, at a third of its cost
        if a is not None and b is not None and len(w) == len(x) and a.shape == b.shape:
            into.append(a)
            values.append(b)
        else:
            into += w
            values += x
    if into:
        torch._foreach_copy_(into, values)


def runs_of(bundles: Iterable[Weights]) -> list[Tensor]:
    """Return the tensors of these lists; those of lists that follow each other in a strip are one vector."""
    found: list[Tensor] = []
    strip: Arena | None = None
    name, begin, end = "", 0, 0
    for bundle in bundles:
        other = getattr(bundle, "strip", None)
        if other is not None and other is strip and bundle.name == name and bundle.first == end:  # type: ignore[attr-defined]
            end += len(bundle)
            continue
        if strip is not None:
            found.append(strip.flat(name, begin, end - begin))
        strip = other
        if isinstance(bundle, WeightList) and strip is not None:
            name, begin, end = bundle.name, bundle.first, bundle.first + len(bundle)
        else:
            found += bundle
    if strip is not None:
        found.append(strip.flat(name, begin, end - begin))
    return found


def set_aside(bundles: Iterable[Weights]) -> Callable[[], None]:
    """Copy the weights, and return what puts the copies back."""
    places = runs_of(bundles)
    kept = [w.detach().clone() for w in places]
    return partial(torch._foreach_copy_, places, kept)


class Arena:
    """A strip of memory for tensors like `likes`, of one dtype on one device; each room has a place for each."""

    def __init__(self, likes: Sequence[Tensor]) -> None:
        self.likes = list(likes)
        begins, end = places(self.likes)
        size = self.likes[0].element_size()
        self._cuts = [at // size for at in (*begins, end)]
        self._rooms: dict[str, FlatBuffer] = {}

    def room(self, name: str, first: int, count: int) -> WeightList:
        """Return the tensors of a room for `count` weights from the number `first` on."""
        found = WeightList(self._flat(name).views[first : first + count])
        found.lie(self, name, first)
        return found

    def flat(self, name: str, first: int, count: int) -> Tensor:
        """Return the same as one vector, with the gaps."""
        whole = self._flat(name).memory.view(self.likes[0].dtype)
        return whole[self._cuts[first] : self._cuts[first + count]]

    def bring_back(self, name: str, first: int, count: int) -> None:
        """Lay tensors of a room that were given other memory (`v.data = ...`) where they were, with its values."""
        flat = self._flat(name)
        strip = identity(flat.memory.untyped_storage())
        for n in range(first, first + count):
            place, like = flat.views[n], self.likes[n]
            if identity(place.untyped_storage()) != strip and place.shape == like.shape:
                values, begin = place.data, self._cuts[n]
                whole = flat.memory.view(like.dtype)[begin : begin + like.numel()]
                place.data = whole.as_strided(like.shape, dense(like))
                place.data.copy_(values)

    @property
    def beside(self) -> int:
        """The bytes that no stage counts as its own."""
        return sum(self._rooms[name].nbytes for name in (GRADIENTS, DECAYED, MOVED) if name in self._rooms)

    def _flat(self, name: str) -> FlatBuffer:
        if name not in self._rooms:
            self._rooms[name] = flat = FlatBuffer.like(self.likes, self.likes[0].device)
            flat.memory.zero_()  # with the gaps, so that arithmetic on them gives no NaN
        return self._rooms[name]
