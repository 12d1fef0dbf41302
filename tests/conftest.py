"""What holds for all tests: one thread per process, since ranks have one, and sums of two threads have other bits."""

import gc
import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported


@pytest.fixture(autouse=True, scope="module")
def quick_collections() -> None:
    """What is there before a file of tests, all of torch for one, is looked at by no collection of garbage, each of
    which would take half a second, and by no `gc.get_objects`.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or modules that count what they leave behind would say that it is much
