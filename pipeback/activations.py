"""Activations: what a stage keeps of a micro-batch from its forward to its backward, and where.

device      the graph, and all that autograd has saved, where it was computed
recompute   the input; B does the forward once more (`repeat`)
host        the graph; what autograd has saved waits in host memory (`offload`)
"""

from __future__ import annotations

from typing import Any, Protocol

from pipeback.offload import Host
from pipeback.repeat import Recompute
from pipeback.stage import Flight, Stage, Value


class Keeping(Protocol):
    """How one stage does it, if not on the device."""

    stashes: bool  # whether B uses functions of the weights as F has computed them
    apart: bool  # whether backwards are done one by one, for memory
    away: bool  # whether what a graph saved is kept in host memory

    def forward(self, stage: Stage, flight: Flight, given: Value) -> Value:
        """F: run the module on what it is given, leave in the flight what B needs; returns the output."""

    def adopt(self, flight: Flight) -> None:
        """Take in a flight from a state, which goes on as it began."""

    def learn(self, stage: Stage, x: Value, target: Any) -> None:
        """Find out in the rehearsal what must be known of the module."""

    def measure(self, stage: Stage, flight: Flight, output: Value) -> None:
        """Tell the stage the bytes of a micro-batch, given one between F and B and what B differentiates."""


KINDS: dict[str, type[Recompute | Host] | None] = {"device": None, "recompute": Recompute, "host": Host}


def keeping(activations: str) -> Keeping | None:
    """A new one for a stage; None for "device", which the stage does itself."""
    kind = KINDS[activations]
    return None if kind is None else kind()
