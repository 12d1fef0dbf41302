"""Law: whatever plain code a training_step has, graphs stand for it to the bit."""

import pytest

from tests.helpers.choice import rare

from .search import fresh, search_for
from .written.draw import written
from .written.written import check_written

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(("number", "count"), [(1, 6), *(rare(seed, 60) for seed in (2, 3))])
def test_written_steps(number, count):
    search_for(written(), check_written, number, count)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_new_written_steps():
    """A quarter of an hour; a failure says which command replays it."""
    for number in fresh(900, 40, "written steps"):
        search_for(written(), check_written, number, 40)
