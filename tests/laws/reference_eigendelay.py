"""The recurrence of EigenDelay, in numpy: its own bases, its own Adam."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.laws.reference import RULES, Array, Moved, Options, Recurrence, Tensors, entering


class EigenDelay(Recurrence):
    """Every part can be switched off, as in the library."""

    def __init__(
        self,
        *args: Any,
        scale: float = 4.0,
        power: float = 1.0,
        decay: float = 0.99,
        refresh: int = 10,
        refresh_by_delay: float = 0.0,
        block: int | None = None,
        sides: int = 2,
        second_moment: str = "turned",
        largest: int = 1024,
        over: bool = True,
        spike: bool = True,
        predict: bool = True,
        stash: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.scale, self.power, self.beta, self.refresh, self.sides = scale, power, decay, refresh, sides
        self.largest, self.over, self.spike, self.predict, self.stash = largest, over, spike, predict, stash
        self.second_moment, self.refresh_by_delay, self.block = second_moment, refresh_by_delay, block
        self.bases: dict[tuple[int, int], list[list[Array]]] = {}  # of (stage, tensor): L and R, and their eigenvectors
        self.shifts: dict[tuple[int, int], list[Array]] = {}  # of (stage, version), by tensor

    def rate(self, s: int, o: Options) -> float:
        return float(self.scale * o["lr"] / (1 + self.delay(s)) ** self.power)

    def has(self, shape: Sequence[int]) -> list[bool]:
        if len(shape) < 2 or not self.sides:
            return [False, False]
        r, c = shape
        wanted = [1 < self.length(n) <= self.largest for n in shape]
        return wanted if self.sides == 2 else [wanted[0] and r < c, wanted[1] and r >= c]

    def length(self, n: int) -> int:
        """Of a basis of a side."""
        return n if self.block is None or n % self.block else self.block

    def version_backward(self, s: int, j: int) -> int:
        return self.version_forward(s, j) if self.stash else super().version_backward(s, j)

    def backward_weights(self, s: int, u: int, used: Tensors, options: Sequence[Options]) -> Tensors:
        return used if self.stash else super().backward_weights(s, u, used, options)

    def forward_weights(self, s: int, u: int, options: Sequence[Options]) -> Tensors:
        w = self.history[s][u].w
        along = self.shifts.get((s, u), [0 * x for x in w])
        return tuple(x - self.rate(s, o) * d for x, d, o in zip(w, along, options, strict=True))

    def step(self, s: int, u: int, i: int, p: int, g: Array, options: Options) -> Moved:
        now, D, t = self.history[s][u], self.delay(s), u + 1
        decoupled = self.rule is RULES["adamw"]
        g = entering(now.w[p], g, {**options, "weight_decay": 0} if decoupled else options)
        (b1, b2), eps = options.get("betas", (0.9, 0.999)), options.get("eps", 1e-8)
        m = b1 * now.v[p] + (1 - b1) * g
        has = self.has(g.shape)
        before = [self.bases.get((s, p), [[], []])[side][1:] for side in (0, 1)]
        left, right = (self.basis(s, p, g, side, t) if wanted else None for side, wanted in enumerate(has))
        turn = lambda x: x if left is None else left.T @ x  # noqa: E731
        turned = [turn(x) if right is None else turn(x) @ right for x in (g, m)]
        q, since = now.q[p], t
        mean, second = turned[1] / (1 - b1**t), any(has) and t == self.refresh
        if second and self.second_moment == "turned" and t > 1:
            q = np.array(
                [[self.turned(q, before, (left, right), i, j) for j in range(q.shape[1])] for i in range(len(q))]
            )
        if any(has) and self.second_moment in ("bounded", "anew") and t >= self.refresh:
            q, since = (0 * q if second else q), t - self.refresh + 1
        q = b2 * q + (1 - b2) * turned[0] ** 2
        if second and self.second_moment == "bounded":
            q = np.maximum(q, (1 - b2) * mean**2)
        hat = q / (1 - b2**since)
        c = 1.0
        if any(has) and D and self.over:
            c = 1 / np.maximum(1, hat / hat.mean())
        a = b1**D if self.spike else 1.0
        pieces = [c * x / (np.sqrt(hat) + eps) for x in (a * mean + (1 - a) * turned[0], mean)]
        pieces = [x if left is None else left @ x for x in pieces]
        moved, along = (x if right is None else x @ right.T for x in pieces)
        if D and self.predict:
            committed = sum(b1**j for j in range(1, D + 1)) * along
        else:
            committed = 0 * along
        self.shifts.setdefault((s, t), []).append(committed)
        decay = options.get("weight_decay", 0) if decoupled else 0
        return Moved(now.w[p] - self.rate(s, options) * (decay * now.w[p] + moved), m, q)

    @staticmethod
    def turned(q: Array, before: Sequence[list[Array]], after: Sequence[Array | None], i: int, j: int) -> float:
        """The variance of entry (i, j) in the bases `after`, of entries in those before that have variances q."""
        r, c = q.shape
        (U, V), (X, Y) = (
            [np.eye(n) if basis is None else basis for n, basis in zip(q.shape, sides, strict=True)]
            for sides in ([b[0] if b else None for b in before], after)
        )  # fmt: skip
        total = 0.0
        for k in range(r):
            for n in range(c):  # what one unit of entry (k, n) before is at (i, j)
                total += q[k, n] * (X[:, i] @ np.outer(U[:, k], V[:, n]) @ Y[:, j]) ** 2
        return total

    def basis(self, s: int, p: int, g: Array, side: int, t: int) -> Array:
        """The eigenvectors of this side of a gradient, which is taken into its covariance first."""
        known = self.bases.setdefault((s, p), [[], []])
        product = g @ g.T if side == 0 else g.T @ g
        n, length = len(product), self.length(len(product))
        product = product * np.kron(np.eye(n // length), np.ones((length, length)))
        before, vectors = known[side] or [0 * product, np.eye(n)]
        covariance, vectors = self.beta * before + (1 - self.beta) * product, vectors.copy()
        every = self.refresh + round(self.refresh_by_delay * self.delay(s))
        for k in range(0, n, length):
            part = slice(k, k + length), slice(k, k + length)
            if t in (1, self.refresh):
                vectors[part] = np.linalg.eigh(covariance[part])[1][:, ::-1]
            elif t > self.refresh and (t - self.refresh) % every == 0:
                vectors[part] = np.linalg.qr(covariance[part] @ vectors[part])[0]
        known[side] = [covariance, vectors]
        return vectors
