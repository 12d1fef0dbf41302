"""The step of Adam over rows, against torch's own step of every row."""

import pytest
import torch

from pipeback.vectorized.steps import adam_rows
from pipeback.vectorized.steps.adam_rows import AdamSettings, AdamStep

ROWS, SHAPES, BETAS, EPS = 3, [(4, 5), (6,)], (0.8, 0.95), 1e-3


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("decays", [(0.0, 0.0), (0.3, 0.0), (0.3, 0.1)])
@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("compiler", [False, True])
def test_every_row_is_stepped_as_torch_steps_it(decoupled, decays, same, compiler):
    """Rows and weights that have seen different numbers of updates, at rates of their own, or all at one; compiler: in
    the form that is written for one."""
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


@pytest.mark.parametrize("alone", [False, True])
def test_gradients_that_lie_otherwise_in_memory_than_their_weights(alone):
    """As those of kernels with channels last do; and tensors of the state may be replaced between two steps."""
    torch.manual_seed(0)
    lead = () if alone else (ROWS,)
    weight = torch.randn(*lead, 4, 2, 2, 3, dtype=torch.float64).transpose(-1, -3)  # with channels last
    single = [torch.nn.Parameter(w.clone()) for w in ([weight] if alone else weight)]
    optimizer = torch.optim.AdamW(single, lr=0.01, betas=BETAS, eps=EPS, weight_decay=0.3)
    settings = AdamSettings(BETAS, EPS, True, (0.3,))
    moving = AdamStep(settings, [[0.01] * len(single)], [weight])
    first, second, steps = [torch.zeros_like(weight)], [torch.zeros_like(weight)], torch.zeros(1, len(single))
    for n in range(4):
        grad = torch.randn(weight.shape, dtype=torch.float64)
        for p, g in zip(single, [grad] if alone else grad, strict=True):
            p.grad = g.clone()
        optimizer.step()
        if n == 2:
            first, second, steps = [first[0].clone()], [second[0].clone()], steps.clone()
        moving.move([weight], first, second, steps, [grad])
        for w, p in zip([weight] if alone else weight, single, strict=True):
            torch.testing.assert_close(w, p.detach(), rtol=1e-13, atol=1e-13)
