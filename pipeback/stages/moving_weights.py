"""Moving weights: micro-batches in flight go on where the weights of their stage move to another place in memory.

A graph of autograd refers to the memory that the weights had in F, and B is to run on the newest weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from pipeback.stages import flight_state
from pipeback.stages.flight import Flight
from pipeback.stages.module_settings import Settings
from pipeback.stages.run_modules import untouched
from pipeback.stages.stage import Stage
from pipeback.stages.state_values import Plain, Tensors


class _Graph(NamedTuple):
    """What a forward has left, apart from the memory of the weights."""

    flight: Flight
    plain: Plain
    tensors: Tensors


@contextmanager
def moving(stages: Sequence[Stage]) -> Iterator[None]:
    """A context within which the weights of these stages move; afterwards, graphs in flight refer to the new place."""
    before = [(stage, _graphs(stage)) for stage in stages if stage.flights]
    yield
    for stage, graphs in before:
        _make_anew(stage, graphs)


def _graphs(stage: Stage) -> dict[int, _Graph]:
    found: dict[int, _Graph] = {}
    for mb, flight in stage.flights.items():
        if flight.row is None and flight.again is None:
            tensors: Tensors = {}
            plain = flight_state.save(stage, mb, flight, tensors, lambda options: 0)
            found[mb] = _Graph(flight, {**plain, "owned": False}, tensors)
    return found


def _make_anew(stage: Stage, graphs: Mapping[int, _Graph]) -> None:
    if not graphs:
        return
    around, now = untouched(stage), Settings.of(stage.module)
    with _there(stage), torch.enable_grad():
        for mb, (flight, plain, tensors) in graphs.items():
            made = flight_state.load(stage, mb, plain, tensors, {0: flight.options}, around, now, None)
            made.owned = flight.owned
            stage.flights[mb] = made


@contextmanager
def _there(stage: Stage) -> Iterator[None]:
    """A context in which the weights have memory on the device: new graphs refer to it, whatever values it has."""
    slot = stage.home.slot
    if slot is None or slot.flat.here:
        yield
        return
    slot.arrive()
    try:
        with torch.no_grad():
            for view, value in zip(slot.flat.views, slot.rest, strict=True):
                view.copy_(value)
        yield
    finally:
        slot.leave()
