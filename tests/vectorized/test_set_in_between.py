"""What is set in optimizers between pushes holds for stages that run as one, as for stages by themselves."""

import pytest
import torch
from torch import nn

import pipeback


def losses(method, vectorize, optimizer, change):
    """The losses of pushes, before some of which `change` is called with every optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(5)]).double()
    pipe = pipeback.Pipeline(
        model, loss=nn.functional.mse_loss, optimizer=optimizer, method=method, micro_batch_size=2,
        vectorize=vectorize,
    )  # fmt: skip
    x, y = torch.randn(2, 12, 4, dtype=torch.float64)
    found = []
    for n in range(5):
        if n in (1, 3):
            with pipe.shown(changes=True):
                for one in pipe.optimizers:
                    change(one, n)
        found.append(pipe.push(x, y))
    told = torch.stack(found)
    pipe.close()
    return told


@pytest.mark.parametrize("method", ["pb", "pipedream", "gpipe"])
def test_momentum_may_be_set_after_updates_without(method):
    def change(optimizer, n):
        optimizer.param_groups[0]["momentum"] = 0.9 if n == 1 else 0.0

    found, wanted = (
        losses(method, vectorize, lambda params: torch.optim.SGD(params, lr=0.05), change)
        for vectorize in (True, False)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=0)


@pytest.mark.parametrize("method", ["pb", "pipedream"])
@pytest.mark.parametrize("name", ["step", "exp_avg", "exp_avg_sq"])
def test_any_tensor_of_a_state_may_be_replaced(method, name):
    def change(optimizer, n):
        for entry in list(optimizer.state.values())[-1:]:  # a stage may have had no update yet
            entry[name] = torch.zeros_like(entry[name])

    found, wanted = (
        losses(method, vectorize, lambda params: torch.optim.AdamW(params, lr=0.01), change)
        for vectorize in (True, False)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=0)
