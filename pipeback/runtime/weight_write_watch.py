"""Weight write watch: notices what the user writes into weights and buffers between operations, as
`model.load_state_dict` does.

Micro-batches in flight run their backward on the new values, as they do after an update. Autograd would refuse that,
because its version counters count in-place changes (those of the library are not counted), so the counters are put
back.
"""

from __future__ import annotations

from collections.abc import Iterable

from pipeback.private import keep_versions
from pipeback.stages.stage import Stage


class WeightWriteWatch:
    """Watches the parameters and buffers of these stages."""

    def __init__(self, stages: Iterable[Stage]) -> None:
        self._stages = list(stages)
        for stage in self._stages:
            stage.masters.adopt()
        modules = [stage.module for stage in self._stages]
        self._tensors = tuple(t for module in modules for t in (*module.parameters(), *module.buffers()))
        self._hidden = keep_versions(self._tensors)
        self._seen = [t._version for t in self._tensors]

    def look(self) -> None:
        """Before operations: copy to the masters what was written since `remember`, and put the counters back."""
        if [t._version for t in self._tensors] != self._seen:
            for stage in self._stages:
                stage.masters.adopt()
            self._hidden.__exit__(None, None, None)
            for stage in self._stages:
                stage.masters.adopted()

    def remember(self) -> None:
        """After operations, which may have changed buffers."""
        seen = [t._version for t in self._tensors]
        if seen != self._seen:
            self._seen, self._hidden = seen, keep_versions(self._tensors)
