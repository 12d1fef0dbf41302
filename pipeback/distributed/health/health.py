"""Health: finds the rank at fault when a pipeline over processes stands still, and tells every rank.

Each rank writes beats into a store: a number that grows, and what the rank is doing. A rank has two threads for this:
the *talker* makes all calls of the store, and may hang in them; the *lookout* never blocks, and judges from what is
known when a rank is at fault:

    a process of this host has ended without a word      at once
    somebody waits for a rank that has left              after `GRACE`
    no beat of a rank arrives                            after 0.8 of the timeout
    a wait lasts so long, and the rank at the end of     after 0.8 of the timeout
    the chain of waits has done the same as long

All ranks report the first fault that is written into the store. The clocks of different hosts are never compared.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import NamedTuple
from weakref import WeakSet

import torch.distributed as dist

from pipeback.distributed.health.activity import Activity
from pipeback.distributed.health.blame import Verdict, blame, ended, silent
from pipeback.distributed.health.heartbeat import Heartbeat, RankIdentity
from pipeback.errors import RankError

GRACE = 2.0  # seconds within which messages of a rank that has left, or the reason of a broken connection, arrive


class Failed(NamedTuple):
    """An operation that has failed, as the `StageError` says it."""

    message: str
    operation: str | None
    stage: int | None
    micro_batch: int | None


class Fault(NamedTuple):
    """What has ended a pipeline. failed: the operation, if it is one that has failed on the rank."""

    rank: int
    message: str
    failed: Failed | None = None

    @staticmethod
    def load(text: bytes) -> Fault:
        rank, message, *failed = json.loads(text)
        return Fault(rank, message, Failed(*failed[0]) if any(failed) else None)


class Health:
    """The health of the ranks of one pipeline, as one of them sees it.

    store: the pipeline's own, served by ranks[0] (`host_store`, `join_store`). rank: its global number. ranks:
    all global ranks, in pipeline order. facts: the identity of each rank. timeout: seconds until a fault is found.
    """

    def __init__(
        self, store: dist.Store, rank: int, ranks: Sequence[int], facts: dict[int, RankIdentity], timeout: float
    ) -> None:
        self.rank, self.ranks, self.facts, self.timeout = rank, list(ranks), facts, timeout
        self.activity = Activity(rank)
        self.working, self.idle = self.activity.working, self.activity.idle
        self.calling, self.waiting = self.activity.calling, self.activity.waiting
        self.pushed = 0  # micro-batches, set by the pipeline
        self.failed = threading.Event()
        self.own: BaseException | None = None  # the error that has ended this rank's part, before its thread raises it
        self._store, self._host, self._here = store, self.ranks[0], facts[rank].place
        self._limit, self._beat = 0.8 * timeout, min(1.0, timeout / 6)
        self._pause = min(0.2, timeout / 10)  # of the lookout; the talker pauses longer, since its calls cost more
        now = time.monotonic()
        self._statuses = dict.fromkeys(self.ranks, Heartbeat())
        self._changed = dict.fromkeys(self.ranks, now)  # when the status of each rank last changed
        self._heard = self._asked = now  # when the store last answered, and when it was asked for that
        self._gone: dict[int, float] = {}  # when it was seen that a process has ended
        self._left: dict[int, float] = {}  # when it was seen that a rank has left
        self._accused: Fault | None = None  # the fault to be written
        self.fault: Fault | None = None  # the first one, once it is known
        self._broken: tuple[float, str] | None = None  # (when, why) the store failed
        self._leaving = False
        self._called: str | None = None  # the name of the meeting for which this rank waits
        self._met, self._came = threading.Event(), False  # whether that is decided, and whether all have come
        self._deadline = float("inf")  # until when the store's host waits for the others to learn the fault
        self._wake, self._lock = threading.Event(), threading.Lock()
        # not `atexit`, which forked processes of multiprocessing skip
        self._at_exit = Finalize(None, self._exit, exitpriority=10)
        _OPEN.add(self)
        self._talker = threading.Thread(target=self._talk, daemon=True, name="pipeback talker")
        self._lookout = threading.Thread(target=self._look, daemon=True, name="pipeback lookout")
        self._talker.start()
        self._lookout.start()

    def check(self) -> None:
        """Raise the fault, if there is one: a RankError or, on the rank at fault, its own error. This is cheap."""
        if self.failed.is_set():
            raise self._error()

    def meet(self, what: str) -> None:
        """Return when every rank has called this; raise the fault of a rank that will not. All return, or none.

        A collective of torch.distributed would wait until its timeout instead. what: a name that no other meeting has;
        a rank that was interrupted may come again.
        """
        self._met.clear()
        self._came, self._called = False, what
        self._wake.set()
        try:
            while not self._met.wait(self._pause / 10):
                if not self._talker.is_alive() or (self.fault is not None and self.fault.failed is None):
                    break  # it has not told that this rank came; or it may hang, and nobody goes back
        finally:
            self._called = None
        if not self._came and self.failed.wait(self.timeout):  # the fault is known, or the lookout will find it
            raise self._error()

    def fail(self, rank: int, what: str, failed: Failed | None = None) -> BaseException:
        """Tell all ranks that `rank` is at fault; return the error to raise, which is that of the first fault."""
        self._accuse(rank, what, failed)
        if not self.failed.wait(self.timeout):
            self._settle(Fault(rank, self._sentence(rank, what), failed))
        return self._error()

    def blame(self, on: int | Sequence[int], what: str, seconds: float) -> BaseException:
        """Return the error after a transport gave up a wait for `on`, by its timeout or since the connection broke.

        seconds: how long the wait has lasted; inside `waiting` the time since its begin is used.
        """
        own = [time.monotonic() - w.since for w in self.activity.waits() if w.thread == threading.get_ident()]
        seconds = max(own, default=seconds)
        broke = seconds < self._limit
        with self.waiting(on, what, seconds):
            # another rank may know the reason of a break; after the timeout, only fresh beats are missing
            if self.failed.wait(GRACE + 1 if broke else 1.5 * self._beat):
                return self._error()
            on = [on] if isinstance(on, int) else [r for r in on if r != self.rank]
            if broke:
                silent = min(on, key=lambda r: self._changed[r])
                return self.fail(silent, f"its connection to rank {self.rank} broke, which waited for it ({what})")
            verdict = self._blame(on, what, seconds)
            return self.fail(verdict.rank, verdict.what)

    def leave(self) -> None:
        """End this rank's part, which is no fault unless another rank waits for it. Returns at once.

        When a process ends, messages that it has sent and nobody has received are lost, and so is the store of the
        first rank. So the end of a script waits until all others have left or know the fault, at most the timeout. A
        rank that trains on after that still sees processes of its host end and judges its own waits, but gets no news
        from other hosts.
        """
        if not self._leaving:
            self._deadline = min(self._deadline, time.monotonic() + self.timeout)
            self._leaving = True
            self._wake.set()

    def ended_by(self, error: BaseException) -> None:
        """Report the error that ends the script of this rank as the fault, unless one is known already."""
        if not (self._leaving or self.failed.is_set()):
            self.fail(self.rank, f"its script ended with {type(error).__name__}: {error}")

    def _exit(self) -> None:
        """Run at the end of the script, whose error is the fault, unless one is known already."""
        error = script_error()
        if error:
            self.ended_by(error)
        self.leave()
        # a thread that wakes up while Python ends could crash the process; but the talker may hang, so wait briefly
        self._talker.join(self.timeout + 1)
        self._lookout.join(1)

    def _sentence(self, rank: int, what: str) -> str:
        return f"rank {rank} (host {self.facts[rank].host}, process {self.facts[rank].process}): {what}"

    def _error(self) -> BaseException:
        assert self.fault is not None
        rank, message, failed = self.fault
        if self.own is not None and rank == self.rank:
            return self.own
        return RankError(message, rank, failed and failed.operation)

    def _accuse(self, rank: int, what: str, failed: Failed | None = None) -> None:
        """Have the talker write a fault."""
        with self._lock:
            if self._accused is None:
                self._accused = Fault(rank, self._sentence(rank, what), failed)
        if not self._lookout.is_alive():
            self._settle(self._accused)  # this rank has left, and can tell nobody
        self._wake.set()

    def _settle(self, fault: Fault) -> None:
        """Accept a fault, which comes from the store or, if that does not answer, from this rank's own judgement."""
        with self._lock:
            if self.fault is None:
                self.fault = fault
                self._deadline = min(self._deadline, time.monotonic() + min(self.timeout, 3.0))
        self.failed.set()
        self._wake.set()

    # -- the talker ----------------------------------------------------------------------------------------------

    def _talk(self) -> None:
        try:
            store = self._store  # only this thread calls it, since a blocking call holds the connection's lock
            store.set_timeout(timedelta(seconds=10 * self.timeout + 60))  # the lookout judges, not the store
            names = ["fault", *(f"beat {r}" for r in self.ranks)]
            for name in names:
                store.compare_set(name, "", "")  # reading a missing key would block
            beat, due, over = 0, 0.0, False
            while not (over and self._all_over()):
                begun = time.monotonic()
                accused = self.fault or self._accused  # a fault settled here is written when the store answers again
                if accused:
                    store.compare_set("fault", "", json.dumps(accused))
                over = self._done()
                if over or self._leaving or begun >= due:
                    beat, due = beat + 1, begun + self._beat
                    store.set(f"beat {self.rank}", self._status(beat, over).dump())
                if not over or self.rank == self._host:
                    self._read(*store.multi_get(names))  # and so this rank's beat has arrived
                self._asked, self._heard = begun, time.monotonic()
                if self.failed.is_set() and (what := self._called):
                    self._decide(store, what, "no")
                if self._leaving or not self.failed.is_set():
                    self._call(store, time.monotonic() + self._beat / 2)
            self._at_exit.cancel()
            del self._store
        except BaseException as error:
            self._broken = (time.monotonic(), (str(error).splitlines() or [repr(error)])[0])

    def _call(self, store: dist.Store, until: float) -> None:
        """Pause; meanwhile write that this rank has come to a meeting, and read who else has."""
        while (what := self._called) and time.monotonic() < until and not (self._leaving or self._accused):
            store.set(f"{what} {self.rank}", "")
            if store.check([f"{what} {rank}" for rank in self.ranks]):
                self._decide(store, what, "yes")
            else:
                time.sleep(min(self._pause / 10, 0.002))
        self._wake.wait(max(0.0, until - time.monotonic()))
        self._wake.clear()

    def _decide(self, store: dist.Store, what: str, word: str) -> None:
        """Decide whether all ranks came to a meeting; the first rank that says a word decides it for all."""
        came = store.compare_set(f"{what} decided", "", word) == b"yes"
        if self._called == what:
            self._came, self._called = came, None
            self._met.set()

    def _status(self, beat: int = 0, over: bool = False) -> Heartbeat:
        return self.activity.status()._replace(beat=beat, pushed=self.pushed, left=self._leaving, over=over)

    def _read(self, fault: bytes, *beats: bytes) -> None:
        for rank, text in zip(self.ranks, beats, strict=True):
            if text and rank != self.rank:
                status = Heartbeat.load(text)
                if status.beat != self._statuses[rank].beat:
                    self._statuses[rank], self._changed[rank] = status, time.monotonic()
        if fault:
            self._settle(Fault.load(fault))

    def _done(self) -> bool:
        """Whether this process needs the store no more: a fault is known, or all have left with their messages."""
        return self.failed.is_set() or time.monotonic() > self._deadline or (self._leaving and self._others("left"))

    def _all_over(self) -> bool:
        """Whether no rank needs this process's store any more."""
        return self.rank != self._host or time.monotonic() > self._deadline or self._others("over")

    def _others(self, what: str) -> bool:
        others = [(r, self._statuses[r]) for r in self.ranks if r != self.rank]
        return all(s.over or getattr(s, what) or self.facts[r].gone(self._here) for r, s in others)

    # -- the lookout ---------------------------------------------------------------------------------------------

    def _look(self) -> None:
        looked = time.monotonic()
        while not self.failed.is_set() and not (self._leaving and not self._talker.is_alive()):
            now = time.monotonic()
            try:
                if now - looked > self._limit / 2:
                    # this process itself was stopped or could not run, so that missing beats mean nothing
                    self._heard = now
                    self._changed = dict.fromkeys(self.ranks, now)
                else:
                    self._judge(now)
            except Exception as error:
                what = f"its thread that judges ranks failed: {error!r}"
                self._settle(Fault(self.rank, self._sentence(self.rank, what)))
            looked = now
            time.sleep(self._pause)
        if self._accused:
            self._settle(self._accused)  # the talker may have ended before it could write it

    def _judge(self, now: float) -> None:
        verdict = self._missing(now) or self._silent(now) or self._stuck(now)
        told = not (self._broken or now - self._heard > self._limit or self.facts[self._host].gone(self._here))
        if told:
            if verdict:
                self._accuse(*verdict)
        elif verdict:  # the store does not answer
            self._settle(Fault(verdict[0], self._sentence(*verdict)))
        elif self._accused and self._statuses[self._host].over:
            self._settle(self._accused)

    def _missing(self, now: float) -> tuple[int, str] | None:
        """Return a rank of this host whose process has ended without a message, and the fault, if there is one."""
        for r in self.ranks:
            if r != self.rank and not self._statuses[r].over and self.facts[r].gone(self._here):
                since = self._gone.setdefault(r, now)
                # it may have left properly, which a later answer of the store tells
                if self._asked > since or self._broken or now - since > 1:
                    return r, "its process has ended without leaving the pipeline (killed by a signal, out of memory?)"
        return None

    def _silent(self, now: float) -> tuple[int, str] | None:
        """Return a rank whose beats do not arrive, and the fault; the host of the store comes first."""
        host, store = self._host, "it holds the store of the pipeline, which "
        if self._broken:
            if self._statuses[host].over or now - self._broken[0] < 0.5:
                return None  # it has left, or its process may just be ending
            return host, f"{store}does not answer any more ({self._broken[1]})"
        silence = {r: self._heard - self._changed[r] for r in self.ranks if not self._statuses[r].over}
        silence[self.rank] = 0.0
        about = ""
        if now - self._heard > self._limit:
            silence, about = {host: now - self._heard}, store
        for r, seconds in silence.items():
            if seconds > self._limit:
                return r, about + silent(seconds, self.facts[r].stopped(self._here), self.timeout)
        return None

    def _stuck(self, now: float) -> tuple[int, str] | None:
        """Return the rank at fault for a wait of this rank that lasts too long, and the fault."""
        for on, what, since, _ in self.activity.waits():
            for r in on:
                if self._statuses[r].left and now - max(since, self._left.setdefault(r, now)) > GRACE:
                    return r, ended(self.rank, what)
            if now - since > self._limit:
                verdict = self._blame(on, what, now - since)
                if verdict.seconds > self._limit:
                    return verdict.rank, verdict.what
        return None

    def _blame(self, on: Sequence[int], what: str, seconds: float) -> Verdict:
        if self._broken:  # see `leave`
            text = f"has sent nothing for {seconds:.1f} s to rank {self.rank}, which waits for it ({what})"
            return Verdict(on[0], f"{text}; rank {self._host}, through which the ranks talk, has left", seconds)
        statuses = self._statuses | {self.rank: self._status()}
        return blame(self.rank, on, what, seconds, statuses, self.timeout)


_OPEN: WeakSet[Health] = WeakSet()  # those of this process


@contextmanager
def script() -> Iterator[None]:
    """A context around the work of a child of multiprocessing: an error that ends it is told to all ranks."""
    try:
        yield
    except Exception as error:
        for health in list(_OPEN):
            health.ended_by(error)
        raise


def script_error() -> BaseException | None:
    """Return, at the end of a script, the error that ended it; None if there was none.

    From Python 3.13 on, a child of multiprocessing has forgotten it by then: see `script`.
    """
    if hasattr(sys, "ps1"):
        return None
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)  # in children of multiprocessing; in scripts
    if isinstance(error, SystemExit):
        return error.__context__ if error.code else None
    return error
