"""Law: weights split over the replicas' stores equal whole ones, bit for bit at every number of ranks."""

import pytest

from pipeback.store import HostStore
from tests.laws.cases import CASES
from tests.processes.cases import differences, train

KEPT = ("flying", "end", "model")  # losses are those of a replica, and so is the output where batch statistics are
pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")


def of_a_rank(model, case, replicas, store, **options):
    import torch.distributed as dist

    workers = dist.get_world_size() // replicas
    replica = dist.get_rank() // workers
    found = train(model, case, replica=replica, replicas=replicas, store=store, **options)
    return {key: found[key] for key in KEPT}


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 2), (3, 3), (4, 2)])
@pytest.mark.parametrize("model", ["plain", "drawing"])
def test_split_stores_equal_replicas_in_one_process(crew, ranks, replicas, model):
    crew = crew.ranks(ranks)
    for case in CASES:
        wanted = train(model, case, samples=12, replicas=replicas)
        wanted = {key: wanted[key] for key in KEPT}
        for rank, found in enumerate(crew.run(of_a_rank, model, case, replicas, HostStore(), samples=12)):
            assert differences(found, wanted) == [], f"{case}, rank {rank}"
