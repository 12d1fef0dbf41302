"""One crew of processes for the tests of several devices in a file."""

from collections.abc import Iterator

import pytest

from tests.processes.crew import Crew


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(3) as crew:
        yield crew
