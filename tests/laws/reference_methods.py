"""What each method puts in the place of the reference's recurrence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.laws.reference import RULES, Array, Moved, Options, Recurrence, Snapshot, Tensors, spiked, spiked_adam


class PipeDream(Recurrence):
    """B on the weights that F used. Vertical sync: every stage on the version that stage 0 has at F."""

    def __init__(self, *args: Any, vertical_sync: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.vertical_sync = vertical_sync

    def delay(self, s: int) -> int:
        return super().delay(0 if self.vertical_sync else s)

    def version_forward(self, s: int, j: int) -> int:
        return super().version_forward(0 if self.vertical_sync else s, j)

    def version_backward(self, s: int, j: int) -> int:
        return self.version_forward(s, j)

    def backward_weights(self, s: int, u: int, used: Tensors, options: Sequence[Options]) -> Tensors:
        return used


class TwoBW(PipeDream):
    """PipeDream-2BW: F and B on version max(⌊j/k⌋ − 1, 0), the same at every stage: D is one group."""

    def delay(self, s: int) -> int:
        return 1

    def version_forward(self, s: int, j: int) -> int:
        return max(self.done(j) - 1, self.base)


class PipeMare(Recurrence):
    """T1: η / τ^p, τ = max(1, (slack(S−1−s) + 1)/N), p = 1 − min(k/K, 1), k own updates since the end of T3.
    T2: δ ← γδ + (1−γ)(w_new − w_old), γ = d^(1/D);  B on w − D δ.
    T3: the first `warmup` micro-batches in flushes of N, T1 and T2 the identity but δ tracked.
    """

    def __init__(
        self,
        *args: Any,
        anneal: int,
        t1: bool = True,
        t2: bool = True,
        warmup: int = 0,
        decay: float = 0.135,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.anneal, self.t1, self.t2, self.warmup, self.decay = anneal, t1, t2, warmup, decay
        self.flows_from = 0  # updates made by the warm-up

    def version_forward(self, s: int, j: int) -> int:
        return self.done(j if self.start + j < self.warmup else j - self.ahead(s))

    def backward_weights(self, s: int, u: int, used: Tensors, options: Sequence[Options]) -> Tensors:
        now = self.history[s][u]
        if not self.t2 or self.pushed < self.warmup:
            return now.w
        return tuple(w - self.delay(s) * d for w, d in zip(now.w, now.delta, strict=True))

    def step(self, s: int, u: int, i: int, p: int, g: Array, options: Options) -> Moved:
        if self.t1 and i >= self.warmup:
            assert self.every
            tau = max(1.0, (self.ahead(s) + 1) / self.every)
            power = 1 - min((u - self.flows_from) / self.anneal, 1)
            options = {**options, "lr": options["lr"] / tau**power}
        return super().step(s, u, i, p, g, options)

    def displaced(self, s: int, u: int, moved: Tensors) -> Tensors:
        if not self.delay(s):
            return super().displaced(s, u, moved)
        gamma = self.decay ** (1 / self.delay(s))
        now = self.history[s][u]
        return tuple(gamma * d + (1 - gamma) * (new - old) for d, new, old in zip(now.delta, moved, now.w, strict=True))

    def push(self, x: Array, target: Array, options: Snapshot) -> float:
        loss = super().push(x, target, options)
        if self.pushed == self.warmup:  # the last flush leaves the pipeline empty
            self.drain()
            self.flows_from = self.base
        return loss

    def weights(self) -> list[Tensors]:
        if self.pushed < self.warmup:
            return [self.history[s][self.done(self.pushed - self.start)].w for s in range(self.stages)]
        return super().weights()


class SpecTrain(Recurrence):
    """v1: F on w − h_F η v, B on w − h_B η v, h_F = D + ⌊s/2⌋, h_B = ⌊s/2⌋.  v2: F on w − D η v, kept for B.

    h_F at any slack ≥ 1: stage s starts F(i) one unit before B(i − D) and its neighbour upstream starts B(i) one unit
    later, a micro-batch every two units. So until B(i) at stage 0, s units after B(i) at s, it ends the updates
    i − D, …, i + ⌊s/2⌋ − 1 after F(i) began, those from i on after B(i) began.
    """

    def __init__(self, *args: Any, version: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.version = version

    def version_backward(self, s: int, j: int) -> int:
        return super().version_backward(s, j) if self.version == 1 else self.version_forward(s, j)

    def _predicted(self, s: int, u: int, horizon: int, options: Sequence[Options]) -> Tensors:
        now = self.history[s][u]
        return tuple(w - horizon * o["lr"] * v for w, v, o in zip(now.w, now.v, options, strict=True))

    def forward_weights(self, s: int, u: int, options: Sequence[Options]) -> Tensors:
        return self._predicted(s, u, self.delay(s) + (s // 2 if self.version == 1 else 0), options)

    def backward_weights(self, s: int, u: int, used: Tensors, options: Sequence[Options]) -> Tensors:
        return self._predicted(s, u, s // 2, options) if self.version == 1 else used


class Corrected(Recurrence):
    """LWP: F on w − η T v (`predict="velocity"`) or w + T (w_u − w_{u−1}) (`"weight"`), B on w. SC: the spiked step.

    predict without spike is LWP, spike alone SC, velocity and spike `cerebras`, weight and spike LWP^w + SC.
    horizon, spike_horizon: T of either, the delay D where None.
    """

    def __init__(
        self,
        *args: Any,
        predict: str | None = None,
        horizon: float | None = None,
        spike: bool = False,
        spike_horizon: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.predict, self.horizon, self.spike, self.spike_horizon = predict, horizon, spike, spike_horizon

    def forward_weights(self, s: int, u: int, options: Sequence[Options]) -> Tensors:
        now, before = self.history[s][u], self.history[s][max(u - 1, 0)]
        t = self.delay(s) if self.horizon is None else self.horizon
        if self.predict == "velocity":
            return tuple(w - o["lr"] * t * v for w, v, o in zip(now.w, now.v, options, strict=True))
        if self.predict == "weight":
            return tuple(w + t * (w - old) for w, old in zip(now.w, before.w, strict=True))
        return now.w

    def step(self, s: int, u: int, i: int, p: int, g: Array, options: Options) -> Moved:
        if not self.spike:
            return super().step(s, u, i, p, g, options)
        now = self.history[s][u]
        t = self.delay(s) if self.spike_horizon is None else self.spike_horizon
        if self.rule is not RULES["sgd"]:
            decoupled = self.rule is RULES["adamw"]
            return spiked_adam(t, decoupled, u, now.w[p], now.v[p], now.q[p], g, options)
        return spiked(t, u, now.w[p], now.v[p], now.q[p], g, options)
