"""Ranks meet, train and tell each other their state where numpy is not installed, which torch does not need."""

import pytest
import torch
import torch.distributed as dist

import pipeback
from pipeback.distributed.all_gather_bytes import all_gather_bytes
from tests.laws.cases import data, network, pipeline
from tests.processes.crew import Crew


def trained(folder, replicas):
    def unavailable(tensor, **options):
        raise RuntimeError("Numpy is not available")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "numpy", unavailable)
        pipe = pipeline(network(4), "pb", replicas=replicas)
        pipe.record()
        for x, y in data(2, samples=4):
            pipe.push(x, y)
        pipe.drain()
        state = pipe.state_dict()
        pipeback.draw.trace(pipe, f"{folder}/run.json")
        pipe.close()
    return state["stages"]


@pytest.mark.parametrize("replicas", [1, 2])
def test_training_and_states(replicas, tmp_path):
    with Crew(2) as crew:
        first, second = crew.ranks(2).run(trained, str(tmp_path), replicas)
    assert len(first) == len(second) > 1 and (tmp_path / "run.json").exists()


def of_many_lengths():
    rank = dist.get_rank()
    group = dist.new_group([0, 1, 2], backend="gloo")
    return [list(map(bytes, all_gather_bytes(bytes([65 + rank]) * length[rank], group))) for length in LENGTHS]


LENGTHS = [(1, 1, 1), (0, 7, 2), (0, 0, 0), (5, 0, 100_000)]


def test_all_ranks_have_the_bytes_of_each():
    with Crew(3) as crew:
        found = crew.ranks(3).run(of_many_lengths)
    assert found == [[[b"A" * a, b"B" * b, b"C" * c] for a, b, c in LENGTHS]] * 3
