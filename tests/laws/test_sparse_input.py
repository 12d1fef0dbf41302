"""Sparse tensors in a model, as graph networks have them: a neighbourhood as a buffer, or pushed with each micro-batch.

They train to plain PyTorch's bits, whoever keeps the activations and wherever the weights are, and resume in flight.
"""

import pytest
import torch
from torch import nn

import pipeback
from pipeback import checkpoint
from pipeback.stages.saved_graph import held_bytes
from pipeback.tensors.copies import equal, pieces, replica

FORMATS = {"coo": torch.Tensor.to_sparse, "csr": torch.Tensor.to_sparse_csr, "csc": torch.Tensor.to_sparse_csc}


class Graph(nn.Module):
    """Three layers; between them every node sees its neighbours."""

    def __init__(self, neighbours=None):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.register_buffer("neighbours", neighbours)

    def forward(self, x, neighbours=None):
        neighbours = self.neighbours if neighbours is None else neighbours
        x = (neighbours @ self.a(x)).relu()
        return self.c((neighbours @ self.b(x)).relu())


def case(kind, pushed):
    """Models of equal weights, as many as are asked for, and micro-batches."""
    torch.manual_seed(1)
    buffer = FORMATS[kind]((torch.rand(6, 6) > 0.5).float())
    data = []
    for _ in range(5):
        x, y = torch.randn(6, 4), torch.randint(2, (6,))
        data.append(((x, FORMATS[kind]((torch.rand(6, 6) > 0.5).float())) if pushed else x, y))
    return lambda: Graph(None if pushed else replica(buffer)), data


def pipeline(model, data, **options):
    return pipeback.Pipeline(
        model, loss=nn.functional.cross_entropy, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        stages="layer", example=data[0][0], **{"method": "sgd", **options},
    )  # fmt: skip


OPTIONS = [{}, {"workers": 2}, {"activations": "recompute"}, {"activations": "host"}, {"store": "host"}]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: str(*o.items()) if o else "event loop")
@pytest.mark.parametrize("pushed", [False, True], ids=["buffer", "pushed"])
@pytest.mark.parametrize("kind", ["coo", "csr"])
def test_they_train_to_the_bits_of_a_plain_loop(kind, pushed, options):
    made, data = case(kind, pushed)
    plain, model = made(), made()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    expected = []
    for x, y in data:
        loss = nn.functional.cross_entropy(plain(*x) if pushed else plain(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    pipe = pipeline(model, data, **options)
    assert pipe.stages == 3 and [pipe.push(x, y).item() for x, y in data] == expected
    pipe.drain()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert pushed or equal(model.neighbours, plain.neighbours)


@pytest.mark.parametrize("pushed", [False, True], ids=["buffer", "pushed"])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_checkpoint_in_flight_goes_on_to_the_same_bits(kind, pushed, tmp_path):
    made, data = case(kind, pushed)
    first, second = made(), made()
    pipe = pipeline(first, data, method="pb")
    for x, y in data[:3]:
        pipe.push(x, y)
    checkpoint.save(pipe, tmp_path)
    other = pipeline(second, data, method="pb")
    checkpoint.load(other, tmp_path)
    assert pushed or equal(first.neighbours, second.neighbours)
    losses = [[each.push(x, y).item() for x, y in data[3:]] for each in (pipe, other)]
    assert losses[0] == losses[1]
    for each in (pipe, other):
        each.drain()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_what_is_held_of_them_is_their_indices_and_values():
    dense = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    csr = torch.sparse_csr_tensor(torch.tensor([0, 1, 2]), torch.tensor([0, 1]), torch.tensor([1.0, 2.0]), (2, 2))
    for kind, found, size in (
        ("coo", dense.to_sparse(), 2 * 2 * 8 + 2 * 4),
        ("csr", csr, (3 + 2) * 8 + 2 * 4),
    ):
        assert held_bytes([], [found, found], []) == size and held_bytes([], [found], [found]) == 0
        copy = replica(found)
        assert equal(copy, found) and not equal(copy, FORMATS[kind](2 * dense))
        assert not {p.data_ptr() for p in pieces(copy)} & {p.data_ptr() for p in pieces(found)}


def test_they_are_not_cut_into_micro_batches():
    made, data = case("csr", True)
    pipe = pipeline(made(), data, micro_batch_size=3)
    with pytest.raises(ValueError, match=r"layout torch.sparse_csr, which is not cut .* micro_batch_size=None"):
        pipe.push(*data[0])
    (x, neighbours), y = data[0]
    cured = pipeline(made(), data, micro_batch_size=None)
    assert cured.push((x, neighbours), y).isfinite()
