"""Wiring: which rows of which stacks pass their tensors to which others, at ticks at which all stacks are busy.

Stacks hand on their outputs and gradients as they are, whole or in runs of rows; what comes from a stage outside of all
stacks, or goes to one, is a message of the link.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from pipeback.runtime.link import Name
from pipeback.tensors.layout import Message
from pipeback.vectorized.ticks.tick import Piece, Pieces, StackTick
from pipeback.vectorized.tracing.forms import leaves

Box = dict[Name, Message]
Where = dict[int, tuple[StackTick, int]]  # of each stage, the stack that it is in, and its row there


def wire(ticks: Sequence[StackTick]) -> Where:
    """Tell each stack where its rows get their inputs and gradients from; return where each stage is."""
    where = {s: (one, row) for one in ticks for row, s in enumerate(one.stack.numbers)}
    for one in ticks:
        pieces(one, where, one.all)
    return where


def pieces(one: StackTick, where: Where, rows: tuple[int, int]) -> Pieces:
    """Return where the rows of a stack, from one up to another, get their inputs and gradients from."""
    found = one.pieces.get(rows)
    if found is None:
        numbers = one.stack.numbers[slice(*rows)]
        found = one.pieces[rows] = Pieces(_pieces(one, numbers, where, -1), _pieces(one, numbers, where, 1))
    return found


def _pieces(one: StackTick, numbers: Sequence[int], where: Where, by: Literal[-1, 1]) -> list[Piece]:
    """Return the sources of these stages of a stack: the stages `by` further on."""
    runs: list[list[int]] = []  # of stages whose sources are neighbouring rows of one stack
    for s in numbers:
        last = where.get(runs[-1][-1] + by) if runs else None
        mine = where.get(s + by)
        if last is not None and mine is not None and mine[0] is last[0] and mine[1] == last[1] + 1:
            runs[-1].append(s)
        else:
            runs.append([s])
    return [_piece(one, where.get(run[0] + by), run) for run in runs]


def _piece(one: StackTick, place: tuple[StackTick, int] | None, run: Sequence[int]) -> Piece:
    if place is None:
        return Piece(None, run[0], 0, None, lifts=not one.stack.alone)
    (source, first), s = place, run[0]
    late = abs(source.stack.places[first] - one.stack.places[one.stack.numbers.index(s)])
    if source.stack.alone:
        return Piece(source, s, late, None, lifts=not one.stack.alone)
    if one.stack.alone:
        return Piece(source, s, late, first, lifts=False)
    whole = len(run) == len(source.stack.numbers)
    return Piece(source, s, late, None if whole else slice(first, first + len(run)), lifts=False)


def entering(one: StackTick, where: Where) -> list[tuple[Literal["F", "B"], int]]:
    """Return the messages from outside of all stacks that the rows of a stack get: direction and stage."""
    found: list[tuple[Literal["F", "B"], int]] = [("F", s) for s in one.stack.numbers if s - 1 not in where]
    return [*found, *(("B", s) for s in one.stack.numbers if s + 1 not in where)]


def leaving(one: StackTick, where: Where) -> list[tuple[Literal["F", "B"], int, int]]:
    """Return the messages that leave all stacks: direction, stage, and its row."""
    found: list[tuple[Literal["F", "B"], int, int]] = []
    for row, s in enumerate(one.stack.numbers):
        if s + 1 not in where:
            found.append(("F", s, row))
        if s and s - 1 not in where:
            found.append(("B", s, row))
    return found


def _between(ticks: Sequence[StackTick], where: Where) -> Iterator[tuple[Literal["F", "B"], int, StackTick, int]]:
    """Yield direction and stage of each message to these stacks from a row of a stack, and that stack and row."""
    for one in ticks:
        for s in one.stack.numbers:
            if s - 1 in where:
                yield "F", s, *where[s - 1]
            if s + 1 in where:
                yield "B", s, *where[s + 1]


Waits = tuple[Literal["F", "B"], int, int, StackTick, int, int]
Ends = tuple[Sequence[int], Sequence[int]]  # per stage, the micro-batches of its next F and B


def _waiting(ticks: Sequence[StackTick], where: Where, ends: Ends) -> Iterator[Waits]:
    """Yield direction, stage, micro-batch, source, row and tick of sending of each message that waits."""
    f, b = ends
    for kind, s, source, row in _between(ticks, where):
        t, place = source.stack.numbers[row], source.stack.places[row]
        for i in range(f[s], f[t]) if kind == "F" else range(b[s], b[t]):
            yield kind, s, i, source, row, i + place if kind == "F" else i - place


def take(ticks: Sequence[StackTick], where: Where, ends: Ends, box: Box) -> None:
    """Take the messages that wait between these stacks out of `box`, into the mail of the stacks that sent them."""
    for kind, s, i, source, row, tick in list(_waiting(ticks, where, ends)):
        value = leaves(box.pop((kind, s, i)))
        if not source.stack.alone:
            value = tuple(None if v is None else v[None] for v in value)
        (source.ys if kind == "F" else source.gxs).send(tick, (row, row + 1), value)


def give(ticks: Sequence[StackTick], where: Where, ends: Ends, box: Box) -> None:
    """Leave in `box` the messages that `take` takes."""
    for kind, s, i, source, row, tick in _waiting(ticks, where, ends):
        box[kind, s, i] = source.sent(kind, tick, row)
