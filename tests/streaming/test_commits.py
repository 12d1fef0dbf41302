"""When a disk store commits: once all is drained; and once a state is loaded, since its folder goes on from that, and
not from the training it has replaced.
"""

import pytest
import torch

from pipeback import checkpoint
from pipeback.streaming.disk_store import DiskStore
from tests.helpers.store_runs import batch, build, digest, train
from tests.laws.cases import OPTIMIZERS, data, everything, network, pipeline


@pytest.mark.parametrize("method", ["gpipe", "pb"])
@pytest.mark.parametrize("before", [0, 1])
def test_the_folder_follows_at_once(method, before, tmp_path):
    pipe = train(tmp_path, method, before)
    early = pipe.state_dict()
    train_on(pipe, range(before, 6))
    pipe.commit()
    pipe.load_state_dict(early)
    pipe.close()  # as a kill does
    again = build(tmp_path, method)
    assert again.pushes == before
    again.close()


@pytest.mark.parametrize("method", ["gpipe", "pb"])
def test_commits_go_on_from_a_state(method, tmp_path):
    pipe = train(tmp_path / "own", method, 1)
    early = pipe.state_dict()
    train_on(pipe, range(1, 6))
    pipe.commit()
    pipe.load_state_dict(early)
    train_on(pipe, range(100, 105))
    pipe.drain()  # graphs that were restored keep no batch statistics
    found = digest(pipe)
    pipe.close()
    again = build(tmp_path / "own", method)
    assert again.pushes > 3
    train_on(again, range(99 + again.pushes, 105))
    again.drain()
    assert digest(again) == found
    again.close()


def test_a_checkpoint_is_committed(tmp_path):
    pipe = train(tmp_path / "own", "pb", 2)
    checkpoint.save(pipe, tmp_path / "saved")
    train_on(pipe, range(2, 6))
    pipe.commit()
    checkpoint.load(pipe, tmp_path / "saved")
    pipe.close()
    again = build(tmp_path / "own", "pb")
    assert again.pushes == 2
    again.close()


def test_a_folder_without_a_version_stays_without(tmp_path):
    """There is nothing to replace: versions come when they are due."""
    state = (pipe := train(tmp_path / "first", "gpipe", 1)).state_dict()
    pipe.close()
    pipe = build(tmp_path / "second", "gpipe")
    pipe.load_state_dict(state)
    pipe.close()
    assert DiskStore(tmp_path / "second").versions.numbers == set()


def train_on(pipe, numbers):
    for n in numbers:
        pipe.push(*batch(n))


@pytest.mark.parametrize("every", [None, 5])
def test_what_was_drained_is_committed(every, tmp_path):
    """Unless the user has said how often, also by a method that never flushes."""

    def begun():
        return pipeline(network(), "pb", store=DiskStore(tmp_path, commit_every=every))

    pipe = begun()
    for x, y in data(12):
        pipe.push(x, y)
    assert sorted(tmp_path.glob("version-*.json")) == [] or every == 5
    pipe.drain()
    found = everything(pipe)
    pipe.close()
    again = begun()
    assert again.arrived == (12 if every is None else 10)
    assert torch.equal(everything(again), found) == (every is None)
    again.close()


def adam_of_tensors(weights):
    betas = torch.tensor(0.8, dtype=torch.float64), torch.tensor(0.9, dtype=torch.float64)
    return torch.optim.Adam(weights, lr=0.01, betas=betas, foreach=False)


def test_options_that_are_tuples_of_tensors(tmp_path, monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "tensors", adam_of_tensors)
    pipe = pipeline(network().double(), "pb", "tensors", store=f"disk:{tmp_path}")
    for x, y in data(3):
        pipe.push(x.double(), y.double())
    pipe.drain()
    found = everything(pipe)
    pipe.close()
    again = pipeline(network().double(), "pb", "tensors", store=f"disk:{tmp_path}")
    betas = again.optimizers[0].param_groups[0]["betas"]
    assert isinstance(betas, tuple) and betas == (0.8, 0.9)
    assert all(isinstance(beta, torch.Tensor) and beta.dtype is torch.float64 for beta in betas)
    assert torch.equal(everything(again), found)
    again.close()
