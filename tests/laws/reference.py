"""Training by the published equations in float64 numpy: a recurrence over micro-batches, without events or library.

    forward   z = x W_Fᵀ + b_F,  y = tanh z (last stage: y = z),  loss = mean (y − target)²
    backward  dz = g (1 − y²) with the y of the forward,  dW = dzᵀ x,  db = Σ dz,  dx = dz W_B
              recomputed: with y = tanh (x W_Bᵀ + b_B), x that of the forward, the last stage's loss as well
    update    g = (Σ over the group, in order) / k,  clipped,  then the rule of the optimizer

Micro-batch j, counted from when the pipeline was last empty with n₀ updates in the weights, at stage s of S:

    F(j) reads version n₀ + ⌊max(0, j − slack·(S−1−s)) / k⌋        B(j) reads version n₀ + ⌊j / k⌋

Both are at most what micro-batches before j have made. So micro-batch j can be taken forward, backward and into the
weights before j + 1 is looked at: time does not appear, only a history of versions for each stage, all of it kept.

    S stages, s stage, j micro-batch, k micro-batches an update (`every`), u updates = version, D delay in updates,
    w weights, v velocity, m momentum, η rate, g gradient as it enters v: after clipping, sign and L2 decay
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
Tensors = tuple[Array, ...]  # of one stage: W (out, in), b (out,)
Options = Mapping[str, Any]  # of one tensor: what its torch param group holds
Snapshot = Sequence[Sequence[Options]]  # options[stage][tensor] in force when a micro-batch was pushed


class Version(NamedTuple):
    """One stage after some number of updates."""

    w: Tensors
    v: Tensors  # torch's momentum_buffer, zero before the first step; Adam: exp_avg
    q: Tensors  # Adam: exp_avg_sq
    delta: Tensors  # PipeMare: average displacement


class Moved(NamedTuple):
    """One tensor after a step."""

    w: Array
    v: Array
    q: Array


def forward(w: Tensors, x: Array, last: bool) -> Array:
    z = x @ w[0].T + w[1]
    return z if last else np.tanh(z)


def backward(w: Tensors, x: Array, y: Array, g: Array, last: bool) -> tuple[Tensors, Array]:
    """Gradients of (W, b) and of x; the weights of the backward enter through dx alone."""
    dz = g if last else g * (1 - y * y)
    return (dz.T @ x, dz.sum(axis=0)), dz @ w[0]


class Layers:
    """The network that most laws run on: W, b and tanh a stage, and a mean squared error."""

    def __init__(self, stages: int) -> None:
        self.last = stages - 1

    def forward(self, s: int, w: Tensors, x: Array) -> tuple[Array, Any]:
        """What stage s gives, and what its backward needs of it."""
        y = forward(w, x, s == self.last)
        return y, (x, y)

    def backward(self, s: int, w: Tensors, kept: Any, g: Array) -> tuple[Tensors, Array]:
        """Gradients of the stage's tensors and of its input, for g of its output, on the weights of the backward."""
        return backward(w, *kept, g, s == self.last)

    def loss(self, output: Array, target: Array) -> tuple[float, Array]:
        """The mean squared error, and its gradient of the output."""
        error = output - target
        return float((error * error).mean()), 2 * error / error.size


def clipped(gradients: Tensors, largest: float | None) -> Tensors:
    """g ← g · min(1, c / (‖g‖ + 1e-6)), the norm over all tensors of the stage."""
    if largest is None:
        return gradients
    norm = np.sqrt(sum((g * g).sum() for g in gradients))
    return tuple(g * min(1.0, largest / (norm + 1e-6)) for g in gradients)


# -- what one tensor does in a step ----------------------------------------------------------------------------------


def entering(w: Array, g: Array, o: Options) -> Array:
    """g ← ±g + λ w: what enters the velocity."""
    return (-g if o.get("maximize") else g) + o.get("weight_decay", 0) * w


def sgd(u: int, w: Array, v: Array, q: Array, g: Array, o: Options) -> Moved:
    """v ← m v + (1 − dampening) g, the first time v = g;  w ← w − η v  (Nesterov: w ← w − η (g + m v))."""
    g, m = entering(w, g, o), o.get("momentum", 0)
    if not m:
        return Moved(w - o["lr"] * g, v, q)
    v = m * v + (1 - o.get("dampening", 0)) * g if u else g
    return Moved(w - o["lr"] * (g + m * v if o.get("nesterov") else v), v, q)


def adam(u: int, w: Array, v: Array, q: Array, g: Array, o: Options) -> Moved:
    """v ← β₁v + (1−β₁)g, q ← β₂q + (1−β₂)g², w ← w − η v̂ / (√q̂ + ε) with v̂ = v/(1−β₁ᵘ), q̂ = q/(1−β₂ᵘ), u from 1."""
    g = entering(w, g, o)
    (b1, b2), u = o.get("betas", (0.9, 0.999)), u + 1
    v, q = b1 * v + (1 - b1) * g, b2 * q + (1 - b2) * g * g
    return Moved(w - o["lr"] * (v / (1 - b1**u)) / (np.sqrt(q / (1 - b2**u)) + o.get("eps", 1e-8)), v, q)


def adamw(u: int, w: Array, v: Array, q: Array, g: Array, o: Options) -> Moved:
    """w ← (1 − ηλ) w, then Adam without decay in the gradient."""
    return adam(u, (1 - o["lr"] * o.get("weight_decay", 0)) * w, v, q, g, {**o, "weight_decay": 0})


def spiked(horizon: float, u: int, w: Array, v: Array, q: Array, g: Array, o: Options) -> Moved:
    """SC: v ← m v + g, w ← w − η (a v + b g) with a = m^T, b = (1 − m^T)/(1 − m), of which T is the limit at m = 1; v
    itself stays un-spiked.
    """
    g, m = entering(w, g, o), o.get("momentum", 0)
    v = m * v + g
    a = m**horizon
    b = horizon if m == 1 else (1 - a) / (1 - m)
    return Moved(w - o["lr"] * (a * v + b * g), v, q)


def spiked_adam(horizon: float, decoupled: bool, u: int, w: Array, v: Array, q: Array, g: Array, o: Options) -> Moved:
    """w ← w − η (a v̂ + b g) / (√q̂ + ε) with a = β₁^T, b = 1 − β₁^T."""
    if decoupled:
        w, o = (1 - o["lr"] * o.get("weight_decay", 0)) * w, {**o, "weight_decay": 0}
    (b1, b2), a = o.get("betas", (0.9, 0.999)), o.get("betas", (0.9, 0.999))[0] ** horizon
    moved, entered = adam(u, w, v, q, g, o), entering(w, g, o)
    mean, root = moved.v / (1 - b1 ** (u + 1)), np.sqrt(moved.q / (1 - b2 ** (u + 1))) + o.get("eps", 1e-8)
    return moved._replace(w=w - o["lr"] * (a * mean + (1 - a) * entered) / root)


def rmsprop(u: int, w: Array, v: Array, q: Array, g: Array, o: Options) -> Moved:
    """q ← α q + (1−α) g²,  w ← w − η g / (√q + ε)."""
    g, alpha = entering(w, g, o), o.get("alpha", 0.99)
    q = alpha * q + (1 - alpha) * g * g
    return Moved(w - o["lr"] * g / (np.sqrt(q) + o.get("eps", 1e-8)), v, q)


def adagrad(u: int, w: Array, v: Array, q: Array, g: Array, o: Options) -> Moved:
    """q ← q + g²,  w ← w − η / (1 + u·λ_η) · g / (√q + ε), u from 0."""
    g = entering(w, g, o)
    q = q + g * g
    return Moved(w - o["lr"] / (1 + u * o.get("lr_decay", 0)) * g / (np.sqrt(q) + o.get("eps", 1e-10)), v, q)


RULES = {"sgd": sgd, "adam": adam, "adamw": adamw, "rmsprop": rmsprop, "adagrad": adagrad}


# -- the recurrence ----------------------------------------------------------


class Recurrence:
    """F, B and U on the plain weights: sequential (slack 0), GPipe and 1F1B (slack 0, every = M), PB (slack 2).

    A flush of M micro-batches has all its forwards and backwards on one version, ⌊j/M⌋, and so is slack 0, every M,
    whatever the order inside the flush; every = None is a flush that only `drain` ends.
    """

    def __init__(
        self,
        weights: Sequence[Tensors],
        rule: str,
        *,
        slack: int,
        every: int | None = 1,
        clip: float | None = None,
        largest: float | None = None,
        samples: bool = False,
        network: Any = None,
    ) -> None:
        """clip, largest: bounds of the averaged gradient's norm, and then of each of its entries.

        samples: micro-batches of a group weigh by their samples. network: what stages compute and what the loss is,
        shaped like `Layers`.
        """
        self.stages, self.rule, self.slack, self.every, self.clip = len(weights), RULES[rule], slack, every, clip
        self.largest, self.samples, self.network = largest, samples, network or Layers(len(weights))
        zeros = [tuple(np.zeros_like(p) for p in w) for w in weights]
        self.history = [[Version(w, zero, zero, zero)] for w, zero in zip(weights, zeros, strict=True)]
        self.pushed = 0  # micro-batches so far
        self.start, self.base = 0, 0  # micro-batches and updates when the pipeline was last empty
        self.ledger: list[tuple[int, str, int, int]] = []  # (stage, kind, micro-batch, version)
        self._group: list[list[Tensors]] = []  # gradients not yet in an update: [micro-batch][stage]
        self._weigh: list[float] = []  # what each of them counts
        self._options: Snapshot = ()
        self.recompute = False

    def ahead(self, s: int) -> int:
        """Forwards that stage s runs ahead of its backwards."""
        return self.slack * (self.stages - 1 - s)

    def delay(self, s: int) -> int:
        """D: most updates between the version that F reads and the one that B's gradient moves; here the largest
        of ⌊j/k⌋ − ⌊(j − ahead)/k⌋, which is ⌈ahead / k⌉.
        """
        return -(-self.ahead(s) // (self.every or self.ahead(s) or 1))

    def done(self, j: int) -> int:
        """Version after the updates that the first j micro-batches since the last empty pipeline have made."""
        return self.base + (max(0, j) // self.every if self.every else 0)

    def version_forward(self, s: int, j: int) -> int:
        return self.done(j - self.ahead(s))

    def version_backward(self, s: int, j: int) -> int:
        return self.done(j)

    def forward_weights(self, s: int, u: int, options: Sequence[Options]) -> Tensors:
        return self.history[s][u].w

    def backward_weights(self, s: int, u: int, used: Tensors, options: Sequence[Options]) -> Tensors:
        return self.history[s][u].w

    def step(self, s: int, u: int, i: int, p: int, g: Array, options: Options) -> Moved:
        """Update u (counted from 0) of tensor p of stage s; i is the last micro-batch in it."""
        now = self.history[s][u]
        return self.rule(u, now.w[p], now.v[p], now.q[p], g, options)

    def displaced(self, s: int, u: int, moved: Tensors) -> Tensors:
        return self.history[s][u].delta

    def push(self, x: Array, target: Array, options: Snapshot) -> float:
        """Take one micro-batch all the way; its loss."""
        i, j, last = self.pushed, self.pushed - self.start, self.stages - 1
        xs, used, kept = [x], [], []
        for s in range(self.stages):
            u = self.version_forward(s, j)
            used.append(self.forward_weights(s, u, options[s]))
            y, needed = self.network.forward(s, used[s], xs[s])
            xs.append(y)
            kept.append(needed)
            self.ledger.append((s, "F", i, u))
        loss, g = self.network.loss(xs[-1], target)
        gradients: list[Tensors] = []
        for s in reversed(range(self.stages)):
            u = self.version_backward(s, j)
            w, needed = self.backward_weights(s, u, used[s], options[s]), kept[s]
            if self.recompute:
                y, needed = self.network.forward(s, w, xs[s])
                g = self.network.loss(y, target)[1] if s == last else g
            own, g = self.network.backward(s, w, needed, g)
            gradients.insert(0, own)
            self.ledger.append((s, "B", i, u))
        self._weigh.append(len(x) if self.samples else 1)
        self._group.append(gradients)
        self._options = options  # of the last micro-batch in the group
        self.pushed += 1
        if len(self._group) == self.every:
            self._update()
        return loss

    def _update(self) -> None:
        for s in range(self.stages):
            u = len(self.history[s]) - 1
            total = tuple(sum(n * g for n, g in zip(self._weigh, each)) for each in zip(*(g[s] for g in self._group)))
            mean = clipped(tuple(g / sum(self._weigh) for g in total), self.clip)
            if self.largest is not None:
                mean = tuple(np.clip(g, -self.largest, self.largest) for g in mean)
            moved = [self.step(s, u, self.pushed - 1, p, g, self._options[s][p]) for p, g in enumerate(mean)]
            w, v, q = zip(*moved) if moved else ((), (), ())
            self.history[s].append(Version(w, v, q, self.displaced(s, u, w)))
        self._group, self._weigh = [], []

    def drain(self) -> None:
        """Finish what is in flight, a short group included; the next micro-batch finds an empty pipeline."""
        if self._group:
            self._update()
        self.start, self.base = self.pushed, len(self.history[0]) - 1

    def weights(self) -> list[Tensors]:
        """The quiesced state: stage s has gone backward as far as its programs and arrivals allow, j < n − ahead."""
        return [self.history[s][self.done(self.pushed - self.start - self.ahead(s))].w for s in range(self.stages)]
