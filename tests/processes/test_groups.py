"""The process groups of pipelines that are built one after the other: no name is given twice, and ranks agree on them.

The address of a group's member lies in a store under the group's name. torch 2.11 gives the names of groups that have
ended again, and a rank then waits for the process group of a pipeline that is closed.
"""

import time

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import pipeback
from pipeback.distributed import ranks
from tests.helpers.choice import rare
from tests.laws.cases import data, network, pipeline
from tests.processes.cases import differences, train
from tests.processes.crew import Crew


def named(count, **options):
    """The names of the groups of pipelines that follow each other."""
    found = []
    for _ in range(count):
        pipe = pipeline(network(4), "pb", **options)
        for x, y in data(2, samples=4):
            pipe.push(x, y)
        found.append([group.group_name for group in pipe.ranks._groups])
        pipe.drain()
        pipe.close()
    return found


@pytest.mark.parametrize("options", [{}, rare({"replicas": 2}), {"replicas": 2, "store": "host"}], ids=str)
def test_no_name_is_given_twice(options):
    with Crew(2) as crew:
        found, other = crew.ranks(2).run(named, 4, **options)
    names = [name for some in found for name in some]
    assert found == other and len(set(names)) == len(names) >= 4
    assert all(name.startswith("pipeback ") for name in names)


def apart(rank):
    """A group of rank 0's own, of which rank 1 knows nothing; then pipelines of both."""
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    return named(2)


def test_ranks_with_other_groups_beside():
    """Where torch counts the groups of a process, the ranks' counts differ."""
    with Crew(2) as crew:
        found, other = crew.ranks(2).run(apart, each=range(2))
    assert found == other


def beside(rank, *tables):
    """One of two pipelines at once, each over ranks of its own; that of rank 0 has its store later than the other."""
    meshes = [DeviceMesh("cpu", table, mesh_dim_names=("dp", "pp")) for table in tables]  # every rank makes all
    host = ranks.host_store
    if rank == 0:

        def later(*given, **named):
            time.sleep(0.5)
            return host(*given, **named)

        ranks.host_store = later
    try:
        own = next(mesh for mesh, table in zip(meshes, tables, strict=True) if rank in table[0])
        found = train("plain", "pb", workers=pipeback.Processes(mesh=own, timeout=20))
    finally:
        ranks.host_store = host
    return {key: found[key] for key in ("losses", "flying", "end", "model")}


def test_two_pipelines_at_once():
    wanted = train("plain", "pb")
    with Crew(4) as crew:
        for found in crew.ranks(4).run(beside, [[0, 2]], [[3, 1]], each=range(4)):
            assert differences(found, {key: wanted[key] for key in found}) == []
