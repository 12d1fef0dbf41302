"""`with Pipeline(...) as pipe:` closes the pipeline, however the block ends."""

import gc
import threading

import pytest
import torch

import pipeback
from tests.laws.cases import data, network, pipeline


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"replicas": 2}, {"vectorize": True}], ids=str)
def test_closed_at_the_end(options):
    gc.collect()
    before, net = threading.active_count(), network()
    with pipeline(net, "pb", **options) as pipe:
        assert isinstance(pipe, pipeback.Pipeline)
        for x, y in data(3):
            pipe.push(x[:2], y[:2])
        pipe.drain()
        assert not pipe.closed
        wanted = pipe.evaluate(x)
    assert pipe.closed
    assert threading.active_count() == before
    assert torch.equal(net.eval()(x), wanted)


def test_what_an_ended_block_says_and_its_cure():
    with pipeline(network(), "pb") as pipe:
        for x, y in data(3):
            pipe.push(x, y)
        state = pipe.state_dict()
    with pytest.raises(
        RuntimeError, match=r"its `with` block has ended, .*evaluate\(\).* inside the block; load_state"
    ):
        pipe.evaluate(x)
    with pipe:
        pipe.load_state_dict(state)
        assert pipe.arrived == 3
        pipe.evaluate(x)
    assert pipe.closed


@pytest.mark.parametrize("options", [{}, {"workers": 2}], ids=str)
@pytest.mark.parametrize("error", [ArithmeticError("mine"), KeyboardInterrupt()], ids=repr)
def test_an_exception_goes_through(options, error):
    gc.collect()
    before = threading.active_count()
    with pytest.raises(type(error)) as told, pipeline(network(), "pb", **options) as pipe:
        pipe.push(*data(1)[0])
        raise error
    assert told.value is error
    assert pipe.closed
    assert threading.active_count() == before


def test_the_error_of_a_stage_stays_the_one_that_is_told():
    def fails(*_):
        raise ArithmeticError("the flux is too high")

    net = network()
    with pytest.raises(RuntimeError, match="the flux is too high"), pipeline(net, "pb", workers=2) as pipe:
        pipe.push(*data(1)[0])
        net[2].register_forward_hook(fails)
        for x, y in data(3):
            pipe.push(x, y)
        pipe.wait()
    with pytest.raises(RuntimeError, match="the flux is too high"):
        pipe.wait()


def test_a_store_that_cannot_be_closed(tmp_path, monkeypatch):
    def full():
        raise OSError("no space left")

    pipe = pipeline(network(), "pb", store=f"disk:{tmp_path / 'a'}")
    with monkeypatch.context() as patched:
        patched.setattr(pipe._engine.holding.store, "close", full)
        with pytest.raises(ArithmeticError) as told, pipe:
            raise ArithmeticError("mine")
        assert "no space left" in told.value.__notes__[0]
        with pytest.raises(OSError, match="no space"), pipe:
            pass
    pipe.close()


def test_a_disk_store_is_free_for_the_next(tmp_path):
    for arrived in (2, 4):
        with pipeline(network(), "pb", store=f"disk:{tmp_path / 'a'}") as pipe:
            for x, y in data(arrived)[pipe.pushes :]:
                pipe.push(x, y)
            pipe.commit()
            assert pipe.arrived == arrived
