"""breakdown: FLOPs by hand, what a stage owns and how late it is; asking changes nothing."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from pipeback import Pipeline
from tests.laws.cases import data, network, pipeline


def test_a_linear_network_by_hand():
    model = nn.Sequential(nn.Linear(8, 16), nn.Sequential(nn.LayerNorm(16), nn.ReLU()), nn.Linear(16, 2, bias=False))
    sgd = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    pipe = Pipeline(model, loss=mse_loss, optimizer=sgd, method="pb", micro_batch_size=4)
    rows = pipe.breakdown(torch.randn(12, 8), torch.randn(12, 2))
    assert [row.stage for row in rows] == [0, 1, 2] and [row.name for row in rows] == ["0", "1", "2"]
    assert [row.layers for row in rows] == ["Linear", "LayerNorm", "Linear"]
    assert [row.parameters for row in rows] == [8 * 16 + 16, 32, 32]
    assert [row.forward_flops for row in rows] == [2 * 4 * 8 * 16, 0, 2 * 4 * 16 * 2]  # a micro-batch is 4 samples
    assert [row.backward_flops for row in rows] == [
        2 * 4 * 8 * 16,
        0,
        2 * 2 * 4 * 16 * 2,
    ]  # the input needs no gradient
    assert [row.delay for row in rows] == pipe.delays == [4, 2, 0]
    assert all(row.seconds > 0 and row.activations > 0 for row in rows)


class Tied(nn.Module):
    """Attention, a weight that stands alone, and an embedding that is the head, too."""

    def __init__(self):
        super().__init__()
        self.words, self.attention = nn.Embedding(7, 4), nn.MultiheadAttention(4, 1, batch_first=True)
        self.scale, self.head = nn.Parameter(torch.ones(4)), nn.Linear(4, 7, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        x = self.words(x)
        x, _ = self.attention(x, x, x)
        return self.head(x * self.scale)


def test_layers_lent_weights_and_loose_ones():
    x = torch.randint(7, (2, 3))
    sgd = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    loss = lambda output, _: output.sum()  # noqa: E731
    pipe = Pipeline(Tied(), loss=loss, optimizer=sgd, method="pb", stages="layer", example=x)
    rows = pipe.breakdown(x)
    assert ", ".join(row.layers for row in rows) == "Embedding, scale, MultiheadAttention, Linear (lent)"
    assert sum(row.parameters for row in rows) == sum(p.numel() for p in pipe.model.parameters())


def test_asking_changes_nothing():
    """Before the first push, and in the middle, with micro-batches in flight."""
    found = []
    for asked in (False, True):
        pipe = pipeline(network(), "cerebras")
        losses = []
        for n, (x, y) in enumerate(data(20)):
            if asked and n in (0, 10):
                assert len(pipe.breakdown(x, y, repeats=2)) == pipe.stages
            losses.append(pipe.push(x, y))
        found.append([*losses, *pipe.model.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_weights_in_a_store():
    pipe = pipeline(network(), "pb", store="host")
    x, y = data(1)[0]
    rows = pipe.breakdown(x, y)
    assert len(rows) == pipe.stages and rows[0].forward_flops
    pipe.close()
    with pytest.raises(RuntimeError, match="closed"):
        pipe.breakdown(x, y)


@pytest.mark.parametrize("store", [None, "host"])
def test_repeats_give_a_median_and_every_time(store):
    pipe = pipeline(network(), "cerebras", store=store)
    x, y = data(1)[0]
    assert all(row.times == () for row in pipe.breakdown(x, y))
    rows = pipe.breakdown(x, y, repeats=3)
    assert all(len(row.times) == 3 and row.seconds == sorted(row.times)[1] > 0 for row in rows)
    for wrong in (-1, 1.5, "3"):
        with pytest.raises(ValueError, match=r"repeats=.*write a whole number, such as repeats=15"):
            pipe.breakdown(x, y, repeats=wrong)
    pipe.close()
