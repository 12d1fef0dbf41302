"""Law: identities between methods, and between a method and plain torch, to 1e-12 in float64.

    SC with D = 1 is torch's Nesterov                      a = m, b = 1:  w ← w − η (m v + g)
    LWP^v is LWP^w                                         momentum SGD at a constant rate:  w_t − w_{t−1} = −η v_t
    PipeDream's gradient is ∇f at the stale weights        B runs on what F used
    PipeDream-2BW is W(t+1) = W(t) − η ∇f(W(t−1))          on the whole group, at every stage
    chain(LWP^v, SC) is cerebras;  horizon 0, and PipeMare without T1, T2 and T3, are PB
    the scaling rule keeps the decay of v a sample and the whole step a sample

Each is paired with a case just outside it, where the two must differ: an identity that cannot fail shows nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pipeback
from tests.laws.reference import Tensors

from .test_equations import BATCH, close, create, initial, network, samples, scheduled

Data = list[tuple[torch.Tensor, torch.Tensor]]
Made = Callable[[Any], torch.optim.Optimizer]


def micro_batches(count: int) -> Data:
    xs, ys = samples(1, count * BATCH)
    return list(zip(torch.from_numpy(xs).split(BATCH), torch.from_numpy(ys).split(BATCH), strict=True))


def pipeline(method: Any, optimizer: Made, stages: int, **options: Any) -> pipeback.Pipeline:
    model = network(initial(stages))
    return pipeback.Pipeline(model, loss=nn.functional.mse_loss, optimizer=optimizer, method=method, **options)


def sgd(**options: Any) -> Made:
    return lambda ps: torch.optim.SGD(ps, **options)


def weights(pipe: pipeback.Pipeline) -> list[Tensors]:
    return [tuple(p.detach().numpy().copy() for p in stage.parameters()) for stage in pipe.model.children()]


def trained(
    method: Any, optimizer: Made, stages: int, count: int = 40, rates: float | None = None, **options: Any
) -> Any:
    """All weights after `count` micro-batches in flight and a drain; `rates`: the base of a rate schedule."""
    pipe = pipeline(method, optimizer, stages, **options)
    for i, (x, y) in enumerate(micro_batches(count)):
        if rates is not None:
            for s, opt in enumerate(pipe.optimizers):
                opt.param_groups[0]["lr"] = scheduled({"lr": rates}, i, s)["lr"]
        pipe.push(x, y)
    flat = [p for stage in weights(pipe) for p in stage]
    pipe.drain()
    flat += [p for stage in weights(pipe) for p in stage]
    return np.concatenate([p.ravel() for p in flat])


def differ(a: Any, b: Any) -> None:
    assert np.abs(a - b).max() > 1e-6


# -- SC and Nesterov -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("rates", [None, 0.02])
@pytest.mark.parametrize("clip", [None, 0.3])
def test_sc_at_delay_one_is_nesterov(decay: float, rates: float | None, clip: float | None) -> None:
    """Two stages at slack 1 have D = 1, 0: SC is PB with Nesterov at stage 0 and plain momentum at stage 1."""
    options = {"lr": 0.02, "momentum": 0.9, "weight_decay": decay}
    made: list[int] = []

    def nesterov_first(ps: Any) -> torch.optim.Optimizer:
        made.append(len(made))
        return torch.optim.SGD(ps, nesterov=made[-1] == 0, **options)

    sc = trained(create("sc", slack=1), sgd(**options), 2, rates=rates, clip_norm=clip)
    close(sc, trained(create("pb", slack=1), nesterov_first, 2, rates=rates, clip_norm=clip), "SC and Nesterov")
    differ(sc, trained(create("pb", slack=1), sgd(**options), 2, rates=rates, clip_norm=clip))


def test_sc_at_horizon_one_without_delay_is_torch_with_nesterov() -> None:
    options = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.05}
    model = network(initial(3))
    opt = torch.optim.SGD(model.parameters(), nesterov=True, **options)
    for x, y in micro_batches(40):
        opt.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        opt.step()
    expected = np.concatenate([p.detach().numpy().ravel() for p in model.parameters()])
    close(trained(create("sc", slack=0, horizon=1), sgd(**options), 3), np.tile(expected, 2), "SC and torch")


# -- weight prediction -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slack", [1, 2])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("horizon", [None, 2.5])
def test_the_two_forms_of_weight_prediction_agree_for_momentum_sgd(
    slack: int, decay: float, horizon: float | None
) -> None:
    options = {"lr": 0.01, "momentum": 0.9, "weight_decay": decay}
    velocity, weight = (create("lwp", form=form, slack=slack, horizon=horizon) for form in ("velocity", "weight"))
    close(trained(velocity, sgd(**options), 4), trained(weight, sgd(**options), 4), "LWP^v and LWP^w")


def test_the_two_forms_part_when_the_rate_changes() -> None:
    velocity, weight = (create("lwp", form=form) for form in ("velocity", "weight"))
    made = sgd(lr=0.01, momentum=0.9)
    differ(trained(velocity, made, 4, rates=0.01), trained(weight, made, 4, rates=0.01))


@pytest.mark.parametrize("slack", [1, 2])
def test_cerebras_is_velocity_prediction_around_spike_compensation(slack: int) -> None:
    """And the weight form around SC, whose Δ is taken after the spike, is another method."""
    made = sgd(lr=0.01, momentum=0.9, weight_decay=0.1)
    cerebras = trained(create("cerebras", slack=slack), made, 4, rates=0.01)
    for form, same in (("velocity", True), ("weight", False)):
        parts = pipeback.chain(create("lwp", form=form, slack=slack), create("sc", slack=slack))
        (close if same else lambda a, b, _: differ(a, b))(trained(parts, made, 4, rates=0.01), cerebras, "cerebras")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lwp", {"form": "velocity", "horizon": 0}),
        ("lwp", {"form": "weight", "horizon": 0}),
        ("sc", {"horizon": 0}),
        ("pipemare", {"anneal": 10, "t1": False, "t2": False}),
    ],
)
def test_a_method_without_its_correction_is_pb(name: str, options: dict[str, Any]) -> None:
    made = sgd(lr=0.01, momentum=0.9, weight_decay=0.1)
    pb = trained("pb", made, 4, rates=0.01)
    close(trained(create(name, **options), made, 4, rates=0.01), pb, name)
    differ(trained(create("pb", slack=1), made, 4, rates=0.01), pb)


# -- PipeDream: a true gradient --------------------------------------------------------------------------------------


def versions(pipe: pipeback.Pipeline, data: Data) -> list[list[Tensors]]:
    """Every version of every stage, seen from outside: the quiesced weights after each push, repeats left out."""
    seen = [[w] for w in weights(pipe)]
    for x, y in data:
        pipe.push(x, y)
        for history, w in zip(seen, weights(pipe), strict=True):
            if any(not np.array_equal(a, b) for a, b in zip(history[-1], w, strict=True)):
                history.append(w)
    return seen


def gradient(at: list[Tensors], x: torch.Tensor, y: torch.Tensor) -> list[Tensors]:
    model = network(at)
    nn.functional.mse_loss(model(x), y).backward()
    return [tuple(p.grad.numpy() for p in stage.parameters()) for stage in model]  # type: ignore[union-attr]


@pytest.mark.parametrize("slack", [1, 2])
@pytest.mark.parametrize("vertical_sync", [False, True])
def test_pipedreams_gradient_is_the_gradient_at_the_stale_weights(slack: int, vertical_sync: bool) -> None:
    """(w_s^(i) − w_s^(i+1)) / η = ∇_s f_i (w_0^(i−D_0), …, w_{S−1}^(i−D_{S−1})), by torch on the assembled network."""
    rate, stages, data = 0.1, 4, micro_batches(30)
    method = create("pipedream", slack=slack, vertical_sync=vertical_sync)
    seen = versions(pipeline(method, sgd(lr=rate), stages), data)
    lags = [slack * (stages - 1 - (0 if vertical_sync else s)) for s in range(stages)]
    for i, (x, y) in enumerate(data):
        true = gradient([seen[s][max(0, i - lags[s])] for s in range(stages)], x, y) if i + 1 < len(seen[0]) else []
        for s, parts in enumerate(true):
            for old, new, g in zip(seen[s][i], seen[s][i + 1], parts, strict=True):
                close((old - new) / rate, g, f"gradient of micro-batch {i} at stage {s}")
    assert [len(history) for history in seen] == [30 - slack * (stages - 1 - s) + 1 for s in range(stages)]


def test_pbs_gradient_is_of_no_network() -> None:
    """The same comparison for plain PB fails below the last stage: its backward runs on newer weights downstream."""
    rate, stages, data = 0.1, 4, micro_batches(20)
    seen = versions(pipeline("pb", sgd(lr=rate), stages), data)
    i, (x, y) = 10, data[10]
    true = gradient([seen[s][i - 2 * (stages - 1 - s)] for s in range(stages)], x, y)
    for s in range(stages):
        apart = max(
            np.abs((a - b) / rate - g).max() for a, b, g in zip(seen[s][i], seen[s][i + 1], true[s], strict=True)
        )
        # the last stage needs no weights downstream, the one above it those of a stage with D = 0
        assert (apart < 1e-12) == (s >= stages - 2)


@pytest.mark.parametrize("more", [0, 2])
def test_two_bw_is_gradient_descent_one_group_late(more: int) -> None:
    """W(t+1) = W(t) − η ∇f(W(t−1)), f the mean over the group, W(−1) = W(0)."""
    rate, stages = 0.1, 4
    k = stages + more
    data = micro_batches(8 * k)
    seen = versions(pipeline(create("pipedream_2bw", micro_batches=k), sgd(lr=rate), stages), data)
    for t in range(len(seen[0]) - 1):
        x, y = (torch.cat(part) for part in zip(*data[t * k : (t + 1) * k], strict=True))
        true = gradient([history[max(t - 1, 0)] for history in seen], x, y)
        for s in range(stages):
            for old, new, g in zip(seen[s][t], seen[s][t + 1], true[s], strict=True):
                close((old - new) / rate, g, f"update {t} of stage {s}")
    assert len(seen[0]) == 8  # of the eighth group, stage 0 still has micro-batches in flight
    assert len(seen[-1]) == 9


# -- the scaling rule ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reference", "size", "rate", "momentum"),
    [
        (256, 32, 0.0016355, 0.98691628),  # the paper's own
        (128, 1, 6.428e-6, 0.99917721),
        (256, 1, 1.6073e-6, 0.99958852),
    ],
)
def test_the_scaling_rule_gives_the_published_constants(
    reference: int, size: int, rate: float, momentum: float
) -> None:
    got = pipeback.scale_hyperparameters(0.1, 0.9, reference, size)
    # as many digits as are published
    assert got == (pytest.approx(rate, rel=5e-5), pytest.approx(momentum, abs=5e-9))


@pytest.mark.parametrize("size", [1, 8, 32, 64, 100])
def test_the_scaling_rule_keeps_decay_and_step_a_sample(size: int) -> None:
    """m^(1/N) and η / ((1 − m) N) do not change; nor does anything at the reference size."""
    rate, momentum = pipeback.scale_hyperparameters(0.1, 0.9, 32, size)
    close(momentum ** (1 / size), 0.9 ** (1 / 32), "decay of v a sample")
    close(rate / ((1 - momentum) * size), 0.1 / (0.1 * 32), "whole step a sample")
    close(pipeback.scale_hyperparameters(0.1, 0.9, 32, 32), (0.1, 0.9), "at the reference size")
