"""A loss that is NaN is said once, and three in a row end the training, without waiting for any loss."""

import math
import warnings

import pytest
import torch
from torch.nn.functional import mse_loss

import pipeback
from pipeback.pipeline.loss_watch import AT_ONCE, LossWatch
from pipeback.runtime.lazy_loss import LazyLoss
from tests.laws.cases import OPTIMIZERS, data, network

NAN = torch.tensor(math.nan)
RUNTIMES = [{}, {"workers": 2}, {"replicas": 2}, {"vectorize": True}, {"debug": pipeback.Debug(order="skewed")}]


def trained(bad, pushes=60, **options):
    """The warnings of a training in which these pushes bring NaN in their target, and the push that raised."""
    pipe = pipeback.Pipeline(network(), loss=mse_loss, optimizer=OPTIMIZERS["momentum"], method="pb", **options)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            for n, (x, y) in enumerate(data(pushes, 4)):
                pipe.push(x, y * math.nan if n in bad else y)
                pipe.wait()
        except FloatingPointError as error:
            return [str(w.message) for w in told], n, str(error), pipe
    return [str(w.message) for w in told], None, "", pipe


@pytest.mark.parametrize("options", RUNTIMES)
def test_three_in_a_row_raise(options):
    told, at, error, pipe = trained({5}, **options)  # the weights are NaN from there on
    assert len(told) == 1 and told[0].startswith(
        "the loss of push 5 is NaN: lower the learning rate, set clip_norm=1.0"
    )
    assert 7 <= at <= 9 and error.startswith("the losses of push 5, 6 and 7 are NaN, and so are weights, probably")
    assert "debug=pipeback.Debug(stop_at_nan=False) trains on" in error
    pipe.evaluate(data(1, 4)[0][0])  # it is not closed
    pipe.close()


@pytest.mark.parametrize("options", [{}, {"workers": 2}])
def test_the_cure_trains_on(options):
    told, at, _, pipe = trained({5}, debug=pipeback.Debug(stop_at_nan=False), **options)
    assert len(told) == 1 and "in a row" not in told[0] and at is None
    pipe.close()


def test_one_and_two_are_said_once():
    watch = LossWatch(stops=True)
    with pytest.warns(UserWarning, match="the loss of push 1 is NaN.*3 in a row end the training") as told:
        for n, value in enumerate([1.0, math.nan, math.nan, 1.0, math.nan, math.nan, math.inf, math.nan]):
            watch.see(n, torch.tensor(value))
    assert len(told) == 1
    with pytest.raises(FloatingPointError, match="push 7, 8 and 9"):
        for n in (8, 9):
            watch.see(n, NAN)


def test_a_lazy_loss_is_not_waited_for():
    known, asked = [], []

    def lazy(n):
        return LazyLoss(lambda: (asked.append(n), NAN)[1], lambda: n in known)

    watch = LossWatch(stops=True)
    for n in range(4):
        watch.see(n, lazy(n))
    assert not asked
    known += [0, 2]
    with pytest.warns(UserWarning, match="push 0 is NaN"):
        watch.see(4, lazy(4))
    assert asked == [0]  # 2 stands behind 1
    known += [1]
    with pytest.raises(FloatingPointError, match="push 0, 1 and 2"):
        watch.see(5, lazy(5))
    assert asked == [0, 1, 2]


def test_losses_on_a_device_are_looked_at_together():
    device = torch.device("meta")  # a read of it would fail: nothing is read before there are enough
    watch = LossWatch(stops=True)
    for n in range(AT_ONCE - 1):
        watch.see(n, torch.empty((), device=device))


@pytest.mark.filterwarnings("ignore:the loss of push 0 is NaN")
def test_what_is_trained_again_is_looked_at_again_and_counts_once():
    watch = LossWatch(stops=True)
    watch.see(0, NAN)
    there = watch.mark()
    for _ in range(3):
        watch.see(1, NAN)
        watch.go_back(there)
    watch.see(1, NAN)
    with pytest.raises(FloatingPointError, match="push 0, 1 and 2"):
        watch.see(2, NAN)
