"""AdamW in a rotated basis: basis rotation, and SOAP.

    L ← β_s·L + (1 − β_s)·G·Gᵀ        R ← β_s·R + (1 − β_s)·Gᵀ·G
    every `refresh` steps:  Q_L, Q_R ← qr(L·Q_L).Q, qr(R·Q_R).Q, the largest first, V in the same order
    M ← β₁·M + (1 − β₁)·G             V ← β₂·V + (1 − β₂)·(Q_Lᵀ·G·Q_R)²
    W ← (1 − η·λ)·W                   W ← W − η·Q_L·[ M̃ / (√V̂ + ε) ]·Q_Rᵀ,  M̃ = Q_Lᵀ·M̂·Q_R

Adam is slowed by a delay τ by about τ·‖H‖₁,₁, which is smallest in the basis of the Hessian's eigenvectors; those of L
and R are close to it. G is the gradient of a matrix W, or of a kernel taken as one; at first Q_L and Q_R are the
eigenvectors themselves. Vectors, sides longer than `largest`, and groups with rotate=False have no basis, and where a
weight has none at all, the step has the bits of torch.optim.AdamW. M̂ and V̂ are corrected for their bias.

    source="1st"    L = M·Mᵀ and R = Mᵀ·M, which are not kept, so that the bases are those of the first moment's
                    singular vectors
    sides=1         only the shorter side has a basis
    soap=True       the bases are refreshed after the step, so that they do not know its gradient, and the first
                    gradient only makes them

Jung, Shin and Lee, ICML 2026 (arXiv 2602.03515), and their code, in which source="1st" multiplies M by the other basis
instead; Vyas et al., arXiv 2409.11321 (SOAP). In both, ε stands beside √V and not beside √V̂.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from pipeback.tensors import eigenbasis
from pipeback.tensors.eigenbasis import as_matrix, restored, rotated

SIDES = "left", "right"  # the names of the bases in the state of a weight


class RotatedAdamW(torch.optim.Optimizer):
    """AdamW in the basis of the gradient's covariances, for matrices.

    Args:
        params: the parameters, or groups of them.
        lr, betas, eps, weight_decay, maximize: those of torch.optim.AdamW.
        basis_beta: β_s; None: β₂.
        refresh: steps between two refreshments of the bases.
        source: "2nd" or "1st", the moment whose basis is taken.
        sides: 2, or 1 for the shorter side alone.
        largest: longer sides have no basis; a warning says so once.
        soap: whether bases are refreshed after the step.
        rotate: whether the matrices of a group are rotated at all.

    State of a matrix of r × c numbers beside AdamW's: 2·(r² + c²) with both sides, r² + c² with source="1st", and only
    the part of the shorter side with sides=1.

    Raises ValueError for options out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        basis_beta: float | None = None,
        refresh: int = 10,
        source: Literal["2nd", "1st"] = "2nd",
        sides: Literal[1, 2] = 2,
        largest: int = 2048,
        soap: bool = False,
        rotate: bool = True,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            params,
            dict(
                lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, basis_beta=basis_beta, refresh=refresh,
                source=source, sides=sides, largest=largest, soap=soap, rotate=rotate, maximize=maximize,
            ),
        )  # fmt: skip
        for group in self.param_groups:
            _check(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make one step. closure: evaluates the loss once more, and returns it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            with eigenbasis.exact(group["params"]):
                for w in group["params"]:
                    if w.grad is not None:
                        g = w.grad if w.grad.layout is torch.strided else w.grad.to_dense()
                        _stepped(w, -g if group["maximize"] else g, self.state[w], group)
        return loss


def _check(group: dict[str, Any]) -> None:
    beta = group["betas"][1] if group["basis_beta"] is None else group["basis_beta"]
    for name, value in (("betas[0]", group["betas"][0]), ("betas[1]", group["betas"][1]), ("basis_beta", beta)):
        if not 0 <= value < 1:
            raise ValueError(f"RotatedAdamW: {name} must be at least 0 and below 1, but is {value!r}")
    for name in ("lr", "eps", "weight_decay"):
        if not float(group[name]) >= 0:
            raise ValueError(f"RotatedAdamW: {name} must be at least 0, but is {group[name]!r}")
    for name in ("refresh", "largest"):
        if not isinstance(group[name], int) or group[name] < 1:
            raise ValueError(f"RotatedAdamW: {name} must be a whole number of at least 1, but is {group[name]!r}")
    if group["source"] not in ("2nd", "1st"):
        raise ValueError(f'RotatedAdamW: source must be "2nd" or "1st", but is {group["source"]!r}')
    if group["sides"] not in (1, 2):
        raise ValueError(f"RotatedAdamW: sides must be 2 or 1, but is {group['sides']!r}")


def _stepped(w: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Step one weight along its gradient g."""
    if not state:
        _begin(w, state, group)
    if "prepared" not in state:
        _moved(w, g, state, group)
        return
    before = bool(state["prepared"])
    if not group["soap"] or not before:
        _refresh(as_matrix(g), state, group, int(state["step"]) + 1)
    if not group["soap"] or before:
        _moved(w, g, state, group)
    if group["soap"] and before:
        _refresh(as_matrix(g), state, group, int(state["step"]))


def _begin(w: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """The state before the first step."""
    state["step"] = torch.zeros((), dtype=torch.float32)
    state["exp_avg"] = torch.zeros_like(w, memory_format=torch.preserve_format)
    state["exp_avg_sq"] = torch.zeros_like(w, memory_format=torch.preserve_format)
    if not group["rotate"] or w.dim() < 2:
        return
    shape = as_matrix(w).shape
    if max(shape) > group["largest"]:
        eigenbasis.tell_too_large("RotatedAdamW", tuple(w.shape), group["largest"])
    wanted = eigenbasis.sides(w.shape, group["largest"], group["sides"])
    for name, size in [(name, size) for name, size, has in zip(SIDES, shape, wanted, strict=True) if has]:
        state[name] = torch.eye(size, dtype=w.dtype, device=w.device)
        if group["source"] == "2nd":
            state[f"{name}_covariance"] = torch.zeros_like(state[name])
        state["prepared"] = torch.zeros((), dtype=torch.float32)  # whether there are bases


def _refresh(g: Tensor, state: dict[str, Any], group: dict[str, Any], step: int) -> None:
    """Take a gradient into the covariances; at the first one and every `refresh` steps make new bases of them."""
    beta1, beta2 = map(float, group["betas"])
    beta = beta2 if group["basis_beta"] is None else float(group["basis_beta"])
    names = [name for name in SIDES if name in state]
    kept = {name: state[f"{name}_covariance"] for name in names if group["source"] == "2nd"}
    for name, covariances in kept.items():
        eigenbasis.covariance(covariances, g, beta, left=name == "left")
    first = not state["prepared"]
    if not first and step % group["refresh"]:
        return
    if not kept:
        moment = as_matrix(state["exp_avg"])
        moment = moment if group["soap"] and not first else torch.lerp(moment, g, 1 - beta1)  # with this gradient
        kept = {name: moment @ moment.mT if name == "left" else moment.mT @ moment for name in names}
    for name, covariances in kept.items():
        if first:
            state[name].copy_(eigenbasis.eigenvectors(covariances, state[name]))
            continue
        order = eigenbasis.descending(covariances, state[name])
        squares = as_matrix(state["exp_avg_sq"])
        state["exp_avg_sq"].copy_(
            (squares[order] if name == "left" else squares[:, order]).view_as(state["exp_avg_sq"])
        )
        state[name].copy_(eigenbasis.iterated(covariances, state[name][:, order]))
    state["prepared"].fill_(1)


def _moved(w: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Adam's step in the bases; without any, it is that of torch.optim.AdamW."""
    rate, (beta1, beta2), bases = float(group["lr"]), map(float, group["betas"]), [state.get(name) for name in SIDES]
    state["step"].add_(1)
    steps = float(state["step"])
    if group["weight_decay"]:
        w.mul_(1 - rate * group["weight_decay"])
    mean, squares = state["exp_avg"].lerp_(g, 1 - beta1), state["exp_avg_sq"]
    turned, along = g, mean
    if "prepared" in state:
        turned, along = (rotated(as_matrix(x), *bases).view_as(x) for x in (g, mean))
    squares.mul_(beta2).addcmul_(turned, turned, value=1 - beta2)
    below = squares.sqrt().div_((1 - beta2**steps) ** 0.5).add_(group["eps"])
    if "prepared" not in state:
        w.addcdiv_(along, below, value=-rate / (1 - beta1**steps))
    else:
        w.sub_(restored(as_matrix(along / below), *bases).view_as(w), alpha=rate / (1 - beta1**steps))
