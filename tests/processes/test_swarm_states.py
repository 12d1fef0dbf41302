"""Law: states of weights that are split over the replicas' stores: whole stores take them up and give them back, and
stores on disk resume, also where all ranks are killed.
"""

import random
import time

import pytest
import torch

from pipeback import checkpoint
from pipeback.streaming import disk_store
from tests.helpers.choice import rare
from tests.helpers.store_runs import batch, build, digest, start
from tests.laws.cases import CASES, STAGES, data, pipeline
from tests.processes.cases import differences, drawing, settled
from tests.processes.crew import Failed, free_port

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")
BATCHES = 16, 7  # pushed in all, and before the state is saved


def begin(case, **options):
    torch.manual_seed(7)
    return pipeline(drawing(), CASES[case](STAGES), **options)


def part(pipe, some):
    if not pipe.ranks.several:
        return some
    n = pipe.ranks.replica
    return [(x.chunk(pipe.replicas)[n], y.chunk(pipe.replicas)[n]) for x, y in some]


def first_part(case, folder, **options):
    pipe = begin(case, **options)
    for x, y in part(pipe, data(BATCHES[0], samples=8)[: BATCHES[1]]):
        pipe.push(x, y)
    state = pipe.state_dict()
    checkpoint.save(pipe, folder)
    pipe.close()
    return state


def second_part(case, state, disturbed=False, **options):
    pipe = begin(case, **options)
    batches = part(pipe, data(BATCHES[0], samples=8))
    if disturbed:
        for x, y in batches[:2]:
            pipe.push(x, y)
    if isinstance(state, dict):
        pipe.load_state_dict(state)
    else:
        checkpoint.load(pipe, state)
    for x, y in batches[BATCHES[1] :]:
        pipe.push(x, y)
    result = {"state": settled(pipe.state_dict())}
    pipe.close()
    return result


@pytest.mark.parametrize("case", ["pipedream", rare("spectrain-v2")])
def test_states_go_from_and_to_other_stores(crew, tmp_path, case):
    """Saved in flight by split stores, taken up by whole ones, and the other way round."""
    crew = crew.ranks(2)
    split = {"replicas": 2, "store": "host"}
    resident = first_part(case, tmp_path / "a", replicas=2)
    wanted = second_part(case, resident, replicas=2)
    state = crew.run(first_part, case, tmp_path / "b", **split)[-1]
    assert state["stages"][0].keys() == resident["stages"][0].keys()
    for source in (state, tmp_path / "b"):
        assert differences(second_part(case, source, replicas=2), wanted) == []
    for source, disturbed in ((resident, True), (tmp_path / "b", False)):
        for found in crew.run(second_part, case, source, disturbed, **split):
            assert differences(found, wanted) == []


def resumed(case, folder, until):
    """Train until some batch with weights on disk, from wherever the folder stands."""
    disk_store.SMALL = 1
    pipe = begin(case, replicas=2, store=f"disk:{folder}")
    for x, y in part(pipe, data(BATCHES[0], samples=8))[pipe.arrived : until]:
        pipe.push(x, y)
    pipe.commit()
    found = {"state": settled(pipe.state_dict())}
    pipe.close()
    return found


@pytest.mark.parametrize(("ranks", "case"), [(2, "cerebras"), rare(2, "pipedream"), (4, "pipedream")])
def test_stores_on_disk_resume(crew, tmp_path, ranks, case):
    wanted, folder = second_part(case, first_part(case, tmp_path / "plain", replicas=2), replicas=2), tmp_path / "disk"
    crew = crew.ranks(ranks)
    crew.run(resumed, case, folder, BATCHES[1])
    assert sorted(p.name for p in folder.iterdir()) == [f"rank-{n}" for n in range(ranks)]
    for found in crew.run(resumed, case, folder, BATCHES[0]):
        assert differences(found, wanted) == []
    if ranks > 2:
        with pytest.raises(Failed, match="does not hold stage|no version in common"):
            crew.ranks(2).run(resumed, case, folder, BATCHES[0])
        crew.again()


def killed(folder, method, pushes, after):
    """Two ranks that are killed together some seconds after their first commit; None: they end by themselves."""
    port = str(free_port())
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    (first, told), (second, _) = (start(folder, method, pushes, **common, RANK=str(n)) for n in range(2))
    lines = []
    for line in told:
        lines.append(line)
        # a push has two micro-batches of each rank, and every fifth commits
        if after is not None and sum(each.startswith("pushed") for each in lines) == 4:
            time.sleep(after)
            for rank in (first, second):
                rank.kill()
            break
    for rank in (first, second):
        rank.join(60)
    return lines


@pytest.mark.parametrize(
    ("method", "kills", "pushes"),
    [
        ("pipedream", 1, 20),
        *(rare(method, 15, 200) for method in ("gpipe", "pipedream")),
    ],
)
def test_all_ranks_killed_at_random_moments(method, kills, pushes, tmp_path):
    draw = random.Random(5)
    for _ in range(kills):
        killed(tmp_path / "store", method, pushes, draw.uniform(0.05, 0.4))
    lines = killed(tmp_path / "store", method, pushes, None)
    assert any(line.startswith("resumed at") for line in lines)
    pipe = build(None, method, replicas=2)
    for n in range(pushes):
        pipe.push(*batch(n))
    pipe.drain()
    assert lines[-1] == f"digest {digest(pipe)}"
