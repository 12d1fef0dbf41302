"""The step of Adam over rows, against torch's own step of every row."""

import pytest
import torch

from pipeback.vectorized.steps import adam_rows
from pipeback.vectorized.steps.adam_rows import AdamSettings, AdamStep

ROWS, SHAPES, BETAS, EPS = 3, [(4, 5), (6,)], (0.8, 0.95), 1e-3


@pytest.mark.parametrize("large", [0, adam_rows.LARGE])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("decays", [(0.0, 0.0), (0.3, 0.0), (0.3, 0.1)])
@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("compiler", [False, True])
def test_every_row_is_stepped_as_torch_steps_it(large, decoupled, decays, same, compiler, monkeypatch):
    """Rows and weights that have seen different numbers of updates, at rates of their own, or all at one; compiler: in
    the form that is written for one."""
    monkeypatch.setattr(adam_rows, "LARGE", large)
    torch.manual_seed(0)
    weights = [torch.randn(ROWS, *shape, dtype=torch.float64) for shape in SHAPES]
    rates = [[0.01 * (1 + (not same) * r + 3 * n) for r in range(ROWS)] for n in range(len(SHAPES))]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    single = [[torch.nn.Parameter(w[r].clone()) for r in range(ROWS)] for w in weights]
    optimizers = [
        [kind([p], lr=rates[n][r], betas=BETAS, eps=EPS, weight_decay=decays[n]) for r, p in enumerate(some)]
        for n, some in enumerate(single)
    ]

    def step(n, r, grad):
        single[n][r].grad = grad
        optimizers[n][r].step()

    for n in range(len(SHAPES)):
        for r in range(ROWS):
            for _ in range(1 + 2 * r + n):
                step(n, r, torch.randn(SHAPES[n], dtype=torch.float64))
    kept = [[optimizers[n][r].state[single[n][r]] for r in range(ROWS)] for n in range(len(SHAPES))]
    weights = [torch.stack([p.detach() for p in some]) for some in single]
    first, second = (
        [torch.stack([entry[name] for entry in some]) for some in kept] for name in ("exp_avg", "exp_avg_sq")
    )
    steps = torch.tensor([[float(entry["step"]) for entry in some] for some in kept])
    moving = AdamStep(AdamSettings(BETAS, EPS, decoupled, decays), rates, weights)
    for _ in range(5):
        grads = [torch.randn_like(w.transpose(1, -1).contiguous()).transpose(1, -1) for w in weights]
        if compiler:
            adam_rows.adapted(moving.settings, weights, (first, second, steps), grads, (moving.columns,))
        else:
            moving.move(weights, first, second, steps, grads)
        for n, whole in enumerate(grads):
            for r, grad in enumerate(whole):
                step(n, r, grad.clone())
                torch.testing.assert_close(weights[n][r], single[n][r].detach(), rtol=1e-13, atol=1e-13)
                assert steps[n, r] == optimizers[n][r].state[single[n][r]]["step"]
