"""The recurrences of the later methods: corrections of updates, rates and gradients, and predictions by the optimizer.

What a method keeps of its own lies in `kept`, by (stage, tensor): it changes with every update, and updates of a stage
come in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.laws.reference import RULES, Array, Moved, Options, Recurrence, Tensors, entering

Key = tuple[int, int]


class StalenessRates(Recurrence):
    """η κ / (1 + D)^p."""

    def __init__(self, *args: Any, power: float = 1.0, scale: float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.power, self.scale = power, scale

    def step(self, s: int, u: int, i: int, p: int, g: Array, options: Options) -> Moved:
        rate = options["lr"] * self.scale / (1 + self.delay(s)) ** self.power
        return super().step(s, u, i, p, g, {**options, "lr": rate})


class ErrorFeedback(Recurrence):
    """u = w − step(w), w ← w − u − T (u − u_before); the first u counts as its own forerunner, or comes after 0."""

    def __init__(self, *args: Any, horizon: float | None = None, first: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.horizon, self.first = horizon, first
        self.kept: dict[Key, Array] = {}

    def step(self, s: int, u: int, i: int, p: int, g: Array, options: Options) -> Moved:
        w = self.history[s][u].w[p]
        moved = super().step(s, u, i, p, g, options)
        update = w - moved.w
        before = self.kept.get((s, p), 0 * update if self.first else update)
        self.kept[s, p] = update
        t = self.delay(s) if self.horizon is None else self.horizon
        return moved._replace(w=w - update - t * (update - before))


class Stale(Recurrence):
    """B on what F used, which is also there at the update; one micro-batch an update."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ran: dict[int, Tensors] = {}
        self.kept: dict[Key, Any] = {}

    def version_backward(self, s: int, j: int) -> int:
        return self.version_forward(s, j)

    def forward_weights(self, s: int, u: int, options: Sequence[Options]) -> Tensors:
        self.ran[s] = super().forward_weights(s, u, options)
        return self.ran[s]

    def backward_weights(self, s: int, u: int, used: Tensors, options: Sequence[Options]) -> Tensors:
        return used


class DelayCompensation(Stale):
    """g + λ g² (w − w_F), λ a number or λ₀ / √(q + ε), q ← d q + (1 − d) g²."""

    def __init__(self, *args: Any, strength: float, adaptive: bool = False, decay: float = 0.95, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.strength, self.adaptive, self.decay = strength, adaptive, decay

    def step(self, s: int, u: int, i: int, p: int, g: Array, options: Options) -> Moved:
        factor: Any = self.strength
        if self.adaptive:
            q = self.kept[s, p] = self.decay * self.kept.get((s, p), 0) + (1 - self.decay) * g * g
            factor = self.strength / np.sqrt(q + 1e-7)
        g = g + factor * g * g * (self.history[s][u].w[p] - self.ran[s][p])
        return super().step(s, u, i, p, g, options)


class GapAware(Stale):
    """π = 1 + |w − w_F| / C; g and decay over π; C of the velocity, or of whole steps."""

    def __init__(self, *args: Any, decay: float = 0.999, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.decay = decay

    def step(self, s: int, u: int, i: int, p: int, g: Array, options: Options) -> Moved:
        w, sgd = self.history[s][u].w[p], self.rule is RULES["sgd"] and bool(options.get("momentum"))
        if not self.delay(s):
            return super().step(s, u, i, p, g, options)
        r, t, most = self.kept.get((s, p), (0.0, 0, 0.0))
        most = max(most, options["lr"])
        penalty: Any = 1.0
        if t:
            size = np.sqrt(r / (1 - self.decay**t)) + 1e-8
            penalty = 1 + abs(w - self.ran[s][p]) / (most * size if sgd else size)
        now = self.history[s][u]
        if self.rule is RULES["adamw"]:
            before = w * (1 - options["lr"] * options.get("weight_decay", 0) * (1 - penalty) / penalty)
            moved = self.rule(u, before, now.v[p], now.q[p], g / penalty, options)
        else:
            whole = entering(w, g, options) / penalty
            moved = self.rule(u, w, now.v[p], now.q[p], whole, {**options, "weight_decay": 0, "maximize": False})
        step = moved.v if sgd else w - moved.w
        self.kept[s, p] = self.decay * r + (1 - self.decay) * step * step, t + 1, most
        return moved


class Braking(Recurrence):
    """g (1 − ρ cos(g, v)) where D > 0."""

    def __init__(self, *args: Any, strength: float = 2.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.strength = strength

    def step(self, s: int, u: int, i: int, p: int, g: Array, options: Options) -> Moved:
        v = self.history[s][u].v[p]
        if self.delay(s):
            norms = np.sqrt((g * g).sum()) * np.sqrt((v * v).sum())
            g = g * (1 - self.strength * ((g * v).sum() / norms if norms else 0.0))
        return super().step(s, u, i, p, g, options)


class Predicted(Recurrence):
    """F on a prediction that is made with every update, and with `stash` B on the same."""

    def __init__(self, *args: Any, stash: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stash = stash
        self.shifts: dict[tuple[int, int], list[Array]] = {}  # of (stage, version), by tensor

    def version_backward(self, s: int, j: int) -> int:
        return self.version_forward(s, j) if self.stash else super().version_backward(s, j)

    def backward_weights(self, s: int, u: int, used: Tensors, options: Sequence[Options]) -> Tensors:
        return used if self.stash else super().backward_weights(s, u, used, options)

    def step(self, s: int, u: int, i: int, p: int, g: Array, options: Options) -> Moved:
        moved = super().step(s, u, i, p, g, options)
        self.shifts.setdefault((s, u + 1), []).append(self.told(s, u, p, g, moved, options))
        return moved

    def told(self, s: int, u: int, p: int, g: Array, moved: Moved, options: Options) -> Array:
        """What is kept of update u for predictions."""
        raise NotImplementedError


class OptimizerPrediction(Predicted):
    """F on w − η D d, d the direction of the last step; groups of k: on what the first of the group runs on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, stash=True, **kwargs)

    def told(self, s: int, u: int, p: int, g: Array, moved: Moved, options: Options) -> Array:
        if self.rule in (RULES["adam"], RULES["adamw"]):
            b1, b2 = options.get("betas", (0.9, 0.999))
            first, second = moved.v / (1 - b1 ** (u + 1)), moved.q / (1 - b2 ** (u + 1))
            d = first / (np.sqrt(second) + options.get("eps", 1e-8))
        else:
            whole = entering(self.history[s][u].w[p], g, options)
            d = moved.v if options.get("momentum") else whole
            if self.rule is RULES["rmsprop"]:
                d = whole / (np.sqrt(moved.q) + options.get("eps", 1e-8))
        return d * options["lr"] if self.every and self.every > 1 else d

    def forward_weights(self, s: int, u: int, options: Sequence[Options]) -> Tensors:
        if self.every and self.every > 1:
            j = self.pushed - self.start
            u, rates = self.version_forward(s, j - j % self.every), [1.0] * len(options)
        else:
            rates = [o["lr"] for o in options]
        w = self.history[s][u].w
        along = self.shifts.get((s, u), [0 * x for x in w])
        return tuple(x - rate * self.delay(s) * d for x, rate, d in zip(w, rates, along, strict=True))


class DecayedPrediction(Predicted):
    """F on D steps of the optimizer without gradients, at the options of the last update."""

    def told(self, s: int, u: int, p: int, g: Array, moved: Moved, options: Options) -> Array:
        w, v, rate, decay = moved.w, moved.v, options["lr"], options.get("weight_decay", 0)
        b1, b2 = options.get("betas", (0.9, 0.999))
        for j in range(1, self.delay(s) + 1):
            if self.rule not in (RULES["adam"], RULES["adamw"]):  # a subclass of SGD is taken for it
                now = RULES["sgd"](u + j, w, v, moved.q, 0 * w, {**options, "maximize": False})
                w, v = now.w, now.v
                continue
            if self.rule is RULES["adamw"]:
                w = w * (1 - rate * decay)
            t = u + 1 + j
            w = w - rate * b1**j * moved.v / (1 - b1**t) / (np.sqrt(moved.q / (1 - b2**t)) + options.get("eps", 1e-8))
        return w - moved.w

    def forward_weights(self, s: int, u: int, options: Sequence[Options]) -> Tensors:
        w = self.history[s][u].w
        return tuple(x + d for x, d in zip(w, self.shifts.get((s, u), [0 * x for x in w]), strict=True))
