"""Faults of real processes: every other rank ends in time with an error that names the rank at fault."""

import json
import multiprocessing as mp
import os
import pickle
import signal
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from pipeback.distributed.health.blame import blame
from pipeback.distributed.health.health import Health, script
from pipeback.distributed.health.heartbeat import Heartbeat, host_store, join_store, my_facts, one_host
from pipeback.errors import RankError

RANKS = [4, 5, 6]  # global numbers: a pipeline may be one of several
TIMEOUT = 2.0
SOON = 3 * TIMEOUT  # seconds; a busy machine is slow


# -- what a rank does in a case: (health, its place in the pipeline) -> what it reports --------------------------------


def waits(health, on, what="micro-batch 17 at stage 3", most=SOON):
    with health.waiting(on, what):
        end = time.monotonic() + most
        while time.monotonic() < end:
            health.check()
            time.sleep(0.02)


def ring(health, place):
    """Everyone is in state_dict(); the parent harms one."""
    with health.calling("state_dict()"):
        waits(health, RANKS, "state_dict()")


def downstream(health, place):
    if place:
        waits(health, RANKS[place - 1])


def first_hangs(health, place):
    downstream(health, place)
    health.working(("F", 3, 17))
    health.failed.wait(SOON)
    health.check()


def last_fails(health, place):
    if place == 2:
        raise health.fail(RANKS[2], "stage 5 (Linear), micro-batch 17: the forward failed: no such shape")
    waits(health, RANKS[2])


def first_fails(health, place):
    if place == 0:
        raise health.fail(RANKS[0], "stage 0: no memory")
    waits(health, RANKS[0])


def two_fail(health, place):
    if place == 1:
        waits(health, RANKS[0])
    raise health.fail(RANKS[place], f"number {place} fails")


def others_call_differs(health, place):
    """Rank 1 is in its own code and has gone on pushing, the others gather."""
    if place == 1:
        health.pushed = 12
        health.failed.wait(SOON)
        health.check()
    ring(health, place)


def mismatch(health, place):
    if place == 1:
        with health.calling("push()"):
            waits(health, RANKS[0], "micro-batch 17 at stage 3")
    ring(health, place)


def last_leaves(health, place):
    """The others do not wait for it: fine. In the end nothing is left behind."""
    if place < 2:
        time.sleep(1)
        with health.waiting(RANKS[1 - place], "micro-batch 1 at stage 0"):
            time.sleep(TIMEOUT / 2)
    health.leave()
    end = time.monotonic() + SOON
    while any(thread.name.startswith("pipeback") for thread in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.02)
    health.check()


def first_leaves(health, place):
    """It serves the store, and must go on doing so."""
    if place == 0:
        health.leave()
        return
    time.sleep(1)
    if place == 1:
        raise health.fail(RANKS[1], "a fault after rank 4 had left")
    waits(health, RANKS[1])


def left_alone(health, place):
    if place == 0:
        health.leave()
    waits(health, RANKS[0])


def slow_but_alive(health, place):
    """A wait much longer than the timeout, for a rank that gets on."""
    if place == 2:
        for mb in range(40):
            health.working(("F", 3, mb))
            time.sleep(2 * TIMEOUT / 40)
        return
    with health.waiting(RANKS[2], "state_dict()"):
        end = time.monotonic() + 1.9 * TIMEOUT
        while time.monotonic() < end:
            health.check()
            time.sleep(0.02)


def gives_up(health, place):
    """A transport that cannot be interrupted gives up after the timeout: all at once blame their neighbours."""
    if place == 0:
        health.working(("B", 0, 9))
        health.failed.wait(SOON)
        health.check()
    with health.waiting(RANKS[place - 1], "micro-batch 17"):
        time.sleep(TIMEOUT)
        raise health.blame(RANKS[place - 1], "micro-batch 17", 0.0)


def breaks(health, place):
    """A connection breaks long before the timeout, and nobody knows why."""
    if place == 1:
        raise health.blame([RANKS[0]], "its messages", 0.0)
    health.failed.wait(SOON)
    health.check()


def last_raises(health, place):
    """An error of the user's own code ends the script."""
    if place == 2:
        raise ValueError("this batch is empty")
    waits(health, RANKS[1 if place == 0 else 2])


def last_raises_within(health, place):
    """The same, where whoever started the process says what it is for."""
    with script() if place == 2 else nullcontext():
        last_raises(health, place)


def first_exits(health, place):
    if place == 0:
        raise SystemExit
    waits(health, RANKS[0])


def first_vanishes(health, place):
    if place == 0:
        os._exit(3)
    waits(health, RANKS[0])


# -- processes that play the ranks, used again from case to case ------------------------------------------------------


def rank_process(pipe):
    while True:
        pipe.send(my_facts())
        place = pipe.recv()
        if place == 0:
            store, address = host_store(10)
            pipe.send(address)
        case, address, facts, timeout = pipe.recv()
        health = Health(store if place == 0 else join_store(address, 10), RANKS[place], RANKS, facts, timeout)
        pipe.send("ready")
        pipe.recv()
        begin = time.monotonic()
        found = None
        try:
            globals()[case](health, place)
        except RankError as error:
            found = error
        pipe.send((found, time.monotonic() - begin))
        health.leave()


class Crew:
    """Three processes, and a spare one on its way when one has ended."""

    def __init__(self):
        self.context = mp.get_context("spawn")
        self.free = []
        self.spare(4)

    def spare(self, number):
        while len(self.free) < number:
            ours, theirs = self.context.Pipe()
            process = self.context.Process(target=rank_process, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.free.append((process, ours))

    def play(self, case, harm=None, at=0.5, victim=None, timeout=TIMEOUT, apart=False):
        """What each rank reports, (error, seconds since the case began or the harm was done), None if it has ended."""
        team, self.free = self.free[:3], self.free[3:]
        facts = dict(zip(RANKS, [pipe.recv() for _, pipe in team]))
        if apart:  # as if every rank had a host of its own
            facts = {rank: fact._replace(place=f"place {rank}") for rank, fact in facts.items()}
        for place, (_, pipe) in enumerate(team):
            pipe.send(place)
        address = team[0][1].recv()
        for message in (case, address, facts, timeout), "go":
            for _, pipe in team:
                pipe.send(message)
            if message != "go":
                assert [pipe.recv() for _, pipe in team] == ["ready"] * 3
        if harm:
            time.sleep(at)
            os.kill(team[victim][0].pid, harm)
        reports = [self.report(pipe) for place, (_, pipe) in enumerate(team) if place != victim]
        if harm == signal.SIGSTOP:
            os.kill(team[victim][0].pid, signal.SIGCONT)
        if victim is not None:
            reports.insert(victim, self.report(team[victim][1]))
        for process, pipe in team:
            if reports[team.index((process, pipe))] is None:
                process.join(SOON)
                assert process.exitcode is not None, "a script that has ended must not hang"
            else:
                self.free.append((process, pipe))
        self.spare(4)
        return [report and (report[0], report[1] - (at if harm else 0)) for report in reports]

    def report(self, pipe):
        try:
            assert pipe.poll(30), "a rank hangs"
            return pipe.recv()
        except (EOFError, ConnectionResetError):
            return None

    def close(self):
        for process, _ in self.free:
            process.kill()
            process.join()


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


@pytest.mark.parametrize("victim, found", [(0, "it holds the store"), (1, "has not answered")])
def test_a_killed_rank_on_another_host_is_named(crew, victim, found):
    named(crew.play("ring", signal.SIGKILL, victim=victim, apart=True), RANKS[victim], found)


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


# -- without processes ------------------------------------------------------------------------------------------------


def test_facts_tell_a_process_from_a_later_one():
    facts = my_facts()
    assert not facts.gone(facts.place) and not facts.stopped(facts.place)
    assert not facts._replace(place="elsewhere", process=2**22 + 1).gone(facts.place)  # nothing is known
    assert facts._replace(process=2**22 + 1).gone(facts.place)
    if facts.born:
        assert facts._replace(born="1").gone(facts.place)


def test_nobody_listens_at_the_address():
    with pytest.raises(ConnectionError, match="not reached at 127.0.0.1:9 .* MASTER_ADDR"):
        join_store("127.0.0.1:9", 0.5)


def test_an_error_survives_pickling():
    error = pickle.loads(pickle.dumps(RankError("rank 1 is gone", 1)))
    assert (str(error), error.rank) == ("rank 1 is gone", 1)


def test_a_rank_is_at_fault_only_as_long_as_it_is_waited_for():
    own = Heartbeat(doing="in its own code", seconds=100.0)
    assert blame(0, [1], "x", 25.0, {0: Heartbeat(), 1: own}, 30.0).seconds == 25.0
    busy = Heartbeat(doing="in the forward of stage 1, micro-batch 2", seconds=0.1)
    assert blame(0, [1], "x", 25.0, {0: Heartbeat(), 1: busy}, 30.0).seconds == 0.1


def test_a_wait_through_a_rank_leads_on():
    statuses = {
        0: Heartbeat(waits=[([1], "x", 29.0)]),
        1: Heartbeat(waits=[([2], "y", 28.0), ([0, 2], "state_dict()", 3.0)]),
        2: Heartbeat(doing="in its own code", seconds=40.0, pushed=7),
    }
    verdict = blame(0, [1], "x", 29.0, statuses, 30.0)
    assert (verdict.rank, verdict.seconds) == (2, 28.0)
    assert "having pushed 7 micro-batches, for 40.0 s while rank 1 waits for it (y)" in verdict.what


# -- who else reaches the store ------------------------------------------------------------------------------------


def listening(port):
    """The addresses that something listens at on this port, as /proc writes them."""
    lines = [
        line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]
    ]
    return {at.rpartition(":")[0] for _, at, _, state, *_ in lines if state == "0A" and int(at[-4:], 16) == port}


@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="there is no /proc/net here")
def test_on_one_host_the_store_listens_on_loopback():
    store, address = host_store(5, near=True)
    port = int(address.rpartition(":")[2])
    assert listening(port) == {"0100007F"}
    other = join_store(address, 5)
    other.set("a", "b")
    assert store.get("a") == b"b"
    far, address = host_store(5)
    assert listening(int(address.rpartition(":")[2])) - {"0100007F"}
    join_store(address, 5, near=True).set("a", "b")
    assert far.get("a") == b"b"


def test_which_ranks_are_on_one_host():
    mine = my_facts()
    assert one_host([mine, mine]) == bool(mine.place)
    assert not one_host([mine, mine._replace(place="elsewhere")])
    assert not one_host([mine._replace(place=""), mine._replace(place="")])


def test_who_does_not_know_the_secret_cannot_tell_of_a_fault():
    store, address = host_store(5, near=True)
    facts = dict.fromkeys(RANKS[:1], my_facts())
    health = Health(store, RANKS[0], RANKS[:1], facts, 3.0)
    stranger = join_store(address.rpartition("@")[2], 5)
    stranger.set("fault", json.dumps((RANKS[0], "made up")))
    assert not health.failed.wait(2.5)
    health.check()
    join_store(address, 5).set("fault", json.dumps((RANKS[0], "told by a rank")))
    assert health.failed.wait(SOON)
    with pytest.raises(RankError, match="told by a rank"):
        health.check()
    health.leave()
