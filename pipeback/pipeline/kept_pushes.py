"""Kept pushes: what has to be known of a push to train on it again, and its loss, which the user may still hold."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from torch import Tensor

from pipeback.errors import PushLeftOut
from pipeback.runtime.lazy_loss import LazyLoss
from pipeback.runtime.loop import Batch
from pipeback.stages.joint_optimizer import Options
from pipeback.stages.module_settings import Settings
from pipeback.tensors import accelerators
from pipeback.tensors.batches import copied

Heal = Callable[["HandedLoss", Tensor, Exception], None]
Clip = tuple[float | None, float | None]


class HandedLoss:
    """The loss of a push. A value that was read stays; otherwise it is that of the last time the push was trained.

    heal: a method that is called when the loss has failed. It returns if the push was trained again, and else raises.
    """

    def __init__(self, heal: Heal) -> None:
        self._heal = weakref.WeakMethod(heal)
        self.now: Tensor | None = None
        self.error: PushLeftOut | None = None  # why it will never be known
        self._read: Tensor | None = None

    def put(self, loss: Tensor) -> Tensor:
        """Take the loss of the push as it is trained now; return what the user gets."""
        self.now = loss
        return self.lazy() if isinstance(loss, LazyLoss) else loss

    def lazy(self) -> LazyLoss:
        return LazyLoss(self._value, self._known, self._asked)

    def _asked(self) -> None:
        if isinstance(self.now, LazyLoss):
            self.now.asked()

    def _known(self) -> bool | None:
        if self._read is not None or self.error is not None:
            return True if self.error is None else None
        return self.now.known if isinstance(self.now, LazyLoss) else False

    def _value(self) -> Tensor:
        while self._read is None:
            if self.error is not None:
                raise self.error
            now = self.now
            assert isinstance(now, LazyLoss)
            try:
                self._read = now.value()
            except PushLeftOut:
                raise
            except Exception as error:
                heal = self._heal()
                if heal is None:
                    raise
                heal(self, now, error)
        return self._read


class KeptPush:
    """A push that may have to be trained again, with copies of its data and what was in force when it came.

    number: how many pushes had come before it. first: the number of its first micro-batch; count: how many each replica
    has. clip: the bounds on gradients.
    """

    def __init__(
        self, batches: Sequence[Batch], number: int, first: int, count: int, options: Options, settings: Settings,
        clip: Clip, loss: HandedLoss,
    ) -> None:  # fmt: skip
        self.batches: Sequence[Batch] = [(copied(x), copied(y), size) for x, y, size in batches]
        self.number, self.first, self.count, self.options, self.settings = number, first, count, options, settings
        self.clip, self.loss, self.autocast = clip, loss, accelerators.casting()

    def __contains__(self, mb: object) -> bool:
        return isinstance(mb, int) and self.first <= mb < self.first + self.count
