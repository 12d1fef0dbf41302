"""A stage draws from its own stream: the numbers are those of the default generator, whoever else draws."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipeback.stages.random_stream import OwnRandomStream
from tests.laws.cases import data, everything, pipeline

ATTENTION = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
LSTM = nn.LSTM(8, 8, 2, dropout=0.3, batch_first=True)
LAYER = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.4, inplace=True),
    "dropout1d": lambda x: F.dropout1d(x, 0.4),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel": lambda x: F.gumbel_softmax(x, hard=True),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 9),
    "new": lambda x: torch.randn(3, 4) + torch.rand(4) + torch.randint(5, (4,)) + torch.randperm(4),
    "bernoulli": lambda x: torch.bernoulli(torch.sigmoid(x)),
    "multinomial": lambda x: torch.multinomial(torch.sigmoid(x[0]), 3).float(),
    "normal": lambda x: torch.normal(x, 1.0) + x.clone().normal_() + x.clone().exponential_(),
    "native dropout": lambda x: torch.native_dropout(x, 0.4, True)[0],
    "attention": lambda x: ATTENTION(x, x, x)[0],
    "scaled attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3),
    "lstm": lambda x: LSTM(x)[0],
    "transformer": LAYER,
}


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_of_a_default_generator(name):
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(3), requires_grad=True)
    torch.manual_seed(5)
    wanted = [DRAWS[name](x) for _ in range(3)]
    after = torch.get_rng_state()
    torch.manual_seed(99)
    before = torch.get_rng_state()
    own = torch.Generator().manual_seed(5)
    with OwnRandomStream(own):
        found = [DRAWS[name](x) for _ in range(3)]
    assert torch.equal(torch.get_rng_state(), before), "the default generator has moved"
    assert torch.equal(own.get_state(), after)
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)
    if wanted[0].requires_grad:
        gradients = [torch.autograd.grad(y.sum(), x)[0] for y in (found[0], wanted[0])]
        assert torch.equal(*gradients)


def test_the_caller_draws_meanwhile():
    """As a DataLoader does: neither the caller's numbers nor the stages' masks change."""

    def run(disturb, **options):
        torch.manual_seed(7)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.3), nn.Tanh()) for _ in range(4)])
        pipe = pipeline(model, "pb", **options)
        drawn = []
        for x, y in data(60, samples=16, width=64):
            pipe.push(x, y)
            if disturb:
                drawn += [torch.rand(500) for _ in range(5)]
        found = everything(pipe)
        pipe.close()
        return found, torch.stack(drawn) if drawn else None

    wanted, numbers = run(True)
    quiet, _ = run(False)
    assert torch.equal(wanted, quiet)
    for _ in range(3):
        found, drawn = run(True, workers=2)
        assert torch.equal(found, wanted)
        assert torch.equal(drawn, numbers)
