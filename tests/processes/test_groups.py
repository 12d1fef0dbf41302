"""The process groups of pipelines that are built one after the other: no name is given twice, and ranks agree on them.

The address of a group's member lies in a store under the group's name. torch 2.11 gives the names of groups that have
ended again, and a rank then waits for the process group of a pipeline that is closed.
"""

import pytest
import torch.distributed as dist

from tests.helpers.choice import rare
from tests.laws.cases import data, network, pipeline
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
