"""Law: rows that are spread over lines by copies with strides are where `index_copy_` would have put them."""

import doctest

import pytest
import torch

from pipeback.vectorized.buffers import spread_rows
from pipeback.vectorized.buffers.spread_rows import LARGE, SpreadRows, runs

PLACES = {
    "even": [1, 8, 15, 22],
    "round a ring": [17, 24, 3, 10, 17 + 7],
    "one": [5],
    "neighbours": [4, 5, 6],
    "backwards": [9, 6, 3],
    "none alike": [2, 3, 9, 1, 8, 20],
}


@pytest.mark.parametrize("lines", PLACES.values(), ids=PLACES)
def test_rows_are_where_they_belong(lines):
    generator = torch.Generator().manual_seed(0)
    widths = [3, LARGE // 4, LARGE // 4 + 1]  # small rows, and large ones
    values = [torch.randn(len(lines), width, generator=generator) for width in widths]
    places, lists = torch.tensor(lines), []
    for key in (None, 7):
        spread = SpreadRows([torch.zeros(25, width) for width in widths])
        for _ in range(2):  # the second time from memory
            spread.put(values, places, key)
        lists.append(spread.matrices)
    for width, value, *found in zip(widths, values, *lists, strict=True):
        wanted = torch.zeros(25, width).index_copy_(0, places, value)
        assert all(torch.equal(mine, wanted) for mine in found)


def test_lines_of_a_ring_are_a_run_until_its_end():
    assert [(run.rows, run.step) for run in runs([(2 * p) % 9 * 4 + p for p in range(9)])] == [
        (slice(0, 5), 9), (slice(5, 9), 9)
    ]  # fmt: skip


def test_large_rows_take_no_index_copy():
    class Watched(torch.overrides.TorchFunctionMode):
        called = 0

        def __torch_function__(self, function, kinds, given=(), named=None):
            self.called += function is torch.Tensor.index_copy_
            return function(*given, **(named or {}))

    spread, places = SpreadRows([torch.zeros(9, LARGE // 4)]), torch.tensor([1, 4, 7])
    with Watched() as watched:
        spread.put([torch.ones(3, LARGE // 4)], places, 0)
        assert watched.called == 0
        spread.put([torch.ones(3, LARGE // 4)], places)
        assert watched.called == 1


def test_the_doctests():
    assert doctest.testmod(spread_rows).failed == 0 < doctest.testmod(spread_rows).attempted
