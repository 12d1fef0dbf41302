"""Law: EigenDelay is its equations, to 1e-12 in float64; without its parts it is AdamW.

Widths are equal and micro-batches larger, so that covariances have full rank: in a null space any basis is as good as
another. And ε is 0.01, because entries that are 0 but for rounding would be divided by it.
"""

from __future__ import annotations

import warnings
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pipeback
from pipeback.methods.eigendelay import _committed
from tests.helpers.choice import diagonal, mostly_rare
from tests.laws.cases import everything
from tests.laws.equations import OPTIMIZERS, Both, Case, Optimizer, close, create
from tests.laws.reference_eigendelay import EigenDelay
from tests.laws.test_identities import differ, micro_batches, sgd, trained

STAGES, WIDTH, BATCH = 4, 4, 12
for kind, rule in ((torch.optim.AdamW, "adamw"), (torch.optim.Adam, "adam")):
    OPTIMIZERS[f"{rule}-eps"] = Optimizer(kind, rule, {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-2})

OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "slack 1": {"slack": 1, "scale": 2.0, "power": 0.5},
    "no delay": {"slack": 0},
    "stash": {"stash": True, "refresh": 4},
    "stash without prediction": {"stash": True, "predict": False},
    "one side": {"sides": 1, "refresh": 5, "decay": 0.9},
    "second moment kept": {"second_moment": "kept", "refresh": 4},
    "second moment bounded": {"second_moment": "bounded", "refresh": 3},
    "second moment anew": {"second_moment": "anew", "refresh": 7},
    "no basis": {"sides": 0},
    "blocks": {"block": 2, "refresh": 4},
    "refresh by delay": {"refresh": 4, "refresh_by_delay": 0.5},
    "too large": {"largest": 3},
    "without c": {"over": False, "slack": 1},
    "without spike": {"spike": False},
    "without prediction": {"predict": False, "refresh": 1},
}


def start(options: dict[str, Any], case: Case, widths: list[int], **more: Any) -> Both:
    rng = np.random.default_rng(3)
    weights = [(rng.normal(size=(b, a)) / np.sqrt(a), 0.1 * rng.normal(size=b)) for a, b in pairwise(widths)]
    recurrence = EigenDelay(weights, OPTIMIZERS[case.optimizer].rule, clip=case.clip, **{"slack": 2, **options})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Both(create("eigendelay", **options), recurrence, case, **more)


def compare(both: Both, widths: list[int], count: int = 36) -> None:
    rng = np.random.default_rng(4)
    for i in range(count):
        if i == 25:
            both.drain()
            both.compare("drained")
        both.push(rng.normal(size=(BATCH, widths[0])), rng.normal(size=(BATCH, widths[-1])))
        if i % 4 == 3:
            both.compare(f"in flight after push {i}")
    both.drain()
    both.compare("drained again")


ROWS = [("adamw-eps", 0.1, True, None), ("adamw-eps", 0.0, False, 0.3), ("adam-eps", 0.1, True, 0.3)]


@pytest.mark.parametrize(
    ("name", "row"),
    mostly_rare(
        [(name, row) for name in OPTIONS for row in ROWS],
        *((name, ROWS[n % 3]) for n, name in enumerate(OPTIONS)),
        *(("as it is", row) for row in ROWS[1:]),
    ),
)
def test_it_is_its_equations(name: str, row: tuple[Any, ...]) -> None:
    case, widths = Case(name, row[0], STAGES, *row[1:]), [WIDTH] * (STAGES + 1)
    compare(start(OPTIONS[name], case, widths), widths)


@pytest.mark.parametrize("slack", [1, 2])
def test_one_side_of_matrices_that_are_not_square(slack: int) -> None:
    """The shorter side has full rank."""
    widths = [3, 6, 2, 5, 3]
    case = Case("one side", "adamw-eps", STAGES, 0.1, True, None)
    compare(start({"sides": 1, "slack": slack}, case, widths), widths)


@pytest.mark.parametrize(
    ("more", "of_method"),
    diagonal(
        [{"replicas": 2}, {"replicas": 3}, {"vectorize": True}, {"vectorize": "auto"}],
        [{}, {"stash": True, "block": 2, "refresh_by_delay": 0.5}],
    ),
)
def test_replicas_and_stages_as_one_agree(more: dict[str, Any], of_method: dict[str, Any]) -> None:
    found: list[torch.Tensor] = []
    for options in ({}, more):
        torch.manual_seed(0)
        pipe = pipeback.Pipeline(
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(STAGES))).double(), loss=nn.functional.mse_loss,
            optimizer=lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-2),
            method=create("eigendelay", refresh=5, **of_method), **options,
        )  # fmt: skip
        for _ in range(25):
            pipe.push(*torch.randn(2, BATCH, WIDTH, dtype=torch.float64))
        pipe.drain()
        found.append(torch.cat([p.detach().flatten() for p in pipe.model.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


def test_without_its_parts_it_is_adamw() -> None:
    """At a flat rate of scale 1 and without bases, spikes and predictions: PB's bits; each part makes a difference."""
    plain: dict[str, Any] = {"sides": 0, "spike": False, "predict": False, "scale": 1, "power": 0}
    made = lambda ps: torch.optim.AdamW(ps, lr=0.01, betas=(0.8, 0.95), weight_decay=0.1)  # noqa: E731
    pb = trained("pb", made, 4, rates=0.01)
    assert np.array_equal(trained(create("eigendelay", **plain), made, 4, rates=0.01), pb)
    for part, value in {"sides": 2, "spike": True, "predict": True, "scale": 2, "power": 1}.items():
        differ(trained(create("eigendelay", **{**plain, part: value}), made, 4, rates=0.01), pb)
    assert [_committed(0.9, D) for D in (1, 2)] == [pytest.approx(0.9), pytest.approx(0.9 + 0.81)]


@pytest.mark.parametrize("kind", ["zero", "dead", "tiny", "huge", "constant"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_nan_of_a_basis_reaches_the_weights(kind: str, dtype: torch.dtype) -> None:
    """Gradients of 0, of a dead unit, near the smallest and the largest numbers of the type, and of rank one."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.ReLU()) for _ in range(3)), nn.Linear(5, 5)).to(dtype)
    if kind == "dead":
        nn.init.constant_(model[1][0].bias, -1e3)
    size = {"zero": 0.0, "tiny": 1e-38, "huge": 1e18}.get(kind, 1.0)
    pipe = pipeback.Pipeline(
        model, loss=lambda out, y: (out * y).sum() * size, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3),
        method=create("eigendelay", slack=1, refresh=3),
    )  # fmt: skip
    for _ in range(20):
        x = torch.ones(2, 5, dtype=dtype) if kind == "constant" else torch.randn(2, 5, dtype=dtype)
        pipe.push(x, torch.randn(2, 5, dtype=dtype))
    pipe.drain()
    assert all(bool(p.isfinite().all()) for p in pipe.model.parameters())
    for stage in pipe._engine.stages:
        for name in ("left", "right"):
            for basis in stage.state[name]:
                if basis is not None:
                    close(basis.mT @ basis, torch.eye(len(basis)), "a basis") if dtype == torch.float64 else None
                    torch.testing.assert_close(basis.mT @ basis, torch.eye(len(basis), dtype=dtype))


def test_a_side_that_is_too_long_has_no_basis_and_it_is_said_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(77, 6), nn.Linear(6, 6), nn.Linear(6, 77))
    options = dict(loss=nn.functional.mse_loss, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))
    with pytest.warns(UserWarning, match=r"eigendelay: .*shape \(77, 6\) .* longer than 64.*raise largest=") as told:
        pipe = pipeback.Pipeline(model, method=create("eigendelay", largest=64), **options)
    assert len(told) == 1  # the last layer has the same shape
    state = [stage.state for stage in pipe._engine.stages]
    assert state[0]["left"][0] is None and state[0]["right"][0].shape == (6, 6)
    assert state[2]["left"][0] is None and state[2]["right"][0].shape == (6, 6) and state[2]["right"][1] is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe = pipeback.Pipeline(model, method=create("eigendelay", largest=64), **options)
        pipeback.Pipeline(model, method=create("eigendelay", largest=80), **options)
    for _ in range(12):
        pipe.push(torch.randint(0, 77, (3, 2)), torch.randn(3, 2, 77))
    assert bool(torch.cat([p.flatten() for p in pipe.model.parameters()]).isfinite().all())


def test_blocks_of_long_sides_have_bases() -> None:
    """Each block is orthonormal; a side that is no multiple has one basis, and where that is too long, none."""
    model = nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 7), nn.Linear(7, 30), nn.Linear(30, 2))
    with pytest.warns(UserWarning, match=r"shape \(7, 12\) .* longer than 6"):
        pipe = pipeback.Pipeline(
            model, loss=nn.functional.mse_loss, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3),
            method=create("eigendelay", largest=6, block=3, refresh=2),
        )  # fmt: skip
    for _ in range(12):
        pipe.push(torch.randn(16, 6), torch.randn(16, 2))
    pipe.drain()
    shape = lambda basis: basis if basis is None else tuple(basis.shape)  # noqa: E731
    found = [[shape(stage.state[name][0]) for name in ("left", "right")] for stage in pipe._engine.stages]
    assert found == [[(4, 3, 3), (2, 3, 3)], [None, (4, 3, 3)], [(10, 3, 3), None], [(2, 2), (10, 3, 3)]]
    for stage in pipe._engine.stages:
        for basis in [*stage.state["left"], *stage.state["right"]]:
            if basis is not None:
                torch.testing.assert_close(basis.mT @ basis, torch.eye(basis.shape[-1]).expand_as(basis))


def test_kernels_are_taken_as_matrices_and_lie_as_they_lay() -> None:
    """A convolution and the linear layer over its patches make equal steps, also in channels_last."""
    torch.manual_seed(0)
    conv, x = nn.Conv2d(3, 4, 2, bias=False).double(), torch.randn(108, 3, 2, 2, dtype=torch.float64)
    line = nn.Linear(12, 4, bias=False).double()
    with torch.no_grad():
        line.weight.copy_(conv.weight.view(4, 12))
    found = []
    for module, given in ((conv.to(memory_format=torch.channels_last), x), (line, x.flatten(1))):
        pipe = pipeback.Pipeline(
            [module, nn.Flatten(), nn.Identity()],
            loss=nn.functional.mse_loss, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-2),
            method=create("eigendelay", refresh=3, sides=1),
        )  # fmt: skip
        torch.manual_seed(1)
        for k in range(9):
            pipe.push(given[12 * k : 12 * k + 12], torch.randn(12, 4, dtype=torch.float64))
        pipe.drain()
        found.append(module.weight.detach().flatten(1).clone())
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def test_a_chain_ends_with_it() -> None:
    with pytest.raises(ValueError, match="makes the step itself.*put it last"):
        pipeback.chain(create("eigendelay"), create("lwp", form="weight"))


def test_momentum_sgd_is_refused() -> None:
    with pytest.raises(ValueError, match='eigendelay is written for Adam and AdamW.*SGD; use method="staleness_lr"'):
        trained(create("eigendelay"), sgd(lr=0.1), 2)


def test_a_state_in_the_middle_of_a_refreshment() -> None:
    made = lambda ps: torch.optim.AdamW(ps, lr=0.01)  # noqa: E731
    some = micro_batches(24)

    def begin(seed: int) -> pipeback.Pipeline:
        torch.manual_seed(seed)
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)), nn.Linear(3, 2)).double()
        return pipeback.Pipeline(
            model, loss=nn.functional.mse_loss, optimizer=made, method=create("eigendelay", refresh=5)
        )

    for at in range(8, 13):
        one, other = begin(0), begin(1)
        for x, y in some[:at]:
            one.push(x, y)
        other.load_state_dict(one.state_dict())
        for pipe in (one, other):
            for x, y in some[at:]:
                pipe.push(x, y)
        assert torch.equal(everything(one), everything(other))
