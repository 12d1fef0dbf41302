"""Outside draws: random numbers that a forward draws from generators of Python and numpy, not from torch's.

A traced model repeats the calls of one forward, and the numbers that Python gave them. Whether these depend on what
was drawn is seen when the forward is traced twice more, once with a generator that yields its smallest number for a
while, and once with one that yields its largest. That shows a layer drop of any probability, and lets one of 0 pass.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import eq
from typing import Any, NamedTuple

import torch
from torch import nn

from pipeback.private import hooks_of

WORDS, LED = 624, 128  # of the state of a Mersenne twister; how many of them say what is drawn next
SMALLEST, LARGEST = 0, 0x12DD9BB3  # words that become 0 and 2**32 - 1 when they are drawn


class Generator(NamedTuple):
    """A generator of random numbers outside of torch, by the functions that read and write its state."""

    read: Callable[[], Any]
    write: Callable[[Any], None]


class OutsideDraws:
    """Notices what a forward draws between its leaves.

    generators: those to watch. fine: whether to look at every module that is called; otherwise only `end` looks, and
    sees draws of leaves, too. where: the path of the module that has drawn first. drawn: the generators that were used.
    """

    def __init__(self, generators: Sequence[Generator], fine: bool = False) -> None:
        self.generators, self.fine = generators, fine
        self.where: str | None = None
        self.drawn: list[Generator] = []
        self.states = read(self.generators)
        self._calm = False  # whether the leaf that runs does not draw from them

    def enter(self, leaf: nn.Module, where: str) -> None:
        """Look before a leaf runs, unless it is a layer of torch, which draws from torch alone."""
        self._calm = not self.fine or _torchs(leaf)
        if not self._calm:
            self.end(where)

    def turn(self, where: str) -> None:
        """The module `where` has run so far; another one follows."""
        if self.fine:
            self.end(where)

    def end(self, where: str) -> None:
        """Look whether anything was drawn; `where` is the module that runs."""
        for each, state in zip(self.generators, self.states, strict=True):
            if each not in self.drawn and not _same(each.read(), state):
                self.drawn.append(each)
                self.where = where if self.where is None else self.where

    def leave(self) -> None:
        """A leaf may have drawn whatever it likes."""
        if not self._calm:
            self.states = read(self.generators)


def _torchs(leaf: nn.Module) -> bool:
    """Whether a leaf is a layer of torch and nothing else."""
    bare = type(leaf).__module__.startswith("torch.nn.") and "forward" not in vars(leaf)
    return bare and not leaf._modules and not hooks_of(leaf)


def generators(modules: Iterable[nn.Module]) -> list[Generator]:
    """The default generators of Python and numpy, and those in the modules' attributes or beside their forward."""
    numpy = sys.modules.get("numpy")
    found = [Generator(random.getstate, random.setstate)]
    if numpy is not None:
        found.append(_of_numpy(numpy.random))
    modules = list(modules)
    around = {id(names): names for kind in set(map(type, modules)) if (names := _around(kind))}
    places = {**around, **{id(vars(m)): vars(m) for m in modules}}
    kinds = set[type]().union(*[map(type, [*names.values()]) for names in places.values()])
    drawing = (random.Random,) if numpy is None else (random.Random, numpy.random.RandomState, numpy.random.Generator)
    if not any(issubclass(kind, drawing) for kind in kinds):
        return found  # the rule; looking at kinds first is far cheaper than looking at every value
    held = {id(value): value for names in places.values() for value in [*names.values()]}
    for value in held.values():
        if isinstance(value, random.Random):
            found.append(Generator(value.getstate, value.setstate))
        elif numpy is not None and isinstance(value, numpy.random.RandomState):
            found.append(Generator(lambda r=value: r.get_state(legacy=False), value.set_state))  # type: ignore[misc]
        elif numpy is not None and isinstance(value, numpy.random.Generator):
            bits = value.bit_generator
            found.append(Generator(lambda b=bits: b.state, lambda s, b=bits: setattr(b, "state", s)))  # type: ignore[misc]
    return found


def torch_generators(modules: Iterable[nn.Module]) -> list[Generator]:
    """The generators of torch in the modules' attributes; a trace sees who draws from them."""
    held = {id(x): x for m in modules for x in vars(m).values() if type(x) is torch.Generator}
    return [Generator(x.get_state, lambda state, x=x: x.set_state(state)) for x in held.values()]  # type: ignore[misc]


def _of_numpy(numpys: Any) -> Generator:
    """numpy's default generator. Its state is read anew only if its memory has changed, which is far cheaper to see.

    A normal number that it has drawn in advance, if it `has_gauss`, lies elsewhere.
    """
    known: list[tuple[bytes, Any]] = []

    def read_it() -> Any:
        memory = _memory(getattr(numpys, "get_bit_generator", lambda: None)())
        if known and memory and known[0][0] == memory and not known[0][1]["has_gauss"]:
            return known[0][1]
        known[:] = [(memory, numpys.get_state(legacy=False))]
        return known[0][1]

    def write_it(state: Any) -> None:
        known.clear()
        numpys.set_state(state)

    return Generator(read_it, write_it)


def _memory(bits: Any) -> bytes:
    """The memory in which numpy's Mersenne twister keeps its words and its place in them; empty for any other."""
    twister = type(bits).__name__ == "MT19937"
    return ctypes.string_at(bits.ctypes.state_address, 4 * (WORDS + 1)) if twister else b""


def _around(kind: type[nn.Module]) -> dict[str, Any]:
    """The names that the forward of such a module finds beside it; torch's own layers draw from torch alone."""
    found: dict[str, Any] = getattr(getattr(kind, "forward", None), "__globals__", {})
    return {} if found.get("__name__", "").startswith("torch.nn.") else found


def read(of: Sequence[Generator]) -> list[Any]:
    """The states of these generators."""
    return [each.read() for each in of]


def write(of: Sequence[Generator], states: Sequence[Any]) -> None:
    """Set the states of these generators, where they differ."""
    for each, state in zip(of, states, strict=True):
        if not _same(each.read(), state):
            each.write(state)


def drawn(of: Sequence[Generator], states: Sequence[Any]) -> bool:
    """Whether one of these generators has left its state."""
    return not _same(read(of), states)


@contextmanager
def at(of: Sequence[Generator], states: Sequence[Any]) -> Iterator[None]:
    """A context in which the generators begin at `states`; afterwards they stand where they stood before."""
    before = read(of)
    write(of, states)
    try:
        yield
    finally:
        write(of, before)


def extremes(of: Sequence[Generator]) -> Iterator[list[Any] | None]:
    """States in which all generators yield their smallest number first, then their largest; None if one cannot."""
    for word in (SMALLEST, LARGEST):
        states = [_led(state, word) for state in read(of)]
        yield None if None in states else states


def _led(state: Any, word: int) -> Any:
    """The state of a Mersenne twister of Python or numpy that draws `word` first; others have none."""
    if isinstance(state, tuple):
        version, words, _ = state
        return version, (*[word] * LED, *words[LED:WORDS], 0), None
    if state["bit_generator"] != "MT19937":
        return None
    key = state["state"]["key"].copy()
    key[:LED] = word
    return {**state, "state": {"key": key, "pos": 0}, "has_gauss": 0}


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool((a == b).all()) if hasattr(a, "all") else eq(a, b)
