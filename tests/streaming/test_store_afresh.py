"""Stages that save functions of their weights, and expanded buffers, in a store: states and copies are exact."""

import pytest
import torch
from torch import nn

import pipeback
from tests.laws.cases import data, pipeline, weights


def normed():
    torch.manual_seed(0)
    made = [nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)) for _ in range(4)]
    return nn.Sequential(*[nn.Sequential(layer, nn.Tanh()) for layer in made])


def pushed(pipe, seed):
    for x, y in data(6, seed=seed):
        pipe.push(x, y)
    return pipe


@pytest.mark.parametrize("store", ["host", "disk"])
@pytest.mark.parametrize("method", ["pb", "cerebras"])
def test_a_state_in_flight(store, method, tmp_path):
    plain = pushed(pushed(pipeline(normed(), method), 1), 2)
    home = [store if store == "host" else f"disk:{tmp_path / name}" for name in ("first", "second")]
    first = pushed(pipeline(normed(), method, store=home[0]), 1)
    state = first.state_dict()
    again = pipeline(normed(), method, store=home[1])
    again.load_state_dict(state)
    assert torch.equal(weights(pushed(again, 2)), weights(plain))
    assert torch.equal(weights(pushed(first, 2)), weights(plain))


def test_a_version_in_flight(tmp_path):
    plain = pushed(pushed(pipeline(normed(), "pb"), 1), 2)
    first = pushed(pipeline(normed(), "pb", store=f"disk:{tmp_path}"), 1)
    first.commit()
    first.close()
    again = pipeline(normed(), "pb", store=f"disk:{tmp_path}")
    assert again.arrived == 6
    assert torch.equal(weights(pushed(again, 2)), weights(plain))


@pytest.mark.parametrize("options", [{"store": "disk"}, {"store": pipeback.Streaming(sparsity="magnitude")}], ids=str)
def test_a_copy_of_a_model_with_an_expanded_buffer(options, tmp_path):
    if "store" in options:
        options = {"store": f"disk:{tmp_path}"}
    else:
        options = {"store": pipeback.Streaming(sparsity=pipeback.sparsities.create("magnitude", density=0.5))}
    model = normed()
    model[1].register_buffer("mask", torch.ones(1, 6).expand(3, 6))
    pipe = pushed(pipeline(model, "pb", **options), 1)
    assert torch.equal(pipe.model[1].mask, torch.ones(3, 6))
