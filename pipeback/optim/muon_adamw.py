"""Muon for matrices and AdamW for the rest, in one optimizer, as a stage of a pipeline needs it.

    matrices   B ← μ·B + (1 − μ)·G        W ← (1 − η·λ)·W − η·s·NS(B)        NS: Newton–Schulz steps towards U·Vᵀ of B
    others     AdamW

Both steps are torch's own. torch.optim.Muon takes matrices only, and stages have vectors beside them. The factor s is
that of `adjust_lr_fn`; "match_rms_adamw", the default here, makes a rate of AdamW one of Muon. Groups with muon=False
are stepped by AdamW alone, as is usual for embeddings and heads.

Jordan et al. 2024, kellerjordan.github.io/posts/muon; Liu et al., arXiv 2502.16982.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

ADAMW = {
    "amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None,
    "decoupled_weight_decay": True,
}  # fmt: skip
TINY = 1e-7  # of Muon, beside the norm of a matrix


class MuonAdamW(torch.optim.Optimizer):
    """Muon for matrices, AdamW for the rest.

    Args:
        params: the parameters, or groups of them; each group is cut into its matrices and its other parameters.
        lr, betas, eps, weight_decay: those of torch.optim.AdamW; lr and weight_decay are Muon's, too.
        momentum, nesterov, ns_steps, adjust_lr_fn: those of torch.optim.Muon.
        muon: whether the matrices of a group are stepped by Muon.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = "match_rms_adamw",
        muon: bool = True,
    ) -> None:
        own = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, muon=muon, **ADAMW)
        defaults = {
            **own, "momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn,
            "ns_coefficients": torch.optim.Muon([torch.nn.Parameter(torch.zeros(1, 1))]).defaults["ns_coefficients"],
        }  # fmt: skip
        super().__init__(params, defaults)
        groups, self.param_groups = self.param_groups, []
        for group in groups:
            for matrices in (True, False):
                some = [w for w in group["params"] if (group["muon"] and w.dim() == 2) == matrices]
                if some:
                    self.param_groups.append({**group, "params": some, "muon": matrices})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make one step. closure: evaluates the loss once more, and returns it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for matrices, kind in ((True, torch.optim.Muon), (False, torch.optim.AdamW)):
            some = [group for group in self.param_groups if group["muon"] == matrices]
            if some:
                if matrices:
                    some = [{**group, "eps": TINY} for group in some]
                part = kind.__new__(kind)
                part.__setstate__({"state": self.state, "param_groups": some, "defaults": {}})
                part.step()
        return loss
