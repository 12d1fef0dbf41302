"""A folder with checkpoints that several files read."""

import pytest

from pipeback import checkpoint
from tests.checkpoint.saved import trained
from tests.laws.cases import data


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A folder with two checkpoints of one run, at 7 and 9 micro-batches. Copy it before damaging it."""
    folder = tmp_path_factory.mktemp("two")
    pipe = trained(7)
    checkpoint.save(pipe, folder, facts={"epoch": 1})
    for x, y in data(9)[7:]:
        pipe.push(x, y)
    checkpoint.save(pipe, folder, facts={"epoch": 2})
    return folder
