"""Law: replicas over processes equal those emulated in one, bit for bit, with any number of them."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import pipeback
from tests.helpers.choice import rare
from tests.laws.cases import data, network, pipeline, weights
from tests.processes.cases import differences, train
from tests.processes.crew import Failed

KEPT = ("flying", "end", "model")  # losses are those of a replica, and so is the output where batch statistics are
pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")


def with_ranks(model, case, replicas, mesh=None, **options):
    workers = dist.get_world_size() // replicas
    replica = dist.get_rank() // workers
    if mesh is not None:
        options["workers"] = pipeback.Processes(mesh=DeviceMesh("cpu", mesh, mesh_dim_names=("dp", "pp")))
        replica = next(r for r, row in enumerate(mesh) if dist.get_rank() in row)
    found = train(model, case, replica=replica, replicas=replicas, **options)
    return {key: found[key] for key in KEPT}


CASES = ("pb", "pipedream", "cerebras", "gpipe-4", "pipedream_2bw")


@pytest.mark.parametrize(
    ("model", "ranks", "replicas", "cases"),
    [
        ("drawing", 4, 2, ("pb", "pipedream_2bw")), ("plain", 2, 2, ("gpipe-4", "cerebras")),
        ("drawing", 3, 3, ("pipedream",)),
        *(rare(model, *shape, CASES) for model in ("plain", "drawing") for shape in ((4, 2), (2, 2), (3, 3))),
    ],
)  # fmt: skip
def test_ranks_equal_replicas_in_one_process(crew, model, ranks, replicas, cases):
    crew = crew.ranks(ranks)
    samples = 12  # even shares
    for case in cases:
        wanted = train(model, case, samples=samples, replicas=replicas)
        wanted = {key: wanted[key] for key in KEPT}
        for rank, found in enumerate(crew.run(with_ranks, model, case, replicas, samples=samples)):
            assert differences(found, wanted) == [], f"{case}, rank {rank}"


def test_a_mesh_says_who_is_where(crew):
    """Replicas of ranks (3, 1) and (0, 2), each from its first to its last stage."""
    crew = crew.ranks(4)
    wanted = train("plain", "pb", replicas=2)
    wanted = {key: wanted[key] for key in KEPT}
    for found in crew.run(with_ranks, "plain", "pb", 2, mesh=[[3, 1], [0, 2]]):
        assert differences(found, wanted) == []


def shorter(build, store=None):
    """Replicas whose second batch has a rest of other lengths; what that ends in."""
    pipe = pipeline(
        build(), "pb", replicas=2, micro_batch_size=2, store=store, workers=pipeback.Processes(timeout=20.0)
    )
    x, y = data(1, samples=8)[0]
    pipe.push(x, y)
    keep = 4 if dist.get_rank() == 0 else 8
    try:
        pipe.push(x[:keep], y[:keep])
        pipe.drain()
    except RuntimeError as error:
        return str(error)
    return ""


def unlike():
    """Stages of different sizes."""
    return nn.Sequential(*[nn.Linear(a, b) for a, b in pairwise((6, 5, 8, 7, 4, 6))])


@pytest.mark.parametrize(("build", "store"), [(network, None), (unlike, None), (unlike, "host")])
def test_replicas_that_push_other_numbers_of_micro_batches_are_told(crew, build, store):
    for found in crew.ranks(2).run(shorter, build, store):
        assert "every replica must push the same number of micro-batches" in found
    crew.again()


@pytest.mark.parametrize("store", [None, "host"])
def test_a_flush_may_be_of_other_numbers_of_micro_batches(crew, store):
    """The mean is over all of them."""
    first, second = crew.ranks(2).run(flushes, store)
    assert torch.equal(first, second)


def flushes(store):
    pipe = pipeline(network(), "gpipe", replicas=2, micro_batch_size=2, store=store)
    for x, y in data(3, samples=8):
        keep = 4 if dist.get_rank() == 0 else 8
        pipe.push(x[:keep], y[:keep])
    found = weights(pipe)
    pipe.close()
    return found


def uneven():
    train("plain", "pb", replicas=2)


def test_ranks_that_cannot_be_shared(crew):
    crew = crew.ranks(3)
    with pytest.raises(Failed, match=r"replicas=2 does not divide the 3 ranks"):
        crew.run(uneven)
    crew.again()
