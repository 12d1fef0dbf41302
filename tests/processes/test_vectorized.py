"""Law: stages that run as one within each rank are the event loop to rounding, their states in flight included."""

import pytest

from tests.helpers.choice import rare
from tests.laws.cases import STEADY
from tests.processes.cases import as_one, far

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")


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
    [(2, ["pb", "cerebras", "pipedream", "gpipe-4"]), (3, ["spectrain", "pipemare", "pb"]),
     rare(2, STEADY, id="2-all"), rare(3, STEADY, id="3-all")],
)  # fmt: skip
def test_ranks_equal_the_event_loop(crew, ranks, cases):
    assert odd_cases(crew, ranks, cases) == {}


def test_replicas_over_ranks(crew):
    assert odd_cases(crew, 4, ["pb"], replicas=2) == {}
