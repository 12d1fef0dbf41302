"""Sparsity policies by their names alone."""

import re
import warnings

import pytest
import torch
from torch.nn.functional import mse_loss

import pipeback
from pipeback import sparsities
from tests.laws.cases import data, network


def trained(streaming):
    pipe = pipeback.Pipeline(
        network(3),
        loss=mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
        method="pb",
        store=streaming,
    )
    for x, y in data(8):
        pipe.push(x, y)
    pipe.drain()
    weights = torch.cat([p.detach().flatten() for p in pipe.model.parameters()])
    pipe.close()
    return weights


@pytest.mark.parametrize(("name", "values"), [("rigl", "until=3000, every=100"), ("gradual", "steps=30, every=100")])
def test_a_name_says_what_it_was_given(name, values):
    with pytest.warns(UserWarning, match=f"sparsity='{name}' is taken with {values}, .* of 4000 updates") as said:
        found = trained(pipeback.Streaming(sparsity=name))
    assert len(said) == 1
    (cure,) = re.findall(r"set it by store=(.*\)\))", str(said[0].message))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(found, trained(eval(cure, {"pipeback": pipeback})))


@pytest.mark.parametrize("name", sparsities.available())
def test_values_for_trainings_of_any_length(name):
    for updates in (1, 2, 10, 100, 1000, 25_000):
        policy = sparsities.create(name, **sparsities.derived(name, updates))
        last = max((t for t in range(updates + 1) if policy.due(t)), default=None)
        if name == "gradual":
            assert last is not None and policy.density_at(last, 0.1) == pytest.approx(0.1)
            assert last <= max(1, 0.75 * updates)
        if name == "rigl" and updates >= 10:
            assert last is not None and 0.5 * updates <= last < 0.75 * updates
