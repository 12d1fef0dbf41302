"""Written: what somebody has written into weights and buffers between operations, `model.load_state_dict` above all.

What is in flight goes backward on the new values, as it does on those of an update. Autograd counts changes in place,
which the library's own do not add to, and would refuse these.
"""

from __future__ import annotations

from collections.abc import Iterable

from pipeback.private import keep_versions
from pipeback.stages.stage import Stage


class Written:
    """Of the parameters and buffers of these stages."""

    def __init__(self, stages: Iterable[Stage]) -> None:
        self._stages = list(stages)
        for stage in self._stages:
            stage.adopt()
        modules = [stage.module for stage in self._stages]
        self._tensors = tuple(t for module in modules for t in (*module.parameters(), *module.buffers()))
        self._hidden = keep_versions(self._tensors)
        self._seen = [t._version for t in self._tensors]

    def look(self) -> None:
        """Before operations: masters take up what was written since `remember`, and autograd does not count it."""
        if [t._version for t in self._tensors] != self._seen:
            for stage in self._stages:
                stage.adopt()
            self._hidden.__exit__(None, None, None)
            for stage in self._stages:
                stage.adopted()

    def remember(self) -> None:
        """After operations, which may have changed buffers."""
        seen = [t._version for t in self._tensors]
        if seen != self._seen:
            self._seen, self._hidden = seen, keep_versions(self._tensors)
