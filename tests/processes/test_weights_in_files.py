"""Weights in safetensors files over ranks: each is written once, and what one rank cannot write, none exports."""

import json

import pytest
import safetensors.torch
import torch

import pipeback
from pipeback import weights
from tests.laws.cases import data, network, pipeline
from tests.processes.crew import Failed

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")


def exported(rank, folder, pushes, full):
    torch.manual_seed(7)
    pipe, write = pipeline(network(), "gpipe"), safetensors.torch.save_file
    for x, y in data(pushes, samples=4):
        pipe.push(x, y)

    def fails(tensors, file, **options):
        raise OSError(28, "No space left on device")

    try:
        safetensors.torch.save_file = fails if rank == full else write
        weights.save(pipe, folder)
    finally:
        safetensors.torch.save_file = write
    found = {name: value.clone() for name, value in pipe.model.state_dict().items()}
    pipe.close()
    return found


def read(folder):
    at = json.loads((folder / weights.INDEX).read_text())["weight_map"]
    return {name: safetensors.torch.load_file(folder / file)[name] for name, file in at.items()}


@pytest.mark.parametrize("pushes", [0, 2])
def test_every_rank_writes_its_stages(crew, tmp_path, pushes):
    """Before the first push every rank holds all of them."""
    for wanted in crew.ranks(2).run(exported, tmp_path, pushes, None, each=range(2)):
        assert read(tmp_path).keys() == wanted.keys()
        assert all(torch.equal(value, wanted[name]) for name, value in read(tmp_path).items())


def test_what_one_rank_cannot_write_no_rank_exports(crew, tmp_path):
    crew.ranks(2).run(exported, tmp_path, 1, None, each=range(2))
    before, files = read(tmp_path), sorted(tmp_path.iterdir())
    with pytest.raises(Failed, match=r"(?s)rank 0: .*No space left on device; make room.*rank 1: .*; make room"):
        crew.ranks(2).run(exported, tmp_path, 2, 1, each=range(2))
    assert all(torch.equal(value, before[name]) for name, value in read(tmp_path).items())
    assert sorted(tmp_path.iterdir()) == files


def of_replicas(rank, folder, store):
    torch.manual_seed(7)
    pipe = pipeline(
        network(), "pb", replicas=2, micro_batch_size=2, store=store, workers=pipeback.Processes(timeout=20.0)
    )
    for x, y in data(2, samples=4):
        pipe.push(x, y)
    weights.save(pipe, folder)
    named = [name for _, values in pipe.values() for name in values]
    found = {name: value.clone() for name, value in pipe.model.state_dict().items()}
    pipe.close()
    return found, named


@pytest.mark.parametrize("store", [None, "host"])
def test_replicas_share_what_the_first_one_writes(crew, tmp_path, store):
    """Each holds a part of a store's weights, so all of them gather."""
    found = crew.ranks(2).run(of_replicas, tmp_path, store, each=range(2))
    for wanted, _ in found:
        assert read(tmp_path).keys() == wanted.keys()
        assert all(torch.equal(value, wanted[name]) for name, value in read(tmp_path).items())
    assert [set(named) for _, named in found] == [set(found[0][0]), set()]
