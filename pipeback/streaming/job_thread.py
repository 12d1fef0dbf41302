"""Job thread: does jobs one after the other, in a thread whose end is not waited for without end.

A pipeline that nobody holds is closed by whoever collects garbage. This thread may hold locks of Python's threading
then, which threads need when they start and when they end. So a job may be waited for there, but no thread's end.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
Job = tuple[Future[Any], Callable[[], Any]]


class JobThread:
    """A thread that begins with its first job and ends after `close`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.closed = False
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._open: deque[Future[Any]] = deque()  # those of the jobs that are not done
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Have a job done after those before it; once the thread is closed, it is cancelled."""
        future: Future[T] = Future()
        if self.closed:
            future.cancel()
            return future
        self._open.append(future)
        self._jobs.put((future, job))
        if self._thread is None:
            # a daemon: the end of any other needs a lock of who joins it
            self._thread = threading.Thread(target=_serve, args=(self._jobs, self._open), daemon=True, name=self.name)
            self._thread.start()
        return future

    def close(self) -> None:
        """Cancel the jobs that have not begun, and wait for the one that runs, unless it is the caller."""
        self.closed = True
        begun = [future for future in [*self._open] if not future.cancel()]
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:  # which may collect garbage itself
            for future in begun:
                future.exception()
            if self._thread is not None:
                self._thread.join(timeout=1.0)


def _serve(jobs: SimpleQueue[Job | None], waiting: deque[Future[Any]]) -> None:
    while (item := jobs.get()) is not None:
        future, job = item
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
        waiting.popleft()
        del item, future, job  # which hold tensors and, through these, the pipeline
