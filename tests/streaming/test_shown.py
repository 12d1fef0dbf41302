"""What is read and written within `Pipeline.shown` and `Pipeline.present`, where weights live in a store."""

import pytest
import torch

from pipeback.streaming import disk_store
from tests.laws.cases import data, network, pipeline, weights


@pytest.fixture(params=["host", "disk"])
def store(request, tmp_path, monkeypatch):
    monkeypatch.setattr(disk_store, "SMALL", 1)
    return "host" if request.param == "host" else f"disk:{tmp_path}"


def trained(store=None, method="gpipe", pushes=3, **options):
    pipe = pipeline(network().double(), method, store=store, **options)
    go_on(pipe, 0, pushes)
    return pipe


def go_on(pipe, first, last):
    for x, y in data(last)[first:]:
        pipe.push(x.double(), y.double())


def halve(pipe):
    with torch.no_grad():
        for p in pipe._engine.model.parameters():
            p.mul_(0.5)


@pytest.mark.parametrize("method", ["gpipe", "pb"])
def test_what_was_written_before_an_error_is_kept(method, store):
    pipe, wanted = trained(store, method), trained(None, method)
    with pytest.raises(KeyError), pipe.shown(changes=True):
        halve(pipe)
        raise KeyError("of the user")
    wanted.wait()
    halve(wanted)
    for each in (pipe, wanted):
        go_on(each, 3, 6)
    assert torch.equal(weights(pipe), weights(wanted))
    pipe.close()


def test_without_changes_an_error_keeps_nothing_on_disk(tmp_path):
    pipe, wanted = trained(f"disk:{tmp_path}"), trained()
    with pytest.raises(KeyError), pipe.shown():
        halve(pipe)
        raise KeyError("of the user")
    for each in (pipe, wanted):
        go_on(each, 3, 6)
    assert torch.equal(weights(pipe), weights(wanted))
    pipe.close()


def test_changes_of_a_context_within_another_are_kept(store):
    pipe, wanted = trained(store), trained()
    with pipe.shown(), pipe.shown(changes=True):
        halve(pipe)
    halve(wanted)
    for each in (pipe, wanted):
        go_on(each, 3, 6)
    assert torch.equal(weights(pipe), weights(wanted))
    pipe.close()


def test_a_pipeline_may_be_closed_while_weights_are_shown(store):
    pipe = trained(store)
    with pipe.shown(changes=True):
        pipe.close()
