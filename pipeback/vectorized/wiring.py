"""Wiring: which rows of which stacks pass their tensors to which others, at ticks at which all stacks are busy.

Stacks hand on their outputs and gradients as they are, whole or in runs of rows; what comes from a stage outside of all
stacks, or goes to one, is a message of the link.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from pipeback.runtime.link import Name
from pipeback.tensors.layout import Message
from pipeback.vectorized.forms import leaves
from pipeback.vectorized.tick import Piece, StackTick

Box = dict[Name, Message]
Where = dict[int, tuple[StackTick, int]]  # of each stage, the stack that it is in, and its row there


def wire(ticks: Sequence[StackTick]) -> Where:
    """Tell each stack where its rows get their inputs and gradients from; return where each stage is."""
    where = {s: (one, row) for one in ticks for row, s in enumerate(one.stack.numbers)}
    for one in ticks:
        one.inward, one.back = _pieces(one, where, -1), _pieces(one, where, 1)
    return where


def _pieces(one: StackTick, where: Where, by: Literal[-1, 1]) -> list[Piece]:
    """Return the sources of the rows of a stack: the stages `by` further on."""
    runs: list[list[int]] = []  # of stages of this stack, whose sources are neighbouring rows of one stack
    for s in one.stack.numbers:
        last = where.get(runs[-1][-1] + by) if runs else None
        mine = where.get(s + by)
        if last is not None and mine is not None and mine[0] is last[0] and mine[1] == last[1] + 1:
            runs[-1].append(s)
        else:
            runs.append([s])
    return [_piece(one, where.get(run[0] + by), run) for run in runs]


def _piece(one: StackTick, place: tuple[StackTick, int] | None, run: Sequence[int]) -> Piece:
    if place is None:
        return Piece(None, run[0], None, lifts=not one.stack.alone)
    source, first = place
    if source.stack.alone:
        return Piece(source, run[0], None, lifts=not one.stack.alone)
    if one.stack.alone:
        return Piece(source, run[0], first, lifts=False)
    whole = len(run) == len(source.stack.numbers)
    return Piece(source, run[0], None if whole else slice(first, first + len(run)), lifts=False)


def entering(one: StackTick) -> list[tuple[Literal["F", "B"], int]]:
    """Return the messages from outside of all stacks that the rows of a stack get: direction and stage."""
    found: list[tuple[Literal["F", "B"], int]] = [("F", piece.stage) for piece in one.inward if piece.source is None]
    return [*found, *(("B", piece.stage) for piece in one.back if piece.source is None)]


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


def take(ticks: Sequence[StackTick], where: Where, f: Sequence[int], b: Sequence[int], box: Box) -> None:
    """Take the messages that wait for the next F and B of these stacks out of `box`, into the stacks that sent them.

    f, b: of each stage, the micro-batch of its next F and B.
    """
    came: dict[tuple[Literal["F", "B"], int], tuple[StackTick, dict[int, tuple[Tensor, ...]]]] = {}
    for kind, s, source, row in _between(ticks, where):
        message = leaves(box.pop((kind, s, (f if kind == "F" else b)[s])))
        came.setdefault((kind, source.first), (source, {}))[1][row] = message
    for (kind, _), (source, rows) in came.items():
        some = next(iter(rows.values()))
        values = [_whole(source, [message[n] for message in rows.values()], list(rows)) for n in range(len(some))]
        if kind == "F":
            source.ys = values
        else:
            source.gxs = list(values)


def _whole(source: StackTick, values: Sequence[Any], rows: Sequence[int]) -> Any:
    """Return the values of these rows as (n, …); the other rows, which send to no stack, are zeros."""
    if source.stack.alone or values[0] is None:
        return values[0]
    every = [torch.zeros_like(values[0])] * len(source.stack.numbers)
    for row, value in zip(rows, values, strict=True):
        every[row] = value
    return torch.stack(every)


def give(ticks: Sequence[StackTick], where: Where, f: Sequence[int], b: Sequence[int], box: Box) -> None:
    """Leave in `box` the messages for the next F and B of these stacks, which `take` takes."""
    for kind, s, source, row in _between(ticks, where):
        value = source.sent(row) if kind == "F" else source.sent_back(row)
        box[kind, s, (f if kind == "F" else b)[s]] = value
