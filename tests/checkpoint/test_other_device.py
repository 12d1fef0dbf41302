"""A state from another kind of device, whose random numbers are of another form; without one, as far as that goes."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pipeback.tensors import accelerators
from tests.laws.cases import data, pipeline


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 6)), nn.Linear(6, 6))
    return pipeline(model, "pb")


def trained(drains):
    """A state that says it comes from CUDA, whose generators have 16 bytes."""
    pipe = build()
    for x, y in data(4):
        pipe.push(x, y)
    if drains:
        pipe.drain()
    state = pipe.state_dict()
    for tensors, plain in zip(state["stages"], state["plain"]["stages"], strict=True):
        plain["device"] = "cuda"
        if "random" in tensors:
            tensors["random"] = tensors["random"][:16].clone()
    return state


def test_other_numbers_are_drawn_from_there_on():
    state, losses = trained(True), []
    for _ in range(2):
        pipe = build()
        with pytest.warns(UserWarning, match="stage 1.*random numbers cannot go on.*draws other ones on cpu"):
            pipe.load_state_dict(state)
        losses.append(torch.stack([pipe.push(x, y) for x, y in data(4)]))
    assert torch.isfinite(losses[0]).all()
    assert torch.equal(*losses)  # and they follow from the state


def test_in_flight_it_is_refused_before_anything_changes():
    pipe, state = build(), trained(False)
    before = {name: value.clone() for name, value in pipe.model.state_dict().items()}
    with pytest.raises(ValueError, match=r"stage 1.*drawn on cuda cannot continue on cpu; drain\(\) before state_dict"):
        pipe.load_state_dict(state)
    assert all(torch.equal(before[name], value) for name, value in pipe.model.state_dict().items())


def test_random_numbers_of_a_device_that_is_not_in_use_yet(monkeypatch):
    """CUDA makes its generators when it is first used."""
    cuda = SimpleNamespace(default_generators=())
    cuda.init = lambda: vars(cuda).update(default_generators=(torch.Generator(), torch.Generator().manual_seed(3)))
    monkeypatch.setattr(torch, "get_device_module", lambda device: cuda)
    assert accelerators.generator(torch.device("cuda:1")).initial_seed() == 3


def test_random_numbers_that_only_the_module_of_a_device_knows(monkeypatch):
    """As those of MPS."""
    mps = SimpleNamespace(get_rng_state=torch.get_rng_state, set_rng_state=torch.set_rng_state)
    monkeypatch.setattr(torch, "get_device_module", lambda device: mps)
    with accelerators.forked([torch.device("mps")]):
        drawn = torch.rand(2)
    assert torch.equal(torch.rand(2), drawn)
