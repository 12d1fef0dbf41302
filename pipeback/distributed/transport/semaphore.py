"""Semaphores between processes: POSIX's, in memory that both map. Linux alone has all that is needed."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import time
from functools import cache

SIZE = 64  # bytes to set aside for one; sem_t has 32


class Unavailable(OSError):
    """These processes cannot share memory: they are on other hosts, in other containers, or not on Linux."""


class Semaphore:
    """The semaphore at a place of a mapping. `value`: make it, with this value."""

    def __init__(self, memory: mmap.mmap, at: int, value: int | None = None) -> None:
        self._sleepy, self._quick = _libc()
        self._here = ctypes.byref(ctypes.c_char.from_buffer(memory, at))  # keeps the mapping alive
        if value is not None and self._quick.sem_init(self._here, 1, value):
            raise Unavailable(f"no semaphores between processes: {os.strerror(ctypes.get_errno())}")

    def post(self) -> None:
        self._quick.sem_post(self._here)

    def take(self, seconds: float = 0.0) -> bool:
        """Whether it could be taken in this time. A signal ends the wait early, so that Python can handle it."""
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
    """The C library, letting other threads of Python run during a call, and not.

    What returns at once keeps the lock: a thread that gives it up may wait 5 ms for one that computes.
    """
    if not sys.platform.startswith("linux") or ctypes.sizeof(ctypes.c_void_p) != 8:
        raise Unavailable("shared memory needs Linux on 64 bits")
    sleepy, quick = ctypes.CDLL(None, use_errno=True), ctypes.PyDLL(None, use_errno=True)
    if not hasattr(sleepy, "sem_clockwait"):  # timed by a clock that nobody sets; glibc 2.30, of 2019
        raise Unavailable("shared memory needs a C library with sem_clockwait, such as glibc 2.30")
    sleepy.sem_clockwait.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Time))
    return sleepy, quick
