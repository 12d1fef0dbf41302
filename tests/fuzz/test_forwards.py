"""Law: whatever a forward is made of, a pipeline without delays trains as plain PyTorch does, to the bit, and all
runtimes train alike.
"""

import pytest

from tests.helpers.choice import rare

from .forwards.check import check
from .forwards.draw import forwards
from .forwards.faults import FAULTS
from .forwards.forward import Forward
from .search import fresh, search_for


@pytest.mark.parametrize(("number", "count"), [(1, 10), *(rare(seed, 100) for seed in (2, 3, 5, 7))])
def test_forwards(number, count):
    search_for(forwards(), check, number, count)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_new_forwards():
    """A quarter of an hour; a failure says which command replays it."""
    for number in fresh(900, 100, "forwards"):
        search_for(forwards(), check, number, 100)


@pytest.mark.parametrize("name", FAULTS)
def test_faults_that_were_found(name):
    check(FAULTS[name])


def test_a_forward_is_what_it_prints():
    forward = Forward(("gru",), ((0, 1, True), ("relu", 0, False)), stages=2, runtime={"workers": 2})
    assert eval(repr(forward)) == forward
    assert f'"{forward!r}"' in forward.command


def test_wrong_numbers_are_noticed(monkeypatch):
    kept = Forward.plainly
    monkeypatch.setattr(Forward, "plainly", lambda one: [(at, value * (1 + 1e-6)) for at, value in kept(one)])
    with pytest.raises(AssertionError, match="call push 0: off by .* from the bits of plain training"):
        check(Forward(("linear",), ((0, 0, False),), method="sgd"))
