"""Interrupts: Ctrl-C and SIGTERM end a command and every process that it has started, within seconds."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from lightning.pytorch.utilities.exceptions import SIGTERMException

SECONDS = 3.0  # for what is under way to end by itself
SIGNALS = signal.SIGINT, signal.SIGTERM


@contextmanager
def stoppable(said: str) -> Iterator[None]:
    """A context that Ctrl-C and SIGTERM leave: the process prints `said`, without a traceback, and ends.

    What runs inside gets a KeyboardInterrupt, and three seconds.
    """
    heard: list[int] = []

    def end() -> None:
        print(f"\n{said}", file=sys.__stderr__, flush=True)
        os._exit(128 + heard[0])  # without waiting for the threads of launchers

    def stop(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        last = threading.Timer(SECONDS, end)
        last.daemon = True
        last.start()
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.signal(each, stop) for each in SIGNALS}
    try:
        yield
    finally:
        if heard:
            end()
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def ending(say: Callable[[], str]) -> Iterator[None]:
    """A context in which Ctrl-C ends the process with 130, SIGTERM with 143, and both with what `say` returns.

    For Lightning, which ends with 1 at Ctrl-C and with 0 at SIGTERM.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        if not (interrupted(error) or isinstance(error, SIGTERMException)):
            raise
        print(f"\n{say()}", file=sys.stderr, flush=True)
        raise SystemExit(128 + (signal.SIGINT if interrupted(error) else signal.SIGTERM)) from None


def interrupted(error: BaseException) -> bool:
    """Whether an error is that of Ctrl-C, or what Lightning makes of it."""
    return isinstance(error, KeyboardInterrupt) or isinstance(error.__context__, KeyboardInterrupt)


def follow(parent: int) -> None:
    """End this process within a second after the one that has forked it, if it is not `parent`, the command itself.

    Ctrl-C is the command's to hear.
    """
    if os.getpid() == parent:
        return
    forked_by = os.getppid()  # the command, or a server of processes, which ends with it

    def watch() -> None:
        while os.getppid() == forked_by:
            time.sleep(0.5)
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=watch, daemon=True, name="pipeback parent").start()
