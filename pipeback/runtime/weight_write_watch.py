"""Weight write watch: notices what the user writes into weights and buffers between operations, as
`model.load_state_dict` does.

Micro-batches in flight run their backward on the new values, as they do after an update. Autograd would refuse that,
because its version counters count in-place changes (those of the library are not counted), so the counters are put
back.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from operator import is_

from pipeback.private import keep_versions
from pipeback.stages.stage import Stage

OWED = (
    "a weight or a buffer was written into while work of earlier pushes was left, which runs on the new values; call "
    "pipe.wait() before it is written into, so that they hold from the next push on"
)


class WeightWriteWatch:
    """Watches the parameters and buffers of these stages. owed: whether work is left of earlier pushes."""

    def __init__(self, stages: Iterable[Stage]) -> None:
        self._stages = list(stages)
        self.owed: Callable[[], bool] = lambda: False
        for stage in self._stages:
            stage.masters.adopt()
        modules = [m for stage in self._stages for m in stage.module.modules()]
        self._seen: list[int] = []
        self._homes = [(m._buffers, key) for m in modules for key in m._buffers]
        self._take()

    def look(self) -> None:
        """Before operations: copy to the masters what was written since `remember`, and put the counters back."""
        if [t._version for t in self._tensors] != self._seen:
            if self.owed():
                warnings.warn(OWED, stacklevel=9)
            slots = [stage.home.slot for stage in self._stages if stage.home.slot is not None]
            for stage in self._stages:
                stage.masters.adopt()
            for slot in slots:
                slot.leave_rest()
            self._hidden.__exit__(None, None, None)
            for slot in slots:
                slot.come_to_rest()
            for stage in self._stages:
                stage.masters.adopted()

    def remember(self) -> None:
        """After operations, which may have changed buffers; they or the user may have replaced some."""
        if not all(map(is_, [home.get(key) for home, key in self._homes], self._buffers)):
            self._take()
            return
        seen = [t._version for t in self._tensors]
        if seen != self._seen:
            self._seen, self._hidden = seen, keep_versions(self._tensors)

    def _take(self) -> None:
        """Take the parameters and buffers that there are now."""
        self._buffers = [home.get(key) for home, key in self._homes]
        weights = (p for stage in self._stages for p in stage.module.parameters())
        self._tensors = (*weights, *(buffer for buffer in self._buffers if buffer is not None))
        self._seen, self._hidden = [t._version for t in self._tensors], keep_versions(self._tensors)
