"""Flight row: what the forward of a stacked stage has saved for its backward, as a row of the stack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from pipeback.vectorized.buffers.waiting import Waiting
from pipeback.vectorized.tracing.forms import Kind


class FlightRow(NamedTuple):
    """The tensors of row `number` of a stack, for a kind of micro-batch. stages: their numbers in the stack."""

    rings: Callable[[Kind], Waiting]
    stages: Sequence[int]
    kind: Kind
    number: int

    def tensors(self, mb: int) -> list[Tensor]:
        """Return copies of the saved tensors of a micro-batch, in the order of the graph."""
        return self.rings(self.kind).tensors(self.number, mb)

    def written(self) -> list[Any]:
        """Return as JSON what `Stack.restore` needs beside the tensors: the kind, and the stages of the stack."""
        return [*self.kind.written(), list(self.stages)]
