"""Faults of real processes: every other rank ends in time with an error that names the rank at fault."""

import signal
import sys

import pytest

from pipeback.errors import RankError
from tests.distributed.ranks import RANKS, SOON, Crew


@pytest.fixture(scope="module")
def crew():
    crew = Crew()
    yield crew
    crew.close()


def named(reports, rank, *words, within=SOON):
    """Every report that there is names the rank, says these words, and came in time; the common message."""
    errors = [report[0] for report in reports if report]
    assert len(errors) >= 2, reports
    assert all(isinstance(error, RankError) for error in errors), reports
    assert {error.rank for error in errors} == {rank}, errors
    for error in errors:
        assert str(error).startswith(f"rank {rank} (host "), error
        for word in words:
            assert word in str(error), error
    assert max(report[1] for report in reports if report) < within, reports
    return str(errors[0])


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_is_named(crew, victim):
    reports = crew.play("ring", signal.SIGKILL, victim=victim, timeout=10)
    assert reports[victim] is None
    named(reports, RANKS[victim], "process has ended", within=5)  # found long before the timeout


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_on_another_host_is_named(crew, victim):
    reports = crew.play("ring", signal.SIGKILL, victim=victim, apart=True)
    named(reports, RANKS[victim])
    # a busy survivor may first see that nothing was sent to it
    found = ("it holds the store", "through which the ranks talk") if victim == 0 else ("has not answered",)
    for error, _ in filter(None, reports):
        assert any(words in str(error) for words in found), error


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_is_named_and_hears_of_it(crew, victim):
    reports = crew.play("ring", signal.SIGSTOP, victim=victim)
    stopped = reports.pop(victim)
    named(reports, RANKS[victim], "has not answered", "stopped (SIGSTOP")
    assert stopped[0].rank == RANKS[victim]


def test_a_chain_of_waits_leads_to_the_rank_that_hangs(crew):
    message = named(crew.play("first_hangs"), RANKS[0], "in the forward of stage 3, micro-batch 17", "timeout=")
    assert "while rank 5 waits for it (micro-batch 17 at stage 3)" in message


def test_a_transport_that_gives_up_names_the_rank_that_hangs(crew):
    named(crew.play("gives_up"), RANKS[0], "in the backward of stage 0, micro-batch 9")


def test_a_broken_connection_names_the_other_end(crew):
    named(crew.play("breaks", timeout=10), RANKS[0], "its connection to rank 5 broke")


def test_a_rank_that_does_not_make_the_call_is_named(crew):
    named(crew.play("others_call_differs"), RANKS[1], "in its own code", "pushed 12 micro-batches", "state_dict()")


def test_calls_that_do_not_match_are_named(crew):
    named(
        crew.play("mismatch"),
        RANKS[1],
        "same calls",
        "rank 5 (in push()) waits for rank 4 (micro-batch 17",
        "rank 4 (in state_dict())",
    )


def test_a_failure_is_told_verbatim(crew):
    named(crew.play("last_fails"), RANKS[2], "stage 5 (Linear), micro-batch 17: the forward failed: no such shape")


def test_a_failure_of_the_rank_that_holds_the_store(crew):
    named(crew.play("first_fails"), RANKS[0], "stage 0: no memory")


def test_two_failures_are_one_everywhere(crew):
    reports = crew.play("two_fail")
    assert len({str(error) for error, _ in reports}) == 1
    assert reports[0][0].rank in (RANKS[0], RANKS[2])


def test_leaving_is_no_fault(crew):
    assert [error for error, _ in crew.play("last_leaves")] == [None] * 3


def test_the_store_outlives_the_part_of_its_rank(crew):
    named(crew.play("first_leaves")[1:], RANKS[1], "after rank 4 had left")


def test_waiting_for_a_rank_that_has_left(crew):
    named(
        crew.play("left_alone", timeout=10)[1:],
        RANKS[0],
        "has left the pipeline",
        "do all ranks push the same",
        within=6,
    )


def test_slow_is_no_fault(crew):
    assert [error for error, _ in crew.play("slow_but_alive")] == [None] * 3


def test_an_error_that_ends_the_script_is_told(crew):
    reports = crew.play("last_raises", timeout=10)
    assert reports[2] is None
    # from Python 3.13 on, a child of multiprocessing has forgotten its error when it ends
    told = "its script ended with ValueError: this batch is empty"
    named(reports, RANKS[2], told if sys.version_info < (3, 13) else "its script has ended", within=5)


def test_an_error_that_ends_what_a_child_was_started_for_is_told(crew):
    reports = crew.play("last_raises_within", timeout=10)
    assert reports[2] is None
    named(reports, RANKS[2], "its script ended with ValueError: this batch is empty", within=5)


def test_a_script_that_ends_too_early(crew):
    reports = crew.play("first_exits", timeout=10)
    assert reports[0] is None
    named(reports, RANKS[0], "has left the pipeline", within=6)


def test_a_process_that_just_vanishes(crew):
    reports = crew.play("first_vanishes", timeout=10)
    assert reports[0] is None
    named(reports, RANKS[0], "process has ended", within=5)
