"""Batches as most loaders give them, flat tuples and lists, are cut as any other structure."""

import pytest
import torch

from pipeback.tensors import batches

X, Y = torch.arange(10).view(5, 2), torch.arange(5)
FLAT = {
    "tuple": (X, Y), "list": [X, Y], "with others": (X, 3, None, "abc", Y), "0-d": [X, torch.tensor(2.0)],
}  # fmt: skip


@pytest.mark.parametrize("form", FLAT)
def test_flat_ones(form, monkeypatch):
    batch, sizes = FLAT[form], batches.sizes(5, 2)
    found = batches.cut(batch, sizes)
    monkeypatch.setattr(batches, "_flat", lambda batch: False)
    wanted = batches.cut(batch, sizes)
    assert [type(part) for part in found] == [type(part) for part in wanted] == [type(batch)] * 3
    for part, other in zip(found, wanted, strict=True):
        for a, b in zip(part, other, strict=True):
            same = isinstance(a, torch.Tensor) and a.data_ptr() == b.data_ptr() and torch.equal(a, b)
            assert same if isinstance(b, torch.Tensor) else a == b
    assert len({id(part) for part in found}) == 3


def test_a_list_of_strings_is_one_entry_per_sample():
    assert batches.cut(["a", "b", "c"], [2, 1]) == [["a", "b"], ["c"]]
    assert batches.cut([X[:3], ["a", "b", "c"]], [2, 1])[1][1] == ["c"]
