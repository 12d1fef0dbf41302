"""Law: stages that run as one within each rank are the event loop to rounding, their states in flight included."""

from itertools import product

import pytest

from pipeback.streaming.disk_store import DiskStore
from pipeback.streaming.store import HostStore
from tests.helpers.choice import mostly_rare, rare
from tests.laws.as_one import S
from tests.laws.cases import CASES, STEADY
from tests.processes.cases import as_one, far, judge_fails, judged, none_alike, shared_out, timed_otherwise

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")

APART = [case for case in STEADY if CASES[case](S).chunks == 1]  # no rank has several parts of the stages
# with a store, no flushes or groups
STREAMED = [case for case in APART if any(CASES[case](S).delays(S)) and not CASES[case](S).fixed_groups]
# where a store has a slice of each weight, no methods that look at whole weights
SHARED = [case for case in STREAMED if CASES[case](S).elementwise]


def odd_cases(crew, ranks, cases, **options):
    """What differs from the event loop by more than rounding, by case and rank."""
    found = {}
    for case in cases:
        wanted = as_one(case)
        for rank, result in enumerate(crew.ranks(ranks).run(as_one, case, vectorize=True, **options)):
            if odd := far(result, wanted):
                found[f"{case}, rank {rank}"] = odd
            assert any(told.startswith("as ") for told in result["vectorized"].values()), result["vectorized"]
    return found


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [(2, ["cerebras", "pipedream", "gpipe-4", "one_f_one_b-3"]), (3, ["spectrain", "pipemare"]),
     rare(2, APART, id="2-all"), rare(3, APART, id="3-all")],
)  # fmt: skip
def test_ranks_equal_the_event_loop(crew, ranks, cases):
    assert odd_cases(crew, ranks, cases) == {}


@pytest.mark.parametrize(
    ("ranks", "cases", "ahead"),
    [(2, ["cerebras", "pipedream"], 5), rare(3, ["gap_aware"], 3), rare(2, STREAMED, 3), rare(3, STREAMED, 5)],
    ids=lambda value: "all" if value is STREAMED else str(value),
)
def test_ranks_with_stores(crew, ranks, cases, ahead):
    """Each rank's stages come to its device from a store of its own."""
    assert odd_cases(crew, ranks, cases, store=HostStore(prefetch=ahead)) == {}


@pytest.mark.parametrize("case", ["pb", *(rare(case) for case in STREAMED)])
def test_ranks_with_files(crew, case, tmp_path):
    assert odd_cases(crew, 2, [case], store=DiskStore(tmp_path, prefetch=5)) == {}


def stacks_of_replicas(results):
    """Of either replica, whose ranks follow each other."""
    half = len(results) // 2
    return ([stack for result in some for stack in result["stacks"]] for some in (results[:half], results[half:]))


@pytest.mark.parametrize(("ranks", "case"), [(4, "pb"), rare(2, "cerebras")])
def test_replicas_over_ranks(crew, ranks, case):
    """Every one of them has stacks."""
    wanted = as_one(case)
    results = crew.ranks(ranks).run(as_one, case, vectorize=True, replicas=2)
    assert not any(far(result, wanted) for result in results)
    one, other = stacks_of_replicas(results)
    assert sorted(s for stack in one for s in stack) == list(range(S - 1)) and one == other


@pytest.mark.parametrize(
    ("ranks", "case", "kind"),
    mostly_rare(product((2, 4), SHARED, ("host", "disk")), (4, "cerebras", "host"), (2, "pb", "disk")),
)
def test_replicas_whose_stores_share_the_weights(crew, ranks, case, kind, tmp_path):
    """They fetch and update the same stages as one, at the same time."""
    wanted, stores = as_one(case), {"host": HostStore(prefetch=5), "disk": DiskStore(tmp_path, prefetch=5)}
    results = crew.ranks(ranks).run(as_one, case, vectorize=True, replicas=2, store=stores[kind])
    assert not any(far(result, wanted) for result in results)
    one, other = stacks_of_replicas(results)
    assert any(len(stack) > 1 for stack in one) and one == other
    told = crew.ranks(2).run(as_one, "pb", vectorize="auto", replicas=2, store=HostStore(prefetch=5))[0]["vectorized"]
    assert "stage by stage: replicas whose stores share the weights" in str(told)


@pytest.mark.soak
def test_replicas_that_decide_otherwise(crew):
    """By times, which "auto" goes by: one replica goes stage by stage, in the same order, until it takes up a state."""
    wanted = as_one("pb")
    for result in crew.ranks(2).run(timed_otherwise, "pb", (3.0, 0.5), replicas=2):
        assert not far(result, wanted)
        assert {"stages 1 … 5", "stage 1"} <= set(result["vectorized"])  # what either has found


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [(2, ["cerebras", "pipedream"]), (3, ["pipemare-t3", "pb-slack1", "one_f_one_b"]),
     rare(2, APART, id="2-all"), rare(3, APART, id="3-all")],
)  # fmt: skip
def test_a_loss_that_is_computed_outside(crew, ranks, cases):
    odd = {}
    for case in cases:
        wanted = judged(case)
        results = crew.ranks(ranks).run(judged, case, vectorize=True)
        assert [result["losses"].numel() > 0 for result in results] == [False] * (ranks - 1) + [True]
        for rank, result in enumerate(results):
            if result["losses"].numel() == 0:  # of ranks that have not the last stage
                result["losses"] = wanted["losses"]
            if found := far(result, wanted):
                odd[f"{case}, rank {rank}"] = found
            assert any(told.startswith("as ") for told in result["vectorized"].values()), result["vectorized"]
    assert odd == {}


def test_ranks_on_which_no_stages_are_alike(crew):
    """They do theirs one by one, while those of others run as one; if there is no other rank, all say so at once."""
    wanted = judged("gpipe")
    for result in crew.ranks(3).run(shared_out, [0, 0, 1, 1, 1, 2, 2], judged, "gpipe", vectorize=True):
        result["losses"] = result["losses"] if result["losses"].numel() else wanted["losses"]
        assert not far(result, wanted)
        assert [told.startswith("as one") for told in result["vectorized"].values()].count(True) == 1
    said = crew.ranks(4).run(shared_out, [0, 0, 1, 1, 2, 2, 3, 3], none_alike)
    assert len(set(said)) == 1 and all(f"stage {s}: stage by stage" in said[0] for s in range(6))


def test_an_error_of_the_loss_reaches_all_ranks(crew):
    other, mine = crew.ranks(2).run(judge_fails)
    assert mine == "KeyError: 'no such label'" and other.startswith("RankError") and "no such label" in other
