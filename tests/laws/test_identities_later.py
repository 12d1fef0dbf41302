"""Law: identities of the later methods, to 1e-12 in float64, each with a case just outside it, where the two differ.

EF with the first update corrected is LWP^w with B on the prediction, too      any optimizer, any T
PipeOptim with momentum SGD is SpecTrain's version 2
MSNAG at D = 1 predicts one step of m·v; at m = 0 it is PB; it is bounded by m/(1 − m) steps
strength 0 of DC-ASGD is PipeDream, of braking PB; power 0 of staleness_lr is PB
staleness_lr is PB with the rates of the stages divided by 1 + D
DC-ASGD carries a gradient along to first order where g∘g is the curvature
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pipeback
from pipeback.methods.base import Chosen, State, Weights, When
from pipeback.methods.lwp import LinearWeightPrediction
from pipeback.methods.msnag import _powers
from tests.helpers.choice import diagonal

from .test_equations import create, initial, network
from .test_identities import Made, close, differ, micro_batches, sgd, trained, weights

ADAMW: Made = lambda ps: torch.optim.AdamW(ps, lr=0.01, betas=(0.8, 0.95), weight_decay=0.1)  # noqa: E731
ADAM: Made = lambda ps: torch.optim.Adam(ps, lr=0.01, betas=(0.8, 0.95))  # noqa: E731
RMSPROP: Made = lambda ps: torch.optim.RMSprop(ps, lr=0.002, momentum=0.5)  # noqa: E731


class Both(LinearWeightPrediction):
    """LWP in its weight form, B on the prediction, too."""

    def backward_weights(self, weights: Weights, used: Weights | None, state: State, when: When) -> Chosen:
        return self.forward_weights(weights, state, when)


def flying(method: Any, optimizer: Made, count: int) -> pipeback.Pipeline:
    pipe = pipeback.Pipeline(network(initial(4)), loss=nn.functional.mse_loss, optimizer=optimizer, method=method)
    for x, y in micro_batches(count):
        pipe.push(x, y)
    return pipe


@pytest.mark.parametrize(
    ("delay", "optimizer"), diagonal([(1, None), (2, None), (2, 1.5)], [sgd(lr=0.01, momentum=0.9), ADAM, RMSPROP])
)
def test_error_feedback_is_weight_prediction_on_both_sides(delay: tuple[int, float | None], optimizer: Made) -> None:
    """With ŵ = w + T (w − w_before) as the live weights; without weight decay, which is of the live weights."""
    slack, horizon = delay
    prediction = flying(Both(form="weight", slack=slack, horizon=horizon), optimizer, 40)
    shifted = []
    for s, stage in enumerate(prediction._engine.stages):
        t = slack * (3 - s) if horizon is None else horizon
        moved = stage.state["displacement"]
        shifted += [(w + t * d).detach().numpy().ravel() for w, d in zip(stage.weights, moved, strict=True)]
    for first in (True, False):
        feedback = flying(create("ef", slack=slack, horizon=horizon, first=first), optimizer, 40)
        live = [p.ravel() for stage in weights(feedback) for p in stage]
        (close if first else lambda a, b, _: differ(a, b))(np.concatenate(live), np.concatenate(shifted), "EF, LWP^w")


@pytest.mark.parametrize("slack", [1, 2])
@pytest.mark.parametrize("rates", [None, 0.02])
def test_pipeoptim_with_momentum_sgd_is_the_second_version_of_spectrain(slack: int, rates: float | None) -> None:
    made = sgd(lr=0.02, momentum=0.9, weight_decay=0.05)
    mine = trained(create("pipeoptim", slack=slack), made, 4, rates=rates)
    close(mine, trained(create("spectrain", version=2, slack=slack), made, 4, rates=rates), "PipeOptim, SpecTrain")
    differ(mine, trained(create("spectrain", version=1, slack=slack), made, 4, rates=rates))


def test_msnag_predicts_what_momentum_is_committed_to() -> None:
    rate, m = 0.1, 0.9
    assert _powers(rate, m, 0.0, 0.0, False, 1) == (0.0, pytest.approx(-rate * m, rel=1e-12))
    for D in (2, 7, 62, 1000):
        along = -rate * (m - m ** (D + 1)) / (1 - m)
        assert _powers(rate, m, 0.0, 0.0, False, D) == (0.0, pytest.approx(along, rel=1e-12))
        assert abs(along) < rate * m / (1 - m) * (1 + 1e-12)
    pb = trained("pb", sgd(lr=0.05), 4)
    close(trained(create("msnag"), sgd(lr=0.05), 4), pb, "MSNAG without momentum")
    differ(trained(create("msnag"), sgd(lr=0.05, momentum=0.5), 4), trained("pb", sgd(lr=0.05, momentum=0.5), 4))


@pytest.mark.parametrize("optimizer", [sgd(lr=0.02, momentum=0.9, weight_decay=0.1), ADAMW])
@pytest.mark.parametrize(
    ("name", "options", "plain"),
    [
        ("dc_asgd", {"strength": 0}, "pipedream"),
        ("dc_asgd", {"strength": 0, "adaptive": True, "slack": 2}, "pipedream"),
        ("braking", {"strength": 0}, "pb"),
        ("staleness_lr", {"power": 0}, "pb"),
        ("ef", {"horizon": 0, "slack": 1}, "pb"),
    ],
)
def test_a_method_without_its_correction(name: str, options: dict[str, Any], plain: str, optimizer: Made) -> None:
    slack = options.get("slack", 1 if name == "dc_asgd" else 2)
    without = trained(create(plain, slack=slack), optimizer, 4)
    close(trained(create(name, **options), optimizer, 4), without, name)
    differ(
        trained(create(name, slack=slack, **({"strength": 2.0} if name == "dc_asgd" else {})), optimizer, 4), without
    )


@pytest.mark.parametrize("slack", [1, 2])
def test_rates_by_staleness_are_rates_by_stage(slack: int) -> None:
    made: list[int] = []

    def divided(ps: Any) -> torch.optim.Optimizer:
        made.append(len(made))
        return torch.optim.AdamW(ps, lr=0.01 / (1 + slack * (3 - made[-1])), weight_decay=0.1)

    by_stage = trained(create("pb", slack=slack), divided, 4)
    plain: Made = lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.1)  # noqa: E731
    close(trained(create("staleness_lr", slack=slack), plain, 4), by_stage, "rates by staleness")
    differ(trained(create("pb", slack=slack), plain, 4), by_stage)


class Logarithm(nn.Module):
    """y = −log w, whose curvature 1/w² is the square of its slope −1/w."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((1,), 2.0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - torch.log(self.w)


@pytest.mark.parametrize(("strength", "order"), [(0.0, 1), (1.0, 2)])
def test_dc_asgd_carries_a_gradient_to_first_order(strength: float, order: int) -> None:
    """How far a step is from that of the true gradient falls with the gap: linearly, or with its square."""
    errors = []
    for rate in (1e-3, 1e-4):
        model = nn.Sequential(Logarithm(), *(nn.Identity() for _ in range(4)))
        pipe = pipeback.Pipeline(
            model, loss=lambda y, _: y.sum(), optimizer=sgd(lr=rate), method=create("dc_asgd", strength=strength)
        )
        one, path = torch.ones(1, dtype=torch.float64), [2.0]
        for _ in range(20):
            pipe.push(one, one)
            path.append(model[0].w.item())
        before, after = path[-2:]
        errors.append(abs((before - after) / rate + 1 / before))
    assert np.log10(errors[0] / errors[1]) == pytest.approx(order, abs=0.05)
