"""Every way to keep activations, and training with one of them."""

import pytest
import torch

from tests.laws.cases import CASES, STAGES, everything, pipeline

KINDS = ("device", "host", "recompute")
poor = pytest.mark.filterwarnings("ignore:.*takes its statistics")


def train(model, case, batches, **options):
    """Losses, and all that is held after a drain."""
    torch.manual_seed(7)
    pipe = pipeline(model, CASES[case](STAGES) if case in CASES else case, **options)
    losses = torch.stack([pipe.push(x, y).clone() for x, y in batches])
    pipe.drain()
    result = losses, everything(pipe)
    pipe.close()
    return result


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
