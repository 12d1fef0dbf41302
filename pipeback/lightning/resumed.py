"""Resumed: the random state and loader states of a checkpoint, which a resumed fit restores at the right time."""

from __future__ import annotations

import warnings
from typing import Any

from pipeback.lightning import lightning_internals, random_state


class Resumed:
    """section: our part of the checkpoint; None: it has none. trainer: None if fit does not resume."""

    def __init__(self, section: dict[str, Any] | None = None, trainer: Any = None) -> None:
        self._draws: dict[str, Any] | None = None  # random state to restore when the interrupted epoch has begun
        self._loader_states: list[Any] = []  # of the training loaders, when fit begins between epochs
        if trainer is None:
            return
        if section is None:
            warnings.warn(
                "the checkpoint was not made by the pipeback strategy (or by one that had failed): weights and "
                "optimizer go on from it, and the pipeline fills anew",
                stacklevel=3,
            )
        elif section["mid_epoch"]:
            self._draws = section["random"]
        else:
            self._loader_states = lightning_internals.take_loader_states(trainer)

    def begin(self) -> None:
        """Restore the random state when training starts: making the iterator of the loader has drawn from it."""
        if self._draws is not None:
            random_state.load(self._draws)
            self._draws = None

    def at_end_of_epoch(self, dataloader: Any) -> None:
        """Make the next iterator of this training loader that of the next epoch.

        Between epochs Lightning gives a loader no state, or one at the end of its epoch. A sampler with a generator of
        its own needs that state: we load it and make an iterator at the end, so that the next one is of the next epoch.
        """
        if not self._loader_states:
            return
        state = self._loader_states.pop(0)
        if state and hasattr(dataloader, "load_state_dict"):
            draws = random_state.save()
            dataloader.load_state_dict(state)
            iter(dataloader)
            random_state.load(draws)
