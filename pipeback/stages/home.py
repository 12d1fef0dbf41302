"""What a stage asks of those that look after its weights and its micro-batches. They stand in rooms above, which a
stage does not know: the survivors of its weights, a share of them, a forward that is done again, a stack of stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Survivors(Protocol):
    """Which of a stage's weights survive, and where their values are (`sparse_weights`)."""

    numbers: Any
    policy: Any
    changes: Any

    @property
    def packed(self) -> Any: ...

    @property
    def index_bytes(self) -> int: ...

    def packed_at(self, version: int) -> Any: ...

    def begin(self, weights: Sequence[Tensor], where: torch.device) -> None: ...

    def cut_state(self, stage: Any) -> None: ...

    def skipping(self, stage: Any, device: torch.device) -> Any: ...

    def expanded(self, stage: Any, n: int, value: Tensor) -> Tensor: ...

    def dense(self, stage: Any) -> list[Tensor]: ...

    def gathered(self, dense: Sequence[Tensor | None]) -> list[Tensor | None]: ...

    def gather_into(self, stage: Any, dense: Sequence[Tensor]) -> None: ...

    def change(self, stage: Any, gradients: Sequence[Tensor | None], update: int) -> None: ...

    def restore(self, stage: Any, changes: Any) -> None: ...


class Share(Protocol):
    """The slice of a stage's weights that this rank keeps, where the replicas share them out (`shards`)."""

    share: int
    column: Any

    @property
    def nbytes(self) -> int: ...

    def home(self, device: torch.device, *, pinned: bool) -> Any: ...

    def cut(self, n: int, whole: Tensor, rank: int | None = None) -> Tensor: ...

    def cut_state(self, stage: Any) -> None: ...

    def norm(self, grads: Sequence[Tensor | None]) -> Tensor: ...

    def gather(self, mine: Tensor, whole: Tensor) -> None: ...

    def scatter(
        self, grads: Sequence[Tensor | None], number: float, version: int
    ) -> tuple[list[Tensor | None], float, int]: ...

    def whole(self, tensors: Mapping[str, Tensor], keep: Any) -> dict[str, Tensor]: ...

    def pieces(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]: ...

    def fits(self, name: str, tensor: Tensor) -> bool: ...


class Repetition(Protocol):
    """A forward that B does once more (`recompute`)."""

    @property
    def stream(self) -> Tensor | None: ...

    @property
    def buffers(self) -> dict[str, Tensor]: ...

    @property
    def modes(self) -> tuple[bool, ...]: ...

    @property
    def numbers(self) -> Any: ...

    @property
    def autocast(self) -> Any: ...

    def __call__(self, stage: Any, flight: Any) -> Any: ...


class StackedFlight(Protocol):
    """What F of a stage in a stack has left to B."""

    @property
    def kind(self) -> Any: ...

    def tensors(self, mb: int) -> list[Tensor]: ...


class StageStack(Protocol):
    """Stages that run as one (`vectorized/stack`)."""

    stages: Any
    first: int
    numbers: list[int]
    rows: Any
    stash: Any
    spare: list[Tensor]

    @property
    def held(self) -> int: ...

    @property
    def beside(self) -> int: ...

    @property
    def proved(self) -> bool: ...

    @property
    def one_kind(self) -> Any: ...

    def renew(self) -> None: ...

    def restart(self, stage: Any) -> None: ...

    def restore(self, stage: Any, mb: int, kind: Any, values: Any) -> Any: ...
