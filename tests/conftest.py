"""What holds for all tests: one thread per process, since ranks have one, and sums of two threads have other bits.

An example of hypothesis has no time limit, which a busy machine would exceed.
"""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
settings.register_profile("no times", deadline=None)
settings.load_profile("no times")
LAWS = {"laws", "lightning", "pipeline", "processes", "stages", "streaming"}  # rooms of tests that run over methods
gc.set_threshold(20_000, 10, 10)  # a twentieth of the time of all tests went into looking for garbage


@pytest.fixture(autouse=True, scope="module")
def quick_collections() -> None:
    """What is there before a file of tests, all of torch for one, is looked at by no collection of garbage, each of
    which would take half a second, and by no `gc.get_objects`.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Bits do not depend on how long anything takes."""
    import torch

    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", help="where pipelines train: cuda, or sim for a simulated accelerator")
    parser.addoption("--default-device", help="the same, and torch's default device")


def pytest_configure(config: pytest.Config) -> None:
    default = config.getoption("--default-device")
    if name := default or config.getoption("--device"):
        from tests.helpers.on_device import use

        folder = os.environ.get("TORCH_EXTENSIONS_DIR") or config.rootpath / ".pytest_cache" / "simulated"
        use(name, Path(folder), default=bool(default))


@pytest.hookimpl(tryfirst=True)  # before what is marked is left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from tests.helpers.choice import thin

    thin(item for item in items if item.path.parent.name in LAWS)


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or modules that count what they leave behind would say that it is much
