"""Weight hooks: hooks on the user's weights, which copies of these in further replicas have, too, in the same order.

torch copies a module without the hooks on its weights. Each replica calls them with the gradients of its micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from pipeback.private import handles, hooks_on
from pipeback.tensors.copies import copy_weight_hooks


class WeightHooks:
    """modules: each module of the first replica with those of the others that stand for it."""

    def __init__(self, modules: Sequence[tuple[nn.Module, ...]]) -> None:
        first, *others = zip(*modules, strict=True) if modules else [()]
        self._known: list[dict[int, Any]] = [dict(zip(map(id, first), twins, strict=True)) for twins in others]
        self._weights: list[tuple[Tensor, list[Tensor]]] = [
            (p, [t for twin in twins if (t := twin._parameters[key]) is not None])
            for own, *twins in (modules if others else ())
            for key, p in own._parameters.items()
            if p is not None
        ]
        self._count: object = None  # of all hooks anywhere, when these were last looked at
        self._heard: dict[int, Any] = {}  # hooks of the weights that had some then, by the number of the weight
        self._copied: dict[int, list[Any]] = {}  # the handles of their copies

    @property
    def due(self) -> bool:
        """Whether a hook was registered or removed since they were last copied."""
        if not self._weights or (not self._heard and self._count == handles()):
            return False
        if self._now() != self._heard:
            return True
        self._count = handles()
        return False

    def copy(self) -> None:
        """Give the copies of the weights the hooks that the weights have now."""
        now = self._now()
        for n in now.keys() | self._heard.keys():
            if now.get(n) == self._heard.get(n):
                continue
            for handle in self._copied.pop(n, ()):
                handle.remove()
            p, twins = self._weights[n]
            pairs = zip(twins, self._known, strict=True)
            self._copied[n] = [each for t, known in pairs if n in now for each in copy_weight_hooks(p, t, known)]
        self._heard, self._count = now, handles()

    def _now(self) -> dict[int, Any]:
        """Those of weights that train; torch registers no hooks on others."""
        found = ((n, hooks_on(p)) for n, (p, _) in enumerate(self._weights) if p.requires_grad)
        return {n: (before, after) for n, (before, after) in found if before or after}
