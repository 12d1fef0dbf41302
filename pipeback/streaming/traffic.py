"""Traffic: what streaming has moved and waited for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Traffic(NamedTuple):
    """What streaming has moved and waited for."""

    weights_in: int = 0  # bytes of weights copied to the device
    gradients_out: int = 0  # bytes of gradients, and of partial sums, that left the device
    sums_in: int = 0  # bytes of partial sums that came back
    gathered: int = 0  # bytes of weights that came from other ranks' stores
    scattered: int = 0  # bytes of gradients that went to other ranks
    fetches: int = 0  # times that a stage's weights came
    stall: float = 0.0  # seconds in which computing waited for weights, gradients or the store
    seconds: float = 0.0  # seconds of all that was run
    peak_stages: int = 0  # stages on the device at most, of one worker
    peak_bytes: int = 0  # bytes of weights on the device at most
    read: int = 0  # bytes read from files
    written: int = 0  # bytes written to files

    def since(self, before: Traffic) -> Traffic:
        """What has come to it since; peaks are of all the time."""
        more = {name: getattr(self, name) - getattr(before, name) for name in Traffic._fields if "peak" not in name}
        return self._replace(**more)


def together(parts: Iterable[Traffic]) -> Traffic:
    """Of several workers: sums, the stages of whoever has most at once, and the time of whoever took longest."""
    some = list(parts) or [Traffic()]
    sums = {name: sum(getattr(part, name) for part in some) for name in Traffic._fields}
    return Traffic(**sums)._replace(
        peak_stages=max(part.peak_stages for part in some), seconds=max(part.seconds for part in some)
    )
