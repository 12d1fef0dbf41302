"""Semaphore: POSIX semaphores in memory that two processes map. Only Linux has all that this needs."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import time
from functools import cache

SIZE = 64  # bytes reserved for a semaphore; sem_t has 32


class Unavailable(OSError):
    """These processes cannot share memory: they are on other hosts, in other containers, or not on Linux."""


class Semaphore:
    """The semaphore at byte `at` of a mapping. value: creates it with this value; None: it exists."""

    def __init__(self, memory: mmap.mmap, at: int, value: int | None = None) -> None:
        self._sleepy, self._quick = _libc()
        self._here = ctypes.byref(ctypes.c_char.from_buffer(memory, at))  # keeps the mapping alive
        if value is not None and self._quick.sem_init(self._here, 1, value):
            raise Unavailable(f"no semaphores between processes: {os.strerror(ctypes.get_errno())}")

    def post(self) -> None:
        self._quick.sem_post(self._here)

    def take(self, seconds: float = 0.0) -> bool:
        """Take the semaphore, and return whether that was possible within `seconds`.

        A signal ends the wait early, so that Python can handle it.
        """
        if not self._quick.sem_trywait(self._here):
            return True
        if seconds <= 0:
            return False
        until = time.clock_gettime_ns(time.CLOCK_MONOTONIC) + int(seconds * 1e9)
        if not self._sleepy.sem_clockwait(self._here, time.CLOCK_MONOTONIC, _Time(*divmod(until, 10**9))):
            return True
        if (code := ctypes.get_errno()) not in (errno.ETIMEDOUT, errno.EINTR):
            raise OSError(code, os.strerror(code))
        return False


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@cache
def _libc() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """Return the C library twice: its calls release Python's lock in the first, and keep it in the second.

    Calls that return at once keep the lock, since a thread that releases it may wait 5 ms for one that computes.
    """
    if not sys.platform.startswith("linux") or ctypes.sizeof(ctypes.c_void_p) != 8:
        raise Unavailable("shared memory needs Linux on 64 bits")
    sleepy, quick = ctypes.CDLL(None, use_errno=True), ctypes.PyDLL(None, use_errno=True)
    if not hasattr(sleepy, "sem_clockwait"):  # it waits by a clock that is never set; glibc 2.30 (2019) has it
        raise Unavailable("shared memory needs a C library with sem_clockwait, such as glibc 2.30")
    sleepy.sem_clockwait.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Time))
    return sleepy, quick
