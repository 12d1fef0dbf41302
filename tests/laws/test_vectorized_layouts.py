"""Law: stages as one whose weights lie with channels last train as the event loop does, with every kind of weights."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import pipeback
from pipeback.vectorized.making import fastest_way


def trained(method, vectorize):
    torch.manual_seed(0)
    convolutions = (nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.ReLU()) for i, o in ((2, 4), (4, 6)))
    model = nn.Sequential(*convolutions, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)))
    pipe = pipeback.Pipeline(
        model, loss=cross_entropy, optimizer=lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9), method=method,
        micro_batch_size=1, vectorize=vectorize,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        pipe.push(torch.randn(16, 2, 5, 5, generator=generator), torch.randint(3, (16,), generator=generator))
    return pipe.model[1][0].weight, list(pipe.model.parameters())


@pytest.mark.parametrize("method", ["pb", "pipedream", "spectrain", "pipemare"])
def test_the_way_with_channels_last(method, monkeypatch):
    """Which way is fastest depends on the machine, so that each must be right on any."""
    found = []

    def seconds(calls, *_):
        found.append(len(calls))
        return [0.0 if n == 1 else 1.0 for n in range(len(calls))]  # the second way is that with channels last

    _, expected = trained(method, False)
    monkeypatch.setattr(fastest_way, "seconds", seconds)
    weight, weights = trained(method, True)
    assert found and weight.is_contiguous(memory_format=torch.channels_last)
    for one, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(one, other)
