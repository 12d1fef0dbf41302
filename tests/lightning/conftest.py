"""One crew of processes for the tests of several devices, since Lightning is slow to import; and small stores."""

from collections.abc import Iterator

import pytest

from pipeback.streaming import disk_store
from tests.processes.crew import Crew


@pytest.fixture(scope="package")
def crew() -> Iterator[Crew]:
    with Crew(4) as crew:
        yield crew


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores treat the weights of these small networks as they would large ones."""
    monkeypatch.setattr(disk_store, "SMALL", 1)
