"""Law: whatever a training_step is made of, the strategy that follows it trains as plain Lightning does, to the bit
where there is no delay, and with delays alike on every runtime.
"""

import pytest

from tests.helpers.choice import rare

from .forwards.draw import forwards
from .forwards.faults import STEPS
from .forwards.step import Step, check_step
from .search import fresh, search_for


@pytest.mark.parametrize(("number", "count"), [(1, 4), *(rare(seed, 40) for seed in (2, 3))])
def test_steps(number, count):
    search_for(forwards(Step), check_step, number, count)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_new_steps():
    """A quarter of an hour; a failure says which command replays it."""
    for number in fresh(900, 40, "steps"):
        search_for(forwards(Step), check_step, number, 40)


@pytest.mark.parametrize("name", STEPS)
def test_faults_that_were_found(name):
    check_step(STEPS[name])
