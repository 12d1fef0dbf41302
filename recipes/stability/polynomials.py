"""Polynomials: on a quadratic, the characteristic polynomial of a method tells up to which rate it is stable.

The loss is λ/2 · w², x = ηλ, m is the momentum, D the delay in updates. The gradient is λ w_F, w_F the weights of the
forward, whatever the backward runs on. So the weights follow a linear recurrence, stable while all roots lie inside
the unit circle:

    SGD         z^D (z − 1) + x = 0                                        stable iff 0 < x < 2 sin(π / (4D + 2))
    SC          z^D (z − 1)(z − m) + x [(a + b) z − b m] = 0               PB with momentum: a = 1, b = 0
    LWP^w + SC  z^(D+1) (z − 1)(z − m) + x [(1 + T) z − T] [(a + b) z − b m] = 0
    LWP^v + SC  (z − 1) [z^D (z − m) + x T] + x [(a + b) z − b m] = 0           SpecTrain on stage 0: a = 1, b = 0

a = m^D, b = (1 − m^D) / (1 − m) and T = D are those of Kosson et al. (arXiv 2003.11666, section 3), whose appendix
analyses a quadratic in this way. The bound of SGD is Lemma 1 of PipeMare (arXiv 1910.05124).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Polynomial = np.ndarray[Any, Any]  # the highest power first


class Law(NamedTuple):
    """One row of the table above. predict: the form of the prediction, "weight" or "velocity"; None: none."""

    predict: str | None
    spike: bool

    def polynomial(self, x: float, m: float, d: int) -> Polynomial:
        a, b = (m**d, (1 - m**d) / (1 - m)) if self.spike else (1.0, 0.0)
        one, z_m, step = np.array([1.0, -1.0]), np.array([1.0, -m]), x * np.array([a + b, -b * m])
        z_d = np.array([1.0] + [0.0] * d)
        if self.predict == "velocity":
            return np.polyadd(np.polymul(one, np.polyadd(np.polymul(z_d, z_m), [x * d])), step)
        if self.predict == "weight":
            return np.polyadd(np.polymul([*z_d, 0.0], np.polymul(one, z_m)), np.polymul([1.0 + d, -d], step))
        return np.polyadd(np.polymul(z_d, np.polymul(one, z_m)), step)

    def radius(self, x: float, m: float, d: int) -> float:
        """Of the slowest mode: |w| goes as radius^t."""
        return float(np.abs(np.roots(self.polynomial(x, m, d))).max())

    def largest(self, m: float, d: int) -> float:
        """The largest x up to which the method is stable: the smallest x > 0 with a root on the unit circle.

        The polynomial is p(z) + x q(z), so z = exp(iθ) is a root of it for x = −p/q, which must be real.
        """
        p = self.polynomial(0.0, m, d)
        q: Polynomial = np.polysub(self.polynomial(1.0, m, d), p)

        def x(angle: Any) -> Any:
            z = np.exp(1j * angle)
            return -np.polyval(p, z) / np.polyval(q, z)

        angles = np.concatenate([np.geomspace(1e-6, 1e-2, 500), np.linspace(1e-2, np.pi, 500 + 40 * d)[1:-1]])
        side = np.signbit(x(angles).imag)
        at = np.flatnonzero(side[1:] != side[:-1])
        low, high = angles[at], angles[at + 1]
        for _ in range(60):
            middle = (low + high) / 2
            same = np.signbit(x(middle).imag) == side[at]
            low, high = np.where(same, middle, low), np.where(same, high, middle)
        found = np.append(x(low).real, x(np.pi).real)
        return float(found[found > 0].min())


LAWS = {
    "pb": Law(None, False),
    "sc": Law(None, True),
    "lwp": Law("velocity", False),
    "spectrain": Law("velocity", False),  # on stage 0, whose horizon is D
    "lwp_w": Law("weight", False),
    "cerebras": Law("velocity", True),
    "lwp_w_sc": Law("weight", True),
}
