"""Variants: the forms of micro-batches that the stages of a traced model know, and the marks that tell them apart.

Forms with the same shapes and types, but other numbers beside their tensors or another branch, are variants of one key.
So are forms that differ where they come in and no more where they reach a later stage (an optional mask, say).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeback.splitting.branches import MOST, mark
from pipeback.splitting.input_forms import Key
from pipeback.splitting.known_forms import Known
from pipeback.tensors.structures import Form


class Variants:
    """What is known of each key. model: the class of the model, for messages."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._ways: dict[Key, list[Known]] = {}  # by the key of a micro-batch without its mark
        self._marked: dict[Key, Known] = {}  # by its key with the mark, if it has one

    def of(self, key: Key) -> Sequence[Known]:
        """Return the variants of this key. key: that of a micro-batch without its mark."""
        return self._ways.get(key, ())

    def output(self, key: Key) -> Form:
        """Return the form of the model's output. key: that of a micro-batch with its mark."""
        return self._marked[key].output

    def add(self, key: Key, marked: Key, known: Known) -> None:
        """Add a variant, by its key without the mark and with it."""
        self._ways.setdefault(key, []).append(known)
        self._marked[marked] = known

    def marked(self, key: Key, known: Known) -> Known:
        """Return a new variant of this key with the mark that it needs. Raises ValueError if there are too many."""
        others = self.of(key)
        if len(others) == MOST:
            raise known.too_many(self._model)
        differs = any(o.inputs != known.inputs for o in others)
        if not known.decisions and not differs:
            return known
        taken = [o.mark for o in others if o.mark is not None]
        return known._replace(mark=mark(known.decisions, taken, known.inputs.constants if differs else ()))

    def apart(self, key: Key, known: Known) -> Known:
        """Return a variant with a mark that no other one has, since a later stage would take it for another."""
        taken = [o.mark for ways in self._ways.values() for o in ways if o.mark is not None]
        own = () if known.mark is None else (known.mark,)
        return known._replace(mark=mark(known.decisions, [*taken, *own], [*known.inputs.constants, *key[2:]]))

    def plain(self, settings: Mapping[int, bool]) -> list[dict[str, Any]]:
        """Return those of these settings as plain values, for a saved state.

        settings: by `AttributeReads.number`, whether autograd records.
        """
        return [
            known.plain(training, settings[setting], autocast, tensors)
            for (training, (setting, autocast), *tensors), ways in self._ways.items()
            if setting in settings
            for known in ways
        ]

    def hold(self, saved: Sequence[Mapping[str, Any]], settings: Mapping[int, bool]) -> bool:
        """Whether all these forms of a saved state are known, with the marks that they have there."""
        mine = self.plain(settings)
        return all(form in mine for form in saved)

    def clear(self) -> None:
        """Forget all."""
        self._ways.clear()
        self._marked.clear()
