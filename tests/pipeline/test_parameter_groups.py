"""Parameter groups that are changed between pushes: a pipeline goes on with them, or refuses them."""

import pytest
import torch
from torch import nn

import pipeback
from tests.laws.cases import data, network, pipeline, weights

RUNTIMES = [{}, {"vectorize": True}, {"workers": 2}, {"store": "host"}]


def in_two(params):
    groups = [{"params": [p for p in params if p.dim() > 1]}, {"params": [p for p in params if p.dim() < 2]}]
    return torch.optim.AdamW(groups, lr=0.01)


def move(a, b):
    b["params"].append(a["params"].pop())


def move_to_the_neighbour(a, b):
    b["params"].insert(0, a["params"].pop())


def remove(a, b):
    a["params"].pop()


def add(a, b):
    a["params"].append(nn.Parameter(torch.zeros(3, dtype=torch.float64)))


def twice(a, b):
    b["params"].append(a["params"][0])


CHANGES = [
    (move, "0.weight is in another one"),
    (move_to_the_neighbour, "0.weight is in another one"),
    (remove, "0.weight was taken out of the parameter groups"),
    (add, "parameters were added"),
    (twice, "parameters were added"),
]


def built(method="pb", optimizer=in_two, **options):
    model = network(5, dtype=torch.float64)
    return pipeback.Pipeline(model, loss=nn.functional.mse_loss, optimizer=optimizer, method=method, **options)


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("options", RUNTIMES, ids=str)
@pytest.mark.parametrize(("change", "said"), CHANGES, ids=[change.__name__ for change, _ in CHANGES])
def test_weights_of_groups_stay(change, said, options, begun):
    pipe, other = built(**options), built(**options)
    batches = data(8, dtype=torch.float64)
    for x, y in batches[: 6 * begun]:
        pipe.push(x, y)
        other.push(x, y)
    groups = pipe.optimizers[2].param_groups
    before = [list(group["params"]) for group in groups]
    change(*groups)
    with pytest.raises(ValueError, match=rf"stage 2 \(2\): .*{said}"):
        pipe.push(*batches[6])
    for group, params in zip(groups, before, strict=True):
        group["params"][:] = params
    for x, y in batches[6:]:
        pipe.push(x, y)
        other.push(x, y)
    pipe.drain()
    other.drain()
    assert torch.equal(weights(pipe), weights(other))
    pipe.close()
    other.close()


@pytest.mark.parametrize("options", RUNTIMES[:3], ids=str)
def test_micro_batches_in_flight_use_the_groups_of_their_push(options):
    pipe, other = built(**options), built(**options)
    for x, y in data(6, dtype=torch.float64):
        pipe.push(x, y)
        other.push(x, y)
    for one in (pipe, other):  # so that the groups are made anew amid the drain
        one.optimizers[2].param_groups[0]["lr"] = 0.02
        one.push(*data(1, dtype=torch.float64, seed=3)[0])
        one.wait()
    remove(*pipe.optimizers[2].param_groups)
    pipe.drain()
    other.drain()
    assert torch.equal(weights(pipe), weights(other))
    pipe.close()
    other.close()


@pytest.mark.parametrize("options", RUNTIMES, ids=str)
def test_the_order_within_a_group_is_free(options):
    found = []
    for turned in (False, True):
        pipe = built(optimizer=lambda params: torch.optim.AdamW(params, lr=0.01), **options)
        for n, (x, y) in enumerate(data(8, dtype=torch.float64)):
            if turned and n == 4:
                pipe.optimizers[2].param_groups[0]["params"].reverse()
            pipe.push(x, y)
        pipe.drain()
        found.append(weights(pipe))
        pipe.close()
    assert torch.equal(*found)


@pytest.mark.parametrize("options", RUNTIMES, ids=str)
@pytest.mark.parametrize("begun", [False, True])
def test_a_number_that_is_none(options, begun):
    pipe = built(**options)
    batch = data(1, dtype=torch.float64)[0]
    if begun:
        pipe.push(*batch)
    group = pipe.optimizers[2].param_groups[1]
    rate, group["lr"] = group["lr"], None
    with pytest.raises(ValueError, match=r"stage 2 \(2\): lr of its optimizer is None"):
        pipe.push(*batch)
    group["lr"] = rate
    eps = group.pop("eps")
    with pytest.raises(ValueError, match=r"stage 2 \(2\): eps of its optimizer is missing"):
        pipe.push(*batch)
    group["eps"] = eps
    pipe.push(*batch)
    pipe.close()


@pytest.mark.parametrize("options", RUNTIMES[:3], ids=str)
@pytest.mark.parametrize("method", ["cerebras", "lwp", "spectrain"])
@pytest.mark.parametrize(("key", "value"), [("nesterov", True), ("dampening", 0.5), ("momentum", 0)])
def test_options_that_a_method_refuses(method, key, value, options):
    pipe = pipeline(network(dtype=torch.float64), method, **options)
    batch = data(1, dtype=torch.float64)[0]
    pipe.push(*batch)
    group = pipe.optimizers[1].param_groups[0]
    before, group[key] = group[key], value
    with pytest.raises(ValueError, match=rf"stage 1 \(1\): {method}.*{key}={value}"):
        pipe.push(*batch)
    group[key] = before
    pipe.push(*batch)
    pipe.close()


def test_a_schedule_of_rate_and_momentum_goes_on():
    pipe = pipeline(network(), "cerebras")
    plans = [torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=12) for opt in pipe.optimizers]
    for n, (x, y) in enumerate(data(10)):
        pipe.push(x, y)
        for plan in plans:
            plan.step()
        if n == 5:
            for opt in pipe.optimizers:
                opt.param_groups[0]["lr"] = 0.0
    pipe.close()
