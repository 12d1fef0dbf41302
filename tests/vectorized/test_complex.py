"""Stages with complex weights run as one with the numbers that they have by themselves."""

import pytest
import torch
from torch import nn

import pipeback
from pipeback.vectorized.making.closeness import alike


class Spectral(nn.Module):
    """A layer whose weight multiplies the spectrum of its input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.3 * torch.randn(5, dtype=torch.complex128))
        self.linear = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x):
        return x + torch.tanh(self.linear(torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=8)))


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.002),
}


def losses(optimizer, method, vectorize):
    torch.manual_seed(0)
    model = nn.Sequential(*[Spectral() for _ in range(5)])
    pipe = pipeback.Pipeline(
        model, loss=nn.functional.mse_loss, optimizer=OPTIMIZERS[optimizer], method=method, micro_batch_size=2,
        vectorize=vectorize,
    )  # fmt: skip
    x, y = torch.randn(2, 16, 8, dtype=torch.float64)
    found = torch.stack([pipe.push(x, y) for _ in range(4)])
    pipe.close()
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("method", ["pb", "pipedream"])
def test_the_numbers_are_those_of_stages_by_themselves(optimizer, method):
    found, wanted = (losses(optimizer, method, vectorize) for vectorize in (True, False))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=0)


@pytest.mark.parametrize("kind", [torch.complex64, torch.complex128])
def test_imaginary_parts_are_compared(kind):
    some = torch.randn(6, dtype=kind)
    assert alike(some, some.clone(), False)
    assert not alike(some, some.conj().resolve_conj(), False)
    assert not alike(some, 1.001 * some, False)
