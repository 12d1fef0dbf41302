"""Health: which rank is at fault when a pipeline over processes stands still, told to every rank.

Each rank writes beats into a store: a number that grows, and what the rank is doing. A rank has two threads for this:
the *talker* does all that goes through the store, and may hang there with it; the *lookout* never blocks and judges
what is known:

    a process of this host has ended without a word      at once
    somebody waits for a rank that has left              after `GRACE`
    no beat of a rank is heard                           after 0.8 of the timeout
    a wait has lasted so long, and so has what the       after 0.8 of the timeout
    rank at the end of the chain of waits is doing

The first fault written into the store is everybody's. No clock of one host is compared with that of another.
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
from weakref import WeakSet

import torch.distributed as dist

from pipeback.distributed.health.activity import Activity
from pipeback.distributed.health.blame import Verdict, blame, ended, silent
from pipeback.distributed.health.heartbeat import Heartbeat, RankIdentity
from pipeback.errors import RankError

GRACE = 2.0  # seconds within which what was sent before a rank left, or the reason of a broken connection, arrives


class Health:
    """The health of the ranks of one pipeline, as one of them sees it.

    store: the pipeline's own, served by ranks[0] (`host_store`, `join_store`). rank: the own global rank. ranks: all
    global ranks, in pipeline order. facts: of each rank. timeout: seconds within which a fault is found.
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
        self.own: BaseException | None = None  # what has ended this rank's part; known here before its thread raises it
        self._store, self._host, self._here = store, self.ranks[0], facts[rank].place
        self._limit, self._beat = 0.8 * timeout, min(1.0, timeout / 6)
        self._pause = min(0.2, timeout / 10)  # of the lookout; the talker's are longer, for its looks cost more
        now = time.monotonic()
        self._statuses = dict.fromkeys(self.ranks, Heartbeat())
        self._changed = dict.fromkeys(self.ranks, now)  # when the status was last seen to change
        self._heard = self._asked = now  # when the store last answered, and when that was asked
        self._gone: dict[int, float] = {}  # processes that have ended, when that was seen
        self._left: dict[int, float] = {}  # ranks that have left, likewise
        self._accused: tuple[int, str] | None = None  # the fault to be written
        self._fault: tuple[int, str] | None = None
        self._broken: tuple[float, str] | None = None  # the store failed: when, why
        self._leaving = False
        self._called: str | None = None  # what is to be met for
        self._met = threading.Event()
        self._deadline = float("inf")  # of the store's host, for the others to take notice
        self._wake, self._lock = threading.Event(), threading.Lock()
        # `atexit` would do but for forked processes of multiprocessing, which leave it out
        self._at_exit = Finalize(None, self._exit, exitpriority=10)
        _OPEN.add(self)
        self._talker = threading.Thread(target=self._talk, daemon=True, name="pipeback talker")
        self._lookout = threading.Thread(target=self._look, daemon=True, name="pipeback lookout")
        self._talker.start()
        self._lookout.start()

    def check(self) -> None:
        """Raise the fault, if there is one: a RankError or, on the rank at fault, its own error. Cheap."""
        if self.failed.is_set():
            raise self._error()

    def meet(self, what: str) -> None:
        """Return when every rank has called this, or after the timeout; raise the fault of one that will not.

        Unlike in a collective of torch.distributed, which would last until its timeout.
        """
        self._met.clear()
        self._called, deadline = what, time.monotonic() + self.timeout
        self._wake.set()
        while not (self._met.wait(self._pause / 10) or self.failed.is_set() or time.monotonic() > deadline):
            if not self._talker.is_alive():  # its host has ended
                break
        self._called = None
        self.check()

    def fail(self, rank: int, what: str) -> BaseException:
        """Tell all ranks that `rank` is at fault; returns the error to raise: that of the first fault anywhere."""
        self._accuse(rank, what)
        if not self.failed.wait(self.timeout):
            self._settle(rank, self._sentence(rank, what))
        return self._error()

    def blame(self, on: int | Sequence[int], what: str, seconds: float) -> BaseException:
        """A transport gave up a wait for `on`, after the timeout or as its connection broke: who is at fault?

        seconds: what the wait has lasted, if this thread is not `waiting`, which knows better.
        """
        own = [time.monotonic() - w.since for w in self.activity.waits() if w.thread == threading.get_ident()]
        seconds = max(own, default=seconds)
        broke = seconds < self._limit
        with self.waiting(on, what, seconds):
            # the reason of a break is better known elsewhere; after the timeout only fresh beats are missing
            if self.failed.wait(GRACE + 1 if broke else 1.5 * self._beat):
                return self._error()
            on = [on] if isinstance(on, int) else [r for r in on if r != self.rank]
            if broke:
                silent = min(on, key=lambda r: self._changed[r])
                return self.fail(silent, f"its connection to rank {self.rank} broke, which waited for it ({what})")
            verdict = self._blame(on, what, seconds)
            return self.fail(verdict.rank, verdict.what)

    def leave(self) -> None:
        """This rank ends its part; not a fault unless somebody waits for it. Returns at once.

        A process takes with it what it has sent and nobody has taken, and the first rank the store; so the end of a
        script waits until all others have left or know the fault, at most the timeout. Who trains on after that is on
        its own: it still sees processes of its host end and judges its own waits, but hears nothing from other hosts.
        """
        if not self._leaving:
            self._deadline = min(self._deadline, time.monotonic() + self.timeout)
            self._leaving = True
            self._wake.set()

    def ended_by(self, error: BaseException) -> None:
        """An error ends the script of this rank; it is the fault, unless one is known already."""
        if not (self._leaving or self.failed.is_set()):
            self.fail(self.rank, f"its script ended with {type(error).__name__}: {error}")

    def _exit(self) -> None:
        """At the end of the script. An error that ended it is the fault, unless one is known already."""
        error = script_error()
        if error:
            self.ended_by(error)
        self.leave()
        # a thread that wakes up while Python ends could end the process with a signal; the talker may hang, though
        self._talker.join(self.timeout + 1)
        self._lookout.join(1)

    def _sentence(self, rank: int, what: str) -> str:
        return f"rank {rank} (host {self.facts[rank].host}, process {self.facts[rank].process}): {what}"

    def _error(self) -> BaseException:
        assert self._fault is not None
        if self.own is not None and self._fault[0] == self.rank:
            return self.own
        return RankError(self._fault[1], self._fault[0])

    def _accuse(self, rank: int, what: str) -> None:
        """Have the talker write a fault."""
        with self._lock:
            if self._accused is None:
                self._accused = (rank, self._sentence(rank, what))
        if not self._lookout.is_alive():
            self._settle(*self._accused)  # this rank has left, and there is nobody to tell
        self._wake.set()

    def _settle(self, rank: int, message: str) -> None:
        """Accept this as the fault, as the store says it; or by our own judgement if the store does not answer."""
        with self._lock:
            if self._fault is None:
                self._fault = (rank, message)
                self._deadline = min(self._deadline, time.monotonic() + min(self.timeout, 3.0))
        self.failed.set()
        self._wake.set()

    # -- the talker ----------------------------------------------------------------------------------------------

    def _talk(self) -> None:
        try:
            store = self._store  # nobody else calls it: a call that blocks holds the connection's lock
            store.set_timeout(timedelta(seconds=10 * self.timeout + 60))  # the lookout is who judges
            names = ["fault", *(f"beat {r}" for r in self.ranks)]
            for name in names:
                store.compare_set(name, "", "")  # reading what is not there would block
            beat, due, over = 0, 0.0, False
            while not (over and self._all_over()):
                begun = time.monotonic()
                accused = self._fault or self._accused  # a fault settled here is told when the store answers again
                if accused:
                    store.compare_set("fault", "", json.dumps(accused))
                over = self._done()
                if over or self._leaving or begun >= due:
                    beat, due = beat + 1, begun + self._beat
                    store.set(f"beat {self.rank}", self._status(beat, over).dump())
                if not over or self.rank == self._host:
                    self._read(*store.multi_get(names))  # and so the beat has arrived
                self._asked, self._heard = begun, time.monotonic()
                if self._leaving or not self.failed.is_set():
                    self._call(store, time.monotonic() + self._beat / 2)
            self._at_exit.cancel()
            del self._store
        except BaseException as error:
            self._broken = (time.monotonic(), (str(error).splitlines() or [repr(error)])[0])

    def _call(self, store: dist.Store, until: float) -> None:
        """Pause; meanwhile tell that this rank has come to a meeting, and look for the others."""
        while (what := self._called) and time.monotonic() < until and not (self._leaving or self._accused):
            store.set(f"{what} {self.rank}", "")
            if store.check([f"{what} {rank}" for rank in self.ranks]):
                self._called = None
                self._met.set()
            else:
                time.sleep(self._pause / 10)
        self._wake.wait(max(0.0, until - time.monotonic()))
        self._wake.clear()

    def _status(self, beat: int = 0, over: bool = False) -> Heartbeat:
        return self.activity.status()._replace(beat=beat, pushed=self.pushed, left=self._leaving, over=over)

    def _read(self, fault: bytes, *beats: bytes) -> None:
        for rank, text in zip(self.ranks, beats, strict=True):
            if text and rank != self.rank:
                status = Heartbeat.load(text)
                if status.beat != self._statuses[rank].beat:
                    self._statuses[rank], self._changed[rank] = status, time.monotonic()
        if fault:
            self._settle(*json.loads(fault))

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
                    # this process was stopped itself, or could not run: it has heard nobody, which says nothing
                    self._heard = now
                    self._changed = dict.fromkeys(self.ranks, now)
                else:
                    self._judge(now)
            except Exception as error:
                self._settle(self.rank, self._sentence(self.rank, f"its thread that judges ranks failed: {error!r}"))
            looked = now
            time.sleep(self._pause)
        if self._accused:
            self._settle(*self._accused)  # the talker may have ended without having seen it

    def _judge(self, now: float) -> None:
        verdict = self._missing(now) or self._silent(now) or self._stuck(now)
        told = not (self._broken or now - self._heard > self._limit or self.facts[self._host].gone(self._here))
        if told:
            if verdict:
                self._accuse(*verdict)
        elif verdict:  # there is no store to write it into
            self._settle(verdict[0], self._sentence(*verdict))
        elif self._accused and self._statuses[self._host].over:
            self._settle(*self._accused)

    def _missing(self, now: float) -> tuple[int, str] | None:
        """A process of this host that has ended without a message."""
        for r in self.ranks:
            if r != self.rank and not self._statuses[r].over and self.facts[r].gone(self._here):
                since = self._gone.setdefault(r, now)
                # it may have left first, which an answer to a later question tells
                if self._asked > since or self._broken or now - since > 1:
                    return r, "its process has ended without leaving the pipeline (killed by a signal, out of memory?)"
        return None

    def _silent(self, now: float) -> tuple[int, str] | None:
        """A rank whose beats are not heard; the rank without which no beat is heard comes first."""
        host, store = self._host, "it holds the store of the pipeline, which "
        if self._broken:
            if self._statuses[host].over or now - self._broken[0] < 0.5:
                return None  # see `leave`; or perhaps its process is just ending
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
        """A rank for which this rank waits in vain."""
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


_OPEN: WeakSet[Health] = WeakSet()  # of this process


@contextmanager
def script() -> Iterator[None]:
    """What a child of multiprocessing was started for: an error that ends it is told to all ranks."""
    try:
        yield
    except Exception as error:
        for health in list(_OPEN):
            health.ended_by(error)
        raise


def script_error() -> BaseException | None:
    """At the end of a script, the error that ended it.

    From Python 3.13 on, a child of multiprocessing has forgotten it by then: see `script`.
    """
    if hasattr(sys, "ps1"):
        return None
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)  # multiprocessing's children; main scripts
    if isinstance(error, SystemExit):
        return error.__context__ if error.code else None
    return error
