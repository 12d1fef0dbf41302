"""The threads of a store: what they do in order, and how they end where garbage is collected."""

import gc
import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from functools import partial

import pytest

from pipeback.streaming.job_thread import JobThread

COLLECTS = """
import faulthandler, gc, threading
faulthandler.dump_traceback_later(60, exit=True)
import torch, pipeback

def trained():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    pipe = pipeback.Pipeline(
        model, loss=torch.nn.functional.mse_loss, optimizer=lambda p: torch.optim.SGD(p, 0.1), method="pb", store="host"
    )
    pipe.push(torch.randn(6, 4), torch.randn(6, 4))
    kept = [pipe]
    kept.append(kept)  # garbage that only a collection finds

gc.disable()
trained()
begins = threading.Thread._set_tstate_lock
def collecting(thread):
    with threading._shutdown_locks_lock, threading._active_limbo_lock:
        gc.collect()
    begins(thread)
threading.Thread._set_tstate_lock = collecting
trained()
print("done")
"""


def test_jobs_are_done_in_order_and_errors_told():
    thread, done = JobThread("jobs"), []
    futures = [thread.submit(partial(done.append, n)) for n in range(5)]
    with pytest.raises(ZeroDivisionError):
        thread.submit(lambda: 1 / 0).result()
    assert thread.submit(lambda: 7).result() == 7
    assert done == [*range(5)] and all(future.done() for future in futures)
    thread.close()
    with pytest.raises(CancelledError):
        thread.submit(lambda: 7).result()


def test_close_waits_for_the_job_that_runs_and_drops_others():
    thread, goes_on, runs, done = JobThread("jobs"), threading.Event(), threading.Event(), []

    def job():
        runs.set()
        goes_on.wait()
        done.append(1)

    thread.submit(job)
    other = thread.submit(lambda: done.append(2))
    runs.wait()
    threading.Timer(0.05, goes_on.set).start()
    thread.close()
    assert done == [1] and other.cancelled()


def test_a_job_may_close_its_own_thread():
    thread = JobThread("jobs")
    thread.submit(thread.close).result()
    assert thread.closed


def test_a_done_job_is_not_held():
    class Held:
        def __init__(self):
            self.itself = self

        def run(self):
            return None

    thread, kept = JobThread("jobs"), Held()
    thread.submit(kept.run).result()
    thread.submit(lambda: None).result()
    del kept
    gc.collect()
    assert not any(isinstance(each, Held) for each in gc.get_objects())
    thread.close()


@pytest.mark.skipif(not hasattr(threading, "_shutdown_locks_lock"), reason="other locks in this Python")
def test_a_pipeline_is_collected_while_a_thread_begins():
    found = subprocess.run([sys.executable, "-c", COLLECTS], capture_output=True, text=True, timeout=100)
    assert found.stdout.strip() == "done", found.stderr
