"""Compares fits whose weights come from host memory: over two devices and in two threads with fits on one device, with
stages one by one, and as one.
"""

from __future__ import annotations

from pipeback.recipes.benches.lightning_devices import Fit, compare

AHEAD = 7  # stages that a device fetches ahead
FITS = (
    Fit("one device", ahead=AHEAD),
    Fit("two threads", workers=2, ahead=AHEAD),
    Fit("two devices", devices=2, ahead=AHEAD),
    Fit("one device, as one", vectorize=True, ahead=AHEAD),
    Fit("two threads, as one", workers=2, vectorize=True, ahead=AHEAD),
    Fit("two devices, as one", devices=2, vectorize=True, ahead=AHEAD),
)


def main(repeats: int) -> None:
    """Print a table of the fits, of which those of a turn follow each other."""
    print("Lightning with `pb`, batches of 64 micro-batches of one sample, and weights in host memory. Each device or")
    print(f"thread fetches {AHEAD} stages ahead (`prefetch={AHEAD}`); a device is a process with a core.\n")
    compare(FITS, repeats)
