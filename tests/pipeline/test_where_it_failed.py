"""A `StageError` carries the operation, the stage and the micro-batch that have failed, in every runtime."""

import copy
import pickle

import pytest
import torch
from torch import nn

import pipeback
from tests.laws.cases import OPTIMIZERS, STAGES, data
from tests.pipeline.test_dropped import ARMED, BAD, Raises, loss

RUNTIMES = [{}, {"workers": 1}, {"workers": 2}, {"replicas": 2}, {"replicas": 2, "workers": 2}, {"store": "host"}]


def made(at=None, backward=False, debug=pipeback.Debug(stop_at_nan=False), **options):  # noqa: B008
    """Linear stages, through which large values go; at: the stage that raises for them, None: the loss raises."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 6)) for _ in range(STAGES)]
    if at is not None:
        layers[at].insert(1, Raises(backward))
    return pipeback.Pipeline(
        nn.Sequential(*layers), loss=loss, optimizer=OPTIMIZERS["momentum"], method="pb", debug=debug, **options
    )


def found(pipe, hurt, count=16):
    """The error after a bad push, which is the fifth."""
    with pytest.raises(pipeback.StageError) as caught:
        for n, (x, y) in enumerate(data(count, 4)):
            pipe.push(*(hurt if n == 4 else (x, y)))
        pipe.drain()
    return caught.value


@pytest.mark.parametrize("options", RUNTIMES, ids=str)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("at", [0, 2, STAGES - 1, None])
def test_forwards_and_backwards(options, backward, at):
    if at is None and backward:
        return  # a loss has no stage of its own
    x, y = data(1, 4, seed=9)[0]
    error = found(made(at, backward, **options), (x, y + BAD) if at is None else (x + 1e6, y))
    where = STAGES - 1 if at is None else at
    operation = "backward" if backward else "forward"
    assert (error.operation, error.stage, error.micro_batch) == (operation, where, 4)
    assert str(error).startswith(f"stage {where} ({where}), micro-batch 4: the {operation} failed: ")


class Fails(torch.optim.SGD):
    def step(self, closure=None):
        if ARMED:
            raise ValueError("no step")
        super().step(closure)


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"replicas": 2}], ids=str)
def test_updates(options):
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    pipe = pipeback.Pipeline(
        model,
        loss=nn.functional.mse_loss,
        optimizer=lambda p: Fails(p, lr=0.1),
        method="sgd",
        **options,
    )
    try:
        for n, (x, y) in enumerate(data(3, 4)):
            pipe.wait()
            if n == 2:
                ARMED.append(n)
                with pytest.raises(pipeback.StageError, match="no step") as caught:
                    pipe.push(x, y), pipe.drain()
            else:
                pipe.push(x, y)
    finally:
        ARMED.clear()
    assert (caught.value.operation, caught.value.micro_batch) == ("update", 2) and caught.value.stage in (0, 1)


@pytest.mark.parametrize("workers", [None, 2])
def test_a_loss_that_is_not_finite(workers):
    pipe = made(workers=workers, debug=pipeback.Debug(check_finite=True))
    x, y = data(1, 4)[0]
    error = found(pipe, (torch.full_like(x, float("nan")), y))
    # the last of two workers sees its own stages only
    where = 0 if workers is None else pipe.owner.index(1)
    assert (error.operation, error.stage, error.micro_batch) == ("forward", where, 4)


def test_it_can_be_copied():
    error = pipeback.StageError("told", "forward", 1, 2)
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is pipeback.StageError and str(other) == "told"
        assert (other.operation, other.stage, other.micro_batch) == ("forward", 1, 2)
