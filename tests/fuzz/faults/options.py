"""Options accepted without effect, or refused from inside."""

from __future__ import annotations

import pytest
import torch

from .table import fault, layers, pipeline, train


@fault("skip_zeros without sparsity is accepted without effect")
def _() -> None:
    with pytest.raises(ValueError, match="skip_zeros"):
        pipeline(layers(), skip_zeros=True)


@fault("a balance that is none is accepted")
def _() -> None:
    with pytest.raises(ValueError, match="balance"):
        pipeline(layers(), balance="luck")


@fault("a check_finite that is none is accepted")
def _() -> None:
    with pytest.raises((TypeError, ValueError), match="check_finite"):
        pipeline(layers(), check_finite="x")


@fault("a store that is none is an AttributeError")
def _() -> None:
    with pytest.raises((TypeError, ValueError), match="store"):
        pipeline(layers(), store=5)


@fault("momentum 1 divides by zero in the spike")
def _() -> None:
    with pytest.raises(ValueError, match="momentum"):
        train(pipeline(layers(), "sc", lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=1.0)), 12)
