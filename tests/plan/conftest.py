"""Plans search for a short time only, and pipelines are closed when their test ends."""

import pytest

import pipeback


@pytest.fixture(autouse=True)
def a_short_search(monkeypatch):
    """For a window: it takes most of the time of a plan."""
    monkeypatch.setattr("pipeback.plan.training_plan.WORK", 2000)


@pytest.fixture(autouse=True)
def all_are_closed(monkeypatch):
    """Or their threads and tensors would be there in the tests that count such."""
    made, build = [], pipeback.Pipeline.__init__

    def noted(self, *args, **options):
        build(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(pipeback.Pipeline, "__init__", noted)
    yield
    for pipe in made:
        pipe.close()
