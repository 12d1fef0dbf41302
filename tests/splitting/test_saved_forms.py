"""Forms of a saved state: a new pipeline traces the model for them as the one did that saved them."""

import pytest
import torch
from torch import nn

import pipeback

WIDTH = 6


class Masked(nn.Module):
    """It makes a mask where it is traced by shapes alone, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        mask = torch.ones(len(x), 1, dtype=x.dtype) if type(x).__name__ == "FakeTensor" else None
        for layer in self.layers:
            x = torch.tanh(layer(x if mask is None else x * mask))
        return x


class Experts(nn.Module):
    """How many samples an expert gets depends on their values."""

    def __init__(self):
        super().__init__()
        self.own = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        output = torch.zeros_like(x)
        for n, expert in enumerate(self.own):
            mine = torch.nonzero((x.sum(1) > 0) == bool(n)).squeeze(1)
            output = output.index_add(0, mine, expert(x[mine]))
        return output


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Counting(Masked):
    """Its own forward reads how many samples there are of a kind."""

    def forward(self, x):
        count = len(x[x[:, 0] > 0])
        for layer in self.layers:
            x = torch.tanh(layer(x) / (1 + count))
        return x


def built(kind, seed, **options):
    torch.manual_seed(seed)
    stages = pipeback.Splitting("layer", leaves=LEAVES[kind])
    return pipeback.Pipeline(
        kind().double(), loss=nn.functional.mse_loss, optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        method="pb", micro_batch_size=2, example=batches()[0][0], stages=stages, **options,
    )  # fmt: skip


LEAVES = {Masked: [], Counting: [], Mixture: [f"layers.{n}" for n in range(3)]}


def batches():
    torch.manual_seed(7)
    return [(torch.randn(4, WIDTH).double(), torch.randn(4, WIDTH).double()) for _ in range(6)]


@pytest.mark.parametrize("drains", [False, True])
@pytest.mark.parametrize(
    ("kind", "options"), [(Masked, {}), (Masked, {"store": "host"}), (Mixture, {}), (Mixture, {"workers": 2})], ids=str
)
def test_a_new_pipeline_goes_on(kind, options, drains):
    data, pipe = batches(), built(kind, 0, **options)
    for batch in data[:3]:
        pipe.push(*batch)
    if drains:
        pipe.drain()
    state = pipe.state_dict()
    other = built(kind, 1, **options)
    other.load_state_dict(state)
    assert other.state_dict()["plain"]["forms"] == state["plain"]["forms"]
    wanted, found = ([float(each.push(*batch)) for batch in data[3:]] for each in (pipe, other))
    assert found == wanted


def test_what_cannot_be_traced_is_left_to_the_push_unless_it_is_in_flight():
    data, pipe = [(torch.full_like(x, -1.0), y) for x, y in batches()], built(Counting, 0)
    for batch in data[:3]:
        pipe.push(*batch)
    state, other = pipe.state_dict(), built(Counting, 1)
    with pytest.raises(ValueError, match=r"Counting cannot be traced for micro-batches of .* call pipe.drain"):
        other.load_state_dict(state)
    pipe.drain()
    other.load_state_dict(pipe.state_dict())
    wanted, found = ([float(each.push(*batch)) for batch in data[3:]] for each in (pipe, other))
    assert found == wanted
