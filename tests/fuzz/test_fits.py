"""Law: whatever is combined, a fit under Lightning is that of the event loop on one device, goes on from a checkpoint
as if it had not been stopped, and without delays is plain Lightning.
"""

from collections.abc import Iterator
from functools import partial

import pytest

pytest.importorskip("lightning")

from tests.helpers.choice import rare
from tests.processes.crew import Crew

from .fits.check import check
from .fits.draw import fits
from .fits.faults import FAULTS
from .fits.fit import Fit
from .search import fresh, search_for

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(2) as crew:
        yield crew


@pytest.mark.parametrize(("number", "count"), [(1, 8), *(rare(seed, 40) for seed in (2, 3, 5, 7))])
def test_fits(number, count, crew):
    search_for(fits(), partial(check, crew=crew), number, count)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_new_fits(crew):
    """A quarter of an hour; a failure says which command replays it."""
    for number in fresh(900, 40, "fits"):
        search_for(fits(), partial(check, crew=crew), number, 40)


@pytest.mark.parametrize("name", FAULTS)
def test_faults_that_were_found(name, crew):
    check(FAULTS[name], crew)


def test_a_fit_is_what_it_prints():
    fit = Fit("pair", "mixed", 4, clip=("norm", 0.3), runtime={"devices": 2})
    assert eval(repr(fit)) == fit
    assert f'"{fit!r}"' in fit.command


def test_wrong_numbers_are_noticed(crew, monkeypatch):
    """By the first of them."""
    monkeypatch.setattr(Fit, "by_the_event_loop", property(lambda fit: Fit(optimizer="momentum")))
    with pytest.raises(AssertionError, match="epoch 0, batch .* off by .* from the event loop"):
        check(Fit(runtime={"workers": 2}), crew)
