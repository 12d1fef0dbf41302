"""Law: weights that are frozen and trained again between the pushes of one update get gradients of the micro-batches
that come while they are trained, and no others.
"""

import pytest
import torch

import pipeback
from tests.laws.cases import OPTIMIZERS, data, network, pipeline, weights

ALL = ({2: False, 5: True}, {1: False, 3: True}, {0: False, 3: True})  # at which push a stage is set


def plain(needs):
    """A plain loop over four micro-batches per update, which come in two pushes."""
    model = network(3, dtype=torch.float64)
    opt = OPTIMIZERS["momentum"](model.parameters())
    for i, (x, y) in enumerate(data(8, samples=4, dtype=torch.float64)):
        model[2].requires_grad_(needs.get(i, model[2][0].weight.requires_grad))
        for a, b in zip(x.split(2), y.split(2), strict=True):
            (torch.nn.functional.mse_loss(model(a), b) / 4).backward()
        if i % 2:
            opt.step()
            opt.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def trained(name, stages, needs, **options):
    model = network(stages, dtype=torch.float64)
    method = pipeback.methods.create(name, micro_batches=4)
    pipe = pipeline(model, method, "momentum", micro_batch_size=2, **options)
    for i, (x, y) in enumerate(data(8, samples=4, dtype=torch.float64)):
        pipe.wait()
        model[2].requires_grad_(needs.get(i, model[2][0].weight.requires_grad))
        pipe.push(x, y)
    pipe.drain()
    found = weights(pipe)
    pipe.close()
    return found


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"vectorize": True}], ids=str)
def test_weights_of_the_last_stage_as_in_a_plain_loop(options):
    for needs in ALL:
        found = trained("one_f_one_b", 3, needs, **options)
        torch.testing.assert_close(found, plain(needs), rtol=0, atol=1e-14)


@pytest.mark.parametrize("options", [{}, {"workers": 2}], ids=str)
@pytest.mark.parametrize("name", ["zb_h1", "zb_v"])
def test_a_backward_in_two_parts_is_that_of_a_whole_one(name, options):
    for needs in ALL:
        assert torch.equal(trained(name, 4, needs, **options), trained("one_f_one_b", 4, needs))
