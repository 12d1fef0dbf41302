"""Ranks that were given other options or data are told so, and an error that all of them raise alike ends nothing."""

import pytest
import torch
import torch.distributed as dist

import pipeback
from tests.laws.cases import data, network, pipeline


def ended_by(call):
    """The error that a call ends with, as text."""
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def other_options(name):
    options = {
        "vectorize": [{"vectorize": True}, {}],
        "sparsity": [{"store": pipeback.Streaming(sparsity=policy)} for policy in ("set", "rigl")],
        "skip_zeros": [{"store": pipeback.Streaming(sparsity="set", skip_zeros=skips)} for skips in (True, False)],
    }[name][dist.get_rank()]
    return ended_by(lambda: pipeline(network(), "pb", workers=pipeback.Processes(timeout=20.0), **options))


@pytest.mark.parametrize("name", ["vectorize", "sparsity", "skip_zeros"])
def test_options_that_differ(crew, name):
    try:
        for told in crew.ranks(2).run(other_options, name):
            assert f"rank 1 has {name} " in told and "start the same script with the same options" in told
    finally:
        crew.again()


def evaluates_other(what):
    """An evaluation of the same, and one of something that differs on a rank."""
    pipe = pipeline(network(), "pb", workers=pipeback.Processes(timeout=20.0))
    (x, y), rank = data(1)[0], dist.get_rank()
    pipe.push(x, y)
    pipe.evaluate(x), pipe.evaluate(x, y), pipe.evaluate([(x, y), (y, x)])
    if what == "order":
        return ended_by(lambda: pipe.evaluate([(x, y), (y, x)][:: 1 - 2 * rank]))
    return ended_by(lambda: pipe.evaluate(x + rank, y) if what == "x" else pipe.evaluate(x, y + rank))


@pytest.mark.parametrize("what", ["x", "y", "order"])
def test_evaluations_of_other_data(crew, what):
    try:
        for told in crew.ranks(2).run(evaluates_other, what):
            assert "every rank must call evaluate with the same data, in the same order" in told
    finally:
        crew.again()


def goes_on():
    """A push of nothing, after which others come."""
    pipe = pipeline(network(), "pb")
    (x, y), losses = data(1, samples=4)[0], []
    for n in range(3):
        losses.append(float(pipe.push(x, y)))
        if n == 1:
            assert "is empty" in ended_by(lambda: pipe.push(x[:0], y[:0]))
    pipe.close()
    return losses


def test_a_push_that_every_rank_refuses_ends_nothing(crew):
    wanted = goes_on()
    assert crew.ranks(2).run(goes_on) == [wanted, wanted]


def unlike():
    pipe = pipeline(network(), "pb")
    x, y = data(1)[0]
    pipe.push(x, y)
    first = ended_by(lambda: pipe.push(torch.ones(3, 5), y))
    return first, ended_by(lambda: pipe.push(x, y))


def test_a_micro_batch_that_one_rank_refuses_is_not_said_to_be_followed_by_others(crew):
    try:
        for first, then in crew.ranks(2).run(unlike):
            assert "nothing was trained on it" in first and "others may be pushed" not in first
            assert "load_state_dict() reopens it" in then
    finally:
        crew.again()
