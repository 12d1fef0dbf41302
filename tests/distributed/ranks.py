"""Processes that play the ranks of a pipeline, used again from case to case, and what a rank does in each case."""

import multiprocessing as mp
import os
import signal
import threading
import time
from contextlib import nullcontext

from pipeback.distributed.health.health import Health, script
from pipeback.distributed.health.heartbeat import host_store, join_store, my_facts
from pipeback.errors import RankError
from tests.helpers.processes import forked

RANKS = [4, 5, 6]  # global numbers: a pipeline may be one of several
TIMEOUT = 1.5
SOON = 6.0  # seconds; a busy machine is slow


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


# cases in which a rank, by its place, ends as a script does: as an interpreter of its own
SCRIPTS = {"last_raises": 2, "last_raises_within": 2, "first_exits": 0}


def started(context):
    ours, theirs = context.Pipe()
    process = context.Process(target=rank_process, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return process, ours


class Crew:
    """Three processes, and a spare one when one has ended."""

    def __init__(self):
        self.context = forked()
        self.free = []
        self.spare(4)

    def spare(self, number):
        while len(self.free) < number:
            self.free.append(started(self.context))

    def play(self, case, harm=None, at=0.5, victim=None, timeout=TIMEOUT, apart=False):
        """What each rank reports, (error, seconds since the case began or the harm was done), None if it has ended."""
        if case in SCRIPTS:
            self.free.insert(SCRIPTS[case], started(mp.get_context("spawn")))
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
