"""RotatedAdamW: AdamW where there is no basis, its equations where there is one, SOAP's numbers, and pipelines."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pipeback
from pipeback.optim import RotatedAdamW
from tests.laws.cases import everything

ROWS, COLUMNS, SAMPLES = 4, 4, 16


def gradients(count: int, shape: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    """Of full rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(count)]


def stepped(made: Any, some: list[torch.Tensor], rates: bool = False, dtype: torch.dtype = torch.float64) -> Any:
    """A weight after these gradients."""
    torch.manual_seed(1)
    w = nn.Parameter(torch.randn(some[0].shape, dtype=torch.float64).to(dtype))
    optimizer = made([w])
    for n, g in enumerate(some):
        if rates:
            optimizer.param_groups[0]["lr"] = 0.01 * (1 + n % 3)
        w.grad = g.to(dtype)
        optimizer.step()
    return w.detach()


# -- AdamW -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"rotate": False}, {"largest": 1}])
@pytest.mark.parametrize("more", [{}, {"weight_decay": 0.3, "betas": (0.8, 0.95), "maximize": True, "eps": 1e-4}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_a_basis_it_has_the_bits_of_adamw(options: Any, more: Any, dtype: torch.dtype) -> None:
    some = gradients(25, (5, 7))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mine = stepped(lambda p: RotatedAdamW(p, lr=0.01, **options, **more), some, rates=True, dtype=dtype)
    assert torch.equal(mine, stepped(lambda p: torch.optim.AdamW(p, lr=0.01, **more), some, rates=True, dtype=dtype))
    vectors = gradients(25, (7,))
    mine = stepped(lambda p: RotatedAdamW(p, lr=0.01, **more), vectors, dtype=dtype)
    assert torch.equal(mine, stepped(lambda p: torch.optim.AdamW(p, lr=0.01, **more), vectors, dtype=dtype))


def test_a_basis_makes_a_difference() -> None:
    some = gradients(25, (5, 5))
    mine, plain = (stepped(lambda p, kind=kind: kind(p, lr=0.01), some) for kind in (RotatedAdamW, torch.optim.AdamW))
    assert (mine - plain).abs().max() > 1e-3


# -- the equations, in numpy -----------------------------------------------------------------------------------------


class Recurrence:
    """The equations of the module's docstring for one matrix."""

    def __init__(self, source: str, sides: int, soap: bool, refresh: int, beta: float | None) -> None:
        self.source, self.sides, self.soap, self.refresh, self.beta = source, sides, soap, refresh, beta
        self.cov: list[Any] = [0.0, 0.0]
        self.bases: list[Any] = [None, None]
        self.t, self.m, self.v = 0, 0.0, 0.0

    def refreshed(self, g: Any, t: int, b1: float, b2: float, *, mean: bool) -> None:
        r, c = g.shape
        sides = (0, 1) if self.sides == 2 else (0,) if r < c else (1,)
        first, beta = self.bases[sides[0]] is None, b2 if self.beta is None else self.beta
        products = [g @ g.T, g.T @ g]
        self.cov = [beta * old + (1 - beta) * new for old, new in zip(self.cov, products, strict=True)]
        if not first and t % self.refresh:
            return
        m = b1 * self.m + (1 - b1) * g if mean else self.m
        for side in sides:
            a = self.cov[side] if self.source == "2nd" else m @ m.T if side == 0 else m.T @ m
            if first:
                self.bases[side] = np.linalg.eigh(a)[1][:, ::-1]
                continue
            q = self.bases[side]
            order = np.argsort(-np.diag(q.T @ a @ q))
            self.v = self.v[order] if side == 0 else self.v[:, order]
            self.bases[side] = np.linalg.qr(a @ q[:, order])[0]

    def step(self, w: Any, g: Any, rate: float, b1: float, b2: float, eps: float, decay: float) -> Any:
        first = all(q is None for q in self.bases)
        if first or not self.soap:
            self.refreshed(g, self.t + 1, b1, b2, mean=True)
        if first and self.soap:
            return w
        self.t += 1
        left, right = (np.eye(n) if q is None else q for n, q in zip(g.shape, self.bases, strict=True))
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * (left.T @ g @ right) ** 2
        mean, square = left.T @ self.m @ right / (1 - b1**self.t), self.v / (1 - b2**self.t)
        w = (1 - rate * decay) * w - rate * left @ (mean / (np.sqrt(square) + eps)) @ right.T
        if self.soap:
            self.refreshed(g, self.t, b1, b2, mean=False)
        return w


@pytest.mark.parametrize("soap", [False, True])
@pytest.mark.parametrize("source", ["2nd", "1st"])
@pytest.mark.parametrize(("sides", "shape"), [(2, (4, 4)), (1, (4, 4)), (1, (3, 6)), (1, (6, 2))])
@pytest.mark.parametrize(("refresh", "beta"), [(10, None), (3, 0.8), (1, None)])
def test_it_is_its_equations(
    soap: bool, source: Any, sides: Any, shape: tuple[int, int], refresh: int, beta: float | None
) -> None:
    """To 1e-12 in float64, with changing rates and weight decay; gradients have full rank on the sides with a basis."""
    options = {"betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}
    some, told = gradients(30, shape), Recurrence(source, sides, soap, refresh, beta)
    torch.manual_seed(1)
    w = torch.randn(shape, dtype=torch.float64).numpy().copy()
    for n, g in enumerate(some):
        w = told.step(w, g.numpy(), 0.01 * (1 + n % 3), *options["betas"], options["eps"], options["weight_decay"])
    found = stepped(
        lambda p: RotatedAdamW(
            p, soap=soap, source=source, sides=sides, refresh=refresh, basis_beta=beta, **options
        ),
        some, rates=True,
    )  # fmt: skip
    np.testing.assert_allclose(found.numpy(), w, rtol=1e-12, atol=1e-12)


def test_turning_the_coordinates_turns_the_training() -> None:
    """For orthogonal P and Q, the gradients P·G·Qᵀ lead to P·W·Qᵀ; those of AdamW do not."""
    some = gradients(20, (4, 4))
    p, q = (torch.linalg.qr(a)[0] for a in gradients(2, (4, 4), seed=5))

    def trained(kind: Any, turn: bool) -> torch.Tensor:
        w = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))
        if turn:
            w.data = p @ w.data @ q.mT
        optimizer = kind([w], lr=0.01, eps=1e-3)
        for g in some:
            w.grad = p @ g @ q.mT if turn else g.clone()
            optimizer.step()
        return p.mT @ w.detach() @ q if turn else w.detach()

    torch.testing.assert_close(trained(RotatedAdamW, True), trained(RotatedAdamW, False), rtol=1e-10, atol=1e-10)
    assert (trained(torch.optim.AdamW, True) - trained(torch.optim.AdamW, False)).abs().max() > 1e-2


# -- SOAP ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("refresh", "within"), [(100, 1e-12), (5, 1e-4)])
@pytest.mark.parametrize("shape", [(5, 5), (3, 6)])
def test_it_is_soap(refresh: int, within: float, shape: tuple[int, ...]) -> None:
    """Against the implementation of pytorch-optimizer, which makes its QR decompositions in float32.

    It adds ε beside √V without the bias correction, so that ε is next to nothing here, and decays after the step.
    """
    kept = pytest.importorskip("pytorch_optimizer")
    some, betas = gradients(40, shape), (0.8, 0.95)
    theirs = stepped(
        lambda p: kept.SOAP(p, lr=0.01, betas=betas, weight_decay=0.0, precondition_frequency=refresh, eps=1e-20), some
    )
    mine = stepped(
        lambda p: RotatedAdamW(p, lr=0.01, betas=betas, weight_decay=0.0, refresh=refresh, eps=1e-20, soap=True), some
    )
    torch.testing.assert_close(mine, theirs, rtol=within, atol=within)
    other = stepped(lambda p: RotatedAdamW(p, lr=0.01, betas=betas, weight_decay=0.0, refresh=refresh), some)
    assert (other - theirs).abs().max() > 1e-3


# -- what may go wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-20, 1e18])
@pytest.mark.parametrize("source", ["2nd", "1st"])
def test_no_nan_of_a_basis_reaches_the_weights(size: float, source: Any) -> None:
    """Gradients of 0, of a dead unit, and near the ends of float32."""
    some = [g * size for g in gradients(15, (5, 5))]
    for n, g in enumerate(some):
        g[2] = 0
        g[:, n % 5] *= 1e-6
    found = stepped(lambda p: RotatedAdamW(p, refresh=3, source=source), some, dtype=torch.float32)
    assert bool(found.isfinite().all())


def test_a_gradient_that_is_not_finite_leaves_the_basis_alone() -> None:
    w = nn.Parameter(torch.zeros(4, 4))
    optimizer = RotatedAdamW([w], refresh=1)
    for n in range(6):
        w.grad = torch.randn(4, 4) if n != 3 else torch.full((4, 4), torch.nan)
        optimizer.step()
        for name in ("left", "right"):
            basis = optimizer.state[w][name]
            torch.testing.assert_close(basis.mT @ basis, torch.eye(4))


def test_a_side_that_is_too_long_has_no_basis_and_it_is_said_once() -> None:
    with pytest.warns(UserWarning, match=r"RotatedAdamW: .*shape \(9, 3\) .* longer than 8.*raise largest=") as told:
        for _ in range(3):
            w = nn.Parameter(torch.randn(9, 3))
            optimizer = RotatedAdamW([w], largest=8)
            w.grad = torch.randn(9, 3)
            optimizer.step()
    assert len(told) == 1
    assert "left" not in optimizer.state[w] and optimizer.state[w]["right"].shape == (3, 3)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"betas": (1.0, 0.9)}, r"betas\[0\] must be at least 0 and below 1"),
        ({"basis_beta": -0.1}, "basis_beta must be at least 0 and below 1"),
        ({"lr": -1.0}, "lr must be at least 0"),
        ({"refresh": 0}, "refresh must be a whole number of at least 1"),
        ({"source": "3rd"}, 'source must be "2nd" or "1st"'),
        ({"sides": 3}, "sides must be 2 or 1"),
    ],
)
def test_options_out_of_range_are_refused(options: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RotatedAdamW([nn.Parameter(torch.zeros(2, 2))], **options)


# -- pipelines -------------------------------------------------------------------------------------------------------


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))


def pipeline(method: Any, seed: int = 0, modules: Any = None, **options: Any) -> pipeback.Pipeline:
    return pipeback.Pipeline(
        network(seed) if modules is None else modules, loss=nn.functional.mse_loss, method=method,
        optimizer=lambda p: RotatedAdamW(p, lr=0.01, refresh=3), micro_batch_size=3, **options,
    )  # fmt: skip


def batches(count: int) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    return [tuple(torch.randn(2, 3, 6, generator=generator)) for _ in range(count)]


def test_without_a_delay_it_is_the_plain_loop() -> None:
    pipe, plain = pipeline("sgd"), network()
    optimizer = RotatedAdamW(plain.parameters(), lr=0.01, refresh=3)
    for x, y in batches(20):
        pipe.push(x, y)
        optimizer.zero_grad()
        nn.functional.mse_loss(plain(x), y).backward()
        optimizer.step()
    pipe.drain()
    assert all(map(torch.equal, pipe.model.parameters(), plain.parameters()))


@pytest.mark.parametrize("method", ["pb", "pipedream", "ef", "gpipe", "staleness_lr"])
def test_every_runtime_and_store_gives_the_same_bits(method: str, tmp_path: Any) -> None:
    def run(**options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        pipe = pipeline(method, **options)
        for x, y in batches(17):
            pipe.push(x, y)
        flying = everything(pipe)
        pipe.drain()
        found = flying, everything(pipe)
        pipe.close()
        return found

    expected = run()
    for options in ({"workers": 2}, {"store": "host"}, {"store": f"disk:{tmp_path}"},
                    {"debug": pipeback.Debug(order="random")}):  # fmt: skip
        assert all(map(torch.equal, run(**options), expected)), options


@pytest.mark.parametrize("at", [5, 6, 7])
def test_a_state_in_flight_goes_on(at: int) -> None:
    one, other, some = pipeline("pb"), pipeline("pb", seed=5), batches(16)
    for x, y in some[:at]:
        one.push(x, y)
    other.load_state_dict(one.state_dict())
    for pipe in (one, other):
        for x, y in some[at:]:
            pipe.push(x, y)
    assert torch.equal(everything(one), everything(other))


def test_a_plan_knows_the_state(tmp_path: Any) -> None:
    pipe = pipeline("gpipe", store="host")
    x, y = batches(1)[0]
    planned = pipe.plan(x, y).host
    pipe.push(x, y)
    pipe.wait()
    kept = [
        v.numel() * v.element_size()
        for stage in pipe._engine.stages
        for entry in stage.optimizer.state.values()
        for v in entry.values()
    ]
    assert planned.optimizer == sum(kept)


def test_what_it_cannot_do_is_refused_with_a_cure() -> None:
    with pytest.raises(ValueError, match="sparsity: RotatedAdamW of stage 0 .* may look at whole matrices"):
        pipeline("pb", store=pipeback.Streaming("host", sparsity="magnitude"))
    with pytest.raises(ValueError, match='cerebras is written for momentum SGD.*RotatedAdamW.*method="ef"'):
        pipeline("cerebras")
