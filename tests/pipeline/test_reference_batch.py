"""Rate and momentum chosen for a batch of one size, for updates of another: the rule, and training by it."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipeback
from pipeback.pipeline.reference_batch import samples_per_update
from tests.laws.cases import data, everything, network


def by_rule(rate, momentum, reference, samples):
    """The rule in float64, from what it keeps: the decay of a gradient per sample, and what it moves in the end."""
    decay = momentum ** (samples / reference)
    moved_per_sample = rate / (1 - momentum) / reference
    return moved_per_sample * samples * (1 - decay), decay


def sgd(lr, momentum):
    return lambda params: torch.optim.SGD(params, lr=lr, momentum=momentum, weight_decay=0.01)


def trained(optimizer, **options):
    pipe = pipeback.Pipeline(network(), loss=mse_loss, optimizer=optimizer, **options)
    for x, y in data(12, 4):
        pipe.push(x, y)
    pipe.wait()
    found = everything(pipe)
    pipe.close()
    return found


@pytest.mark.parametrize(("options", "samples"), [
    ({"method": "pb", "micro_batch_size": 1}, 1),
    ({"method": "cerebras", "micro_batch_size": 2}, 2),
    ({"method": "cerebras", "micro_batch_size": 1, "workers": 2}, 1),
    ({"method": "pb", "micro_batch_size": 1, "replicas": 2}, 2),
    ({"method": pipeback.methods.create("pipedream_2bw", micro_batches=6), "micro_batch_size": 2}, 12),
    ({"method": "pb", "micro_batch_size": 1, "vectorize": True}, 1),
])  # fmt: skip
def test_training_is_that_of_rates_by_the_rule(options, samples):
    lr, momentum = by_rule(0.1, 0.9, 32, samples)
    wanted = trained(sgd(lr, momentum), **options)
    found = trained(sgd(0.1, 0.9), reference_batch=32, **options)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
    exact = pipeback.scale_hyperparameters(0.1, 0.9, 32, samples)
    assert exact == pytest.approx((lr, momentum), rel=1e-12)
    assert torch.equal(found, trained(sgd(*exact), **options))


def test_a_scheduler_turns_the_scaled_rate():
    rates = []
    for optimizer, reference in ((sgd(0.1, 0.9), 8), (sgd(*pipeback.scale_hyperparameters(0.1, 0.9, 8, 2)), None)):
        pipe = pipeback.Pipeline(
            network(), loss=mse_loss, optimizer=optimizer, method="pb", micro_batch_size=2, reference_batch=reference
        )
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in pipe.optimizers]
        for x, y in data(3, 2):
            pipe.push(x, y)
            for scheduler in schedulers:
                scheduler.step()
        rates.append([group["lr"] for o in pipe.optimizers for group in o.param_groups] + everything(pipe).tolist())
    assert rates[0] == rates[1] and rates[0][0] == pytest.approx(by_rule(0.1, 0.9, 8, 2)[0] / 8)


def test_a_state_in_flight_goes_on(tmp_path):
    options = {"method": "cerebras", "micro_batch_size": 1, "reference_batch": 16}
    make = lambda: pipeback.Pipeline(network(), loss=mse_loss, optimizer=sgd(0.1, 0.9), **options)  # noqa: E731
    whole, first, second = make(), make(), make()
    for n, (x, y) in enumerate(data(8, 3)):
        whole.push(x, y)
        (first if n < 4 else second).push(x, y)
        if n == 3:
            second.load_state_dict(first.state_dict())
    assert torch.equal(everything(whole), everything(second))


def test_the_samples_of_an_update():
    gpipe, pb = pipeback.methods.create("gpipe"), pipeback.methods.create("pb")
    assert samples_per_update(None, 32, 4) == samples_per_update(gpipe, 32, 4) == 32
    assert samples_per_update(pb, 32, 4) == samples_per_update(pb, None, 4) == 4
    assert samples_per_update(pb, 2, 4) == 2 and samples_per_update(pb, None, None) is None


def adam(params):
    return torch.optim.AdamW(params, lr=0.01)


@pytest.mark.parametrize(("options", "message"), [
    ({"optimizer": adam, "micro_batch_size": 2}, "rule for SGD, but the optimizer is AdamW; leave reference_batch out"),
    ({}, "to the samples of an update, which nothing says: give it, for example micro_batch_size=32"),
    ({"method": "gpipe", "micro_batch_size": 2}, "one push, of any size: leave reference_batch out, and give a rate"),
    ({"reference_batch": 0}, "reference_batch must be a whole number of at least 1 or None, but is 0"),
    ({"reference_batch": "32"}, "reference_batch must be a whole number of at least 1 or None, but is '32'"),
    ({"loss": None}, "loss=None.*reference_batch=None"),
])  # fmt: skip
def test_refused(options, message):
    given = {"loss": mse_loss, "optimizer": sgd(0.1, 0.9), "method": "pb", "reference_batch": 32, **options}
    with pytest.raises(ValueError, match=message):
        pipeback.Pipeline(network(), **given)


def test_the_cures():
    given = {"loss": mse_loss, "optimizer": sgd(0.1, 0.9), "reference_batch": 32}
    pipeback.Pipeline(network(), **given, method="pb", micro_batch_size=32).push(*data(1, 4)[0])
    pipeback.Pipeline(
        nn.Linear(6, 6),
        **{**given, "optimizer": adam},
        method="pipedream",
        micro_batch_size=32,
        example=data(1, 4)[0][0],
    )
