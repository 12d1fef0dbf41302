"""Stages on GPUs: through pinned memory and gloo where ranks share one, through NCCL where each has its own."""

import pytest
import torch
import torch.distributed as dist

import pipeback
from tests.laws.cases import data, pipeline
from tests.processes.cases import drawing, flat

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


def trained(rank, gpus, **options):
    """Losses and weights, on the CPU."""
    device = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(device)
    torch.manual_seed(7)
    pipe = pipeline(drawing().to(device), "pb", **options)
    losses = [pipe.push(x.to(device), y.to(device)) for x, y in data(12, samples=8)]
    result = torch.stack([loss.clone().cpu() for loss in losses]), flat(pipe.state_dict())
    pipe.close()
    return result[0], {name: tensor.cpu() for name, tensor in result[1].items()}


def compare(crew, gpus, link):
    losses, state = trained(0, 1)
    for found, theirs in crew.ranks(2).run(trained, gpus, each=range(2), workers=pipeback.Processes(link=link)):
        assert torch.equal(found, losses)
        assert theirs.keys() == state.keys()
        assert [name for name in state if not torch.equal(theirs[name], state[name])] == []


@pytest.mark.filterwarnings("ignore:.*takes its statistics")
@pytest.mark.skipif(GPUS < 1, reason="needs a GPU: two ranks with stages on it")
def test_ranks_that_share_a_gpu(crew):
    compare(crew, 1, "gloo")


@pytest.mark.filterwarnings("ignore:.*takes its statistics")
@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs: NCCL between two ranks")
def test_a_gpu_each(crew):
    compare(crew, 2, "nccl")


def split(rank, gpus, group=None, **options):
    """Of two replicas, whose stores share the weights."""
    if group is not None:
        dist.destroy_process_group()
        torch.cuda.set_device(rank)
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{group}", rank=rank, world_size=2)
    device = torch.device("cuda", rank % gpus)
    torch.manual_seed(7)
    pipe = pipeline(drawing().to(device), "cerebras", replicas=2, store="host", **options)
    for x, y in data(12, samples=8):
        some = (x, y) if not pipe.ranks.several else (x.chunk(2)[rank], y.chunk(2)[rank])
        pipe.push(*(part.to(device) for part in some))
    state = {name: tensor.cpu() for name, tensor in flat(pipe.state_dict()).items()}
    pipe.close()
    return state


@pytest.mark.filterwarnings("ignore:.*takes its statistics")
@pytest.mark.skipif(GPUS < 1, reason="needs a GPU: slices of two ranks' stores are gathered on it through host memory")
def test_split_stores_of_ranks_that_share_a_gpu(crew):
    wanted = split(0, 1)
    for found in crew.ranks(2).run(split, 1, each=range(2)):
        assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.filterwarnings("ignore:.*takes its statistics")
@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs: NCCL gathers and scatters, which refuses two ranks on one")
def test_split_stores_of_ranks_with_a_gpu_each(crew, tmp_path):
    wanted = split(0, 1)
    try:
        for found in crew.ranks(2).run(split, 2, tmp_path / "group", each=range(2)):
            assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    finally:
        crew.again()
