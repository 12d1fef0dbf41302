"""One crew of processes for all tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.processes.crew import Crew


@pytest.fixture(scope="session")
def crew() -> Iterator[Crew]:
    with Crew(4) as crew:
        yield crew
