"""Rows: keeps the weights of stages that are alike, and the state of their optimizers, as rows of tensors.

The stages' own weights and state are these rows. `row_tensors` computes with them; the steps are in `sgd_rows` and
`adam_rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor

from pipeback.stages.joined_homes import JoinedHomes
from pipeback.stages.moving_weights import moving
from pipeback.stages.stage import Stage
from pipeback.vectorized.steps.adam_rows import STEP
from pipeback.vectorized.steps.row_tensors import RowTensors


class Rows:
    """The weights of `stages`, upstream first, as tensors (n, …); the stages' own weights become rows of these.

    With one stage alone (n = 1) the tensors are the stage's own, without the dimension of the rows. Where stages live
    in a store, `weights` are the rows of their place on the device, which has memory only while they are there.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = list(stages)
        self.trained = [n for n, p in enumerate(stages[0].module.parameters()) if p.requires_grad]
        self.streamed = stages[0].home.slot is not None  # whether they live in a store, which steps each stage's own
        self.alone = False  # whether nobody else can change the optimizers' state now
        self._kept: list[Any] = []
        self._names: tuple[str, ...] = ()  # of what is kept: momentum may be set later on
        self._state: dict[str, tuple[list[Tensor], list[list[Tensor]]]] = {}
        self._first_rows: Sequence[Tensor | None] = [None] * len(self.stages)  # rows of the first weight's momentum
        self._take(self._whole())

    def _take(self, weights: list[Tensor]) -> None:
        several = self.streamed or len(self.stages) > 1
        self.whole = RowTensors(weights, self.trained, self._buffers(), self.beside, several=several)

    @property
    def weights(self) -> list[Tensor]:
        """All weights, (n, …) each."""
        return self.whole.weights

    @property
    def stepped(self) -> list[Tensor]:
        """Those that train."""
        return self.whole.stepped

    @torch.no_grad()
    def _whole(self) -> list[Tensor]:
        if self.streamed:
            return JoinedHomes(self.stages).rows
        if len(self.stages) == 1:
            return [p.data for p in self.stages[0].module.parameters()]
        found = []
        with moving(self.stages):
            for same in zip(*(list(stage.module.parameters()) for stage in self.stages), strict=True):
                whole = torch.stack([p.data for p in same])
                for p, row in zip(same, whole.unbind(), strict=True):
                    p.data = row
                found.append(whole)
            for stage in self.stages:
                stage.moved()
        return found

    def _buffers(self) -> list[Tensor]:
        """The buffers for shifted weights, if the method uses them; the stages' own buffers become rows of these."""
        if not any(stage.versions.scratch for stage in self.stages):
            return []
        wholes, rows = _laid([stage.versions.scratch or () for stage in self.stages])
        for stage, mine in zip(self.stages, rows, strict=True):
            stage.versions.lay(mine)
        return wholes

    @torch.no_grad()
    def lay(self, change: Callable[[Tensor], Tensor]) -> None:
        """Lay the weights of a single stage in memory as this function does."""
        (stage,) = self.stages
        with moving(self.stages):
            for p in stage.module.parameters():
                p.data = change(p.data)
            stage.moved()
        if stage.versions.scratch is not None:
            stage.versions.lay([torch.empty_like(p) for p in stage.params])
        self._take(self._whole())

    @torch.no_grad()
    def lend(self, there: int) -> None:
        """Give the stages whose weights are not on the device those of one that is, so that graphs can be checked for
        all rows; their own come before they are used. there: its row.
        """
        for r, stage in enumerate(self.stages):
            if r != there and stage.home.slot is not None and stage.home.slot.vacant:
                for whole in self.weights:
                    whole[r].copy_(whole[there])

    def of(self, whole: Tensor) -> Sequence[Tensor]:
        """Return the rows of a tensor (n, …)."""
        return _rows(whole, len(self.stages))

    def state(self, name: str) -> list[Tensor]:
        """Return the method's state of this name as rows (n, …); the stages' own state becomes these rows."""
        own = [stage.state[name] for stage in self.stages]
        found = self._state.get(name)
        if found is None or not all(map(is_, chain(*own), chain(*found[1]))):
            found = self._state[name] = _laid(own)
            for stage, mine in zip(self.stages, found[1], strict=True):
                stage.put_state({**stage.state, name: mine})
        return found[0]

    def beside(self, *names: str) -> list[Any]:
        """Return the state of all optimizers as rows; their own state becomes these rows.

        `STEP` is one matrix (weights, n); every other entry is a list of tensors (n, …).
        """
        if not self.stepped:
            return [[] for _ in names]
        if names != self._names or (not self.alone and self._replaced(names[0])):
            steps = torch.zeros(len(self.stepped), len(self.stages), device="cpu")
            kept: list[Any] = [steps if name == STEP else list(map(torch.zeros_like, self.stepped)) for name in names]
            for m in range(len(self.stepped)):
                rows = [
                    whole[m].unbind() if name == STEP else self.of(whole[m])
                    for name, whole in zip(names, kept, strict=True)
                ]
                for stage, *mine in zip(self.stages, *rows, strict=True):
                    entry = stage.optimizer.state.get(stage.weights[m], {})
                    for name, row in zip(names, mine, strict=True):
                        if entry.get(name) is not None:
                            row.copy_(entry[name])
                    # a new dictionary, so that caches of the old one are not used
                    stage.optimizer.state[stage.weights[m]] = {**entry, **dict(zip(names, mine, strict=True))}
                self._first_rows = rows[0] if not m else self._first_rows
            self._kept, self._names = kept, names
            for stage in self.stages:
                stage.weights.forget_velocities()
        return self._kept

    def _replaced(self, name: str) -> bool:
        """Whether an optimizer has another entry of this name for the first weight than the row, or none."""
        return any(
            row is None or stage.optimizer.state.get(stage.weights[0], {}).get(name) is not row
            for stage, row in zip(self.stages, self._first_rows, strict=True)
        )


def _laid(lists: Sequence[Sequence[Tensor]]) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Return lists of tensors of equal shapes, one list per stage, as tensors (n, …), and as lists of their rows."""
    if len(lists) == 1:
        return list(lists[0]), [list(lists[0])]
    wholes = [None if same[0] is None else torch.stack(list(same)) for same in zip(*lists, strict=True)]
    apart = ([None] * len(lists) if whole is None else whole.unbind() for whole in wholes)
    return wholes, [list(rows) for rows in zip(*apart, strict=True)]  # type: ignore[return-value]


def _rows(whole: Tensor, count: int) -> Sequence[Tensor]:
    return (whole,) if count == 1 else whole.unbind()
