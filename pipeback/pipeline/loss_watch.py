"""Loss watch: says once that a loss is NaN, and ends training after three in a row.

A loss on the CPU is looked at when it comes. No work waits for one that is not there yet, or that is on a device: lazy
losses are looked at once they are known, and others are copied to the host sixteen at a time, beside the work.
"""

from __future__ import annotations

import math
import warnings
from collections import deque

import torch
from torch import Tensor

from pipeback.runtime.lazy_loss import LazyLoss
from pipeback.tensors import accelerators

ROW = 3  # NaN losses in a row that end training
AT_ONCE = 16
REMEMBERED = 4096
CURE = (
    "lower the learning rate, set clip_norm=1.0, or, if the rate was chosen for larger updates, say for which by "
    "reference_batch="
)


class LossWatch:
    """Looks at the losses of a training, in their order.

    stops: whether three NaN in a row raise a FloatingPointError. what: what has a loss, in messages. cure: what to do.
    """

    def __init__(self, stops: bool, what: str = "push", cure: str = CURE) -> None:
        self._stops, self._what, self._cure = stops, what, cure
        self._row, self._told = 0, False
        self._coming: deque[tuple[int, Tensor]] = deque(maxlen=REMEMBERED)
        self._copied: deque[tuple[list[int], Tensor, torch.Event]] = deque()

    def see(self, number: int, loss: Tensor) -> None:
        """Look at the loss of this push or batch, and at earlier ones that have become known."""
        if not self._coming and not isinstance(loss, LazyLoss) and loss.device.type == "cpu":
            self._judge(number, loss.item())
            return
        self._coming.append((number, loss))
        known = self._known()
        while self._copied and self._copied[0][2].query():
            numbers, values, _ = self._copied.popleft()
            for n, value in zip(numbers, values.tolist(), strict=True):
                self._judge(n, value)
        if known and known[0][1].device.type == "cpu":
            for n, value in known:
                self._judge(n, value.item())
        elif known:
            self._copy(known)

    def mark(self) -> tuple[int, list[tuple[int, Tensor]], list[tuple[list[int], Tensor, torch.Event]]]:
        """What is to be remembered to come back to where it stands now."""
        return self._row, list(self._coming), list(self._copied)

    def go_back(self, mark: tuple[int, list[tuple[int, Tensor]], list[tuple[list[int], Tensor, torch.Event]]]) -> None:
        """Forget the losses since the mark, whose pushes will be trained again."""
        self._row = mark[0]
        self._coming, self._copied = deque(mark[1], maxlen=REMEMBERED), deque(mark[2])

    def _known(self) -> list[tuple[int, Tensor]]:
        """Take the losses that are there: as many as there are on the CPU, of others sixteen or none."""
        found: list[tuple[int, Tensor]] = []
        seen = 0
        for number, loss in self._coming:
            known = loss.known if isinstance(loss, LazyLoss) else True
            if known is False:
                break
            seen += 1
            if known:
                found.append((number, loss.value() if isinstance(loss, LazyLoss) else loss))
        if found and found[0][1].device.type != "cpu" and len(found) < AT_ONCE:
            return []
        for _ in range(seen):
            self._coming.popleft()
        return found

    def _copy(self, losses: list[tuple[int, Tensor]]) -> None:
        """Begin to copy these losses from their device."""
        numbers, values = [n for n, _ in losses], torch.stack([loss for _, loss in losses])
        if not accelerators.has_streams(values.device):
            for n, value in zip(numbers, values.tolist(), strict=True):
                self._judge(n, value)
            return
        host = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
        self._copied.append((numbers, host, accelerators.current(values.device).record_event()))

    def _judge(self, number: int, value: float) -> None:
        if not math.isnan(value):
            self._row = 0
            return
        self._row += 1
        if self._stops and self._row == ROW:
            self._row = 0
            numbers = f"{number - 2}, {number - 1} and {number}"
            raise FloatingPointError(
                f"the losses of {self._what} {numbers} are NaN, and so are weights, probably: load an earlier state, "
                f"and {self._cure}; debug=pipeback.Debug(stop_at_nan=False) trains on"
            )
        if not self._told:
            self._told = True
            then = f"; {ROW} in a row end the training" if self._stops else ""
            warnings.warn(
                f"the loss of {self._what} {number} is NaN: {self._cure}{then} (this is said once)", stacklevel=4
            )
