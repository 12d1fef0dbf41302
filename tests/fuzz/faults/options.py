"""Options accepted without effect, or refused from inside."""

from __future__ import annotations

import pytest
import torch

import pipeback
from tests.laws.cases import data

from .table import fault, layers, pipeline


@fault("skip_zeros without sparsity is accepted without effect")
def _() -> None:
    with pytest.raises(ValueError, match="skip_zeros"):
        pipeline(layers(), store=pipeback.Streaming(skip_zeros=True))


@fault("a balance that is none is accepted")
def _() -> None:
    with pytest.raises(ValueError, match="balance"):
        pipeline(layers(), stages=pipeback.Splitting(balance="luck"))


@fault("a check_finite that is none is accepted")
def _() -> None:
    with pytest.raises((TypeError, ValueError), match="check_finite"):
        pipeline(layers(), debug=pipeback.Debug(check_finite="x"))


@fault("a store that is none is an AttributeError")
def _() -> None:
    with pytest.raises((TypeError, ValueError), match="store"):
        pipeline(layers(), store=5)


@fault("momentum 1 divides by zero in the spike")
def _() -> None:
    # a = 1 and b = T: the limit, which momenta just below it come close to
    found = []
    for momentum in (1.0, 1 - 1e-7):
        model = layers().double()
        pipe = pipeline(model, "sc", lambda ps, m=momentum: torch.optim.SGD(ps, lr=0.01, momentum=m))
        for x, y in data(12, dtype=torch.float64):
            pipe.push(x, y)
        pipe.drain()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
