"""Versions: older versions of a stage's weights, kept as long as something needs them, and its scratch memory."""

from __future__ import annotations

from typing import NamedTuple

from pipeback.stages.flight import Flight
from pipeback.tensors.weight_list import WeightList, Weights, like

Flights = dict[int, Flight]  # by micro-batch, in the order of their forwards


class Due(NamedTuple):
    """The weights that the coming update is handed: those on which the forward of a micro-batch ran."""

    mb: int
    version: int
    owned: Weights | None  # shifted weights, which are no version


class Versions:
    """The kept copies of the weights, by version, which counts updates of the stage.

    history: how many versions back a later forward may ask for. hands: whether updates are handed the weights on which
    a forward ran, so that these are kept until then.
    """

    def __init__(self, history: int, hands: bool = False) -> None:
        self.history, self.hands = history, hands
        self.due: Due | None = None
        self.kept: dict[int, Weights] = {}
        self.scratch: Weights | None = None  # room for the newest weights, while shifted ones lie in their place
        self.peak = 1.0  # the most copies of the weights that were held at once
        self._spare: WeightList | None = None  # memory of a version that was dropped, for the next one that is kept
        self._owned = False  # whether some flights have shifted weights of their own

    def keep(self, version: int, weights: Weights, flights: Flights) -> Weights | None:
        """Before U: drop what nothing needs; return where to copy the newest, `version`, if it will be needed."""
        self.release(version + 1, version, flights)
        copy = None
        if version not in self.kept and weights and (self.history or _needed(version, version, flights)):
            copy = self.kept[version] = like(weights) if self._spare is None else self._spare
        self._spare = None
        self.note_copies(flights)
        return copy

    def release(self, at: int, newest: int, flights: Flights) -> None:
        """Drop the versions that no flight uses and that, at version `at`, no later forward may ask for."""
        kept = self.kept
        while kept:
            old = next(iter(kept))  # as they were kept, and as flights end: the oldest first
            due = self.due is not None and old == self.due.version
            if old >= at - self.history or due or _needed(old, newest, flights):
                return
            dropped = kept.pop(old)
            self._spare = dropped if isinstance(dropped, WeightList) else None  # others may have left the memory

    def hand(self, mb: int, flight: Flight) -> None:
        """B: keep what the forward of this micro-batch ran on for the coming update; of several, the first's."""
        if self.hands and self.due is None:
            self.due = Due(mb, flight.version, flight.owned)

    def handed(self, newest: int, weights: Weights) -> Weights:
        """The weights that were kept for the coming update; the list `weights` itself if they are the newest."""
        assert self.due is not None
        if self.due.owned is not None:
            return self.due.owned
        return weights if self.due.version == newest else self.past(self.due.version, newest)

    def hand_back(self, newest: int, flights: Flights) -> None:
        """After the update that made `newest`: keep no longer what it was handed."""
        self.due = None
        self.release(newest, newest, flights)
        self._spare = None  # the next one is kept long after this

    def hand_over(self, due: Due | None) -> None:
        """Replace what is kept for the coming update; None: nothing is."""
        self.due = due

    def past(self, version: int, newest: int) -> Weights:
        """The kept copy of this version. Raises RuntimeError if there is none."""
        try:
            return self.kept[version]
        except KeyError:
            kept = [*sorted(self.kept), newest]
            raise RuntimeError(
                f"version {version} was asked for, but only {kept} are kept; raise Method.history"
            ) from None

    def own(self, flight: Flight, weights: Weights) -> None:
        """Keep the weights on which the forward of a micro-batch ran with its flight, for its backward."""
        flight.owned, self._owned = weights, True

    def put(self, kept: dict[int, Weights]) -> None:
        """Replace the kept versions by these."""
        self.kept, self._spare = kept, None

    def lay(self, scratch: Weights | None) -> None:
        """Use this memory as scratch; its contents do not matter between operations."""
        self.scratch = scratch

    def copies(self, flights: Flights) -> float:
        """Copies of the weights held now: the live one, scratch, kept versions and shifted weights in flight."""
        owned = sum(f.owned is not None for f in flights.values()) if self._owned else 0
        owned += self.due is not None and self.due.owned is not None
        return 1.0 + (self.scratch is not None) + len(self.kept) + owned

    def note_copies(self, flights: Flights, copies: float | None = None) -> None:
        """Note how many copies there are now, where `copies` does not say."""
        self.peak = max(self.peak, self.copies(flights) if copies is None else copies)


def _needed(version: int, newest: int, flights: Flights) -> bool:
    """Whether a flight uses this version, the oldest that is kept or the newest. Later flights have later ones."""
    last = version == newest
    for flight in reversed(flights.values()) if last else flights.values():
        if flight.version < version if last else flight.version > version:
            return False
        if flight.version == version and flight.owned is None:
            return True
    return False
