"""One crew of processes for the tests of several devices: it takes long to import Lightning in all of them."""

from collections.abc import Iterator

import pytest

from tests.processes.crew import Crew


@pytest.fixture(scope="package")
def crew() -> Iterator[Crew]:
    with Crew(3) as crew:
        yield crew
