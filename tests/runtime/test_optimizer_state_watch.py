"""What somebody puts into an optimizer's state counts from the next push on, for predictions and for joined steps."""

import pytest
import torch

from tests.laws.cases import data, everything, network, pipeline

CASES = [("cerebras", {}), ("cerebras", {"workers": 2}), ("cerebras", {"vectorize": True}),
         ("cerebras", {"store": "host"}), ("pb", {}), ("lwp", {}), ("spectrain", {})]  # fmt: skip


def cleared(optimizer):
    optimizer.state.clear()


def zeroed(optimizer):  # in place, which everybody who remembers the tensors sees
    for entry in optimizer.state.values():
        entry["momentum_buffer"].zero_()


def loaded(optimizer):
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})


def second(optimizer):
    entry = list(optimizer.state.values())[1]
    entry["momentum_buffer"] = torch.zeros_like(entry["momentum_buffer"])


def second_zeroed(optimizer):
    list(optimizer.state.values())[1]["momentum_buffer"].zero_()


def elsewhere(optimizer):
    for entry in optimizer.state.values():
        entry["momentum_buffer"].data = torch.zeros_like(entry["momentum_buffer"])


def trained(method, change, at=12, count=15, **options):
    pipe = pipeline(network(dtype=torch.float64), method, **options)
    for n, (x, y) in enumerate(data(count, dtype=torch.float64)):
        if n == at:
            with pipe.shown(changes=True):
                for optimizer in pipe.optimizers:
                    change(optimizer)
        pipe.push(x, y)
    found = everything(pipe)
    pipe.close()
    return found


@pytest.mark.parametrize(("method", "options"), CASES, ids=str)
def test_as_if_it_were_zeroed_in_place(method, options):
    zero = trained(method, zeroed, **options)
    assert torch.equal(trained(method, cleared, **options), zero)
    assert torch.equal(trained(method, loaded, **options), zero)
    assert torch.equal(trained(method, elsewhere, **options), zero)
    assert torch.equal(trained(method, second, **options), trained(method, second_zeroed, **options))
    assert not torch.equal(trained(method, lambda optimizer: None, **options), zero)


def test_a_velocity_that_is_there_before_the_first_push():
    found = []
    for begin in (None, 0.0, 0.5):
        pipe = pipeline(network(dtype=torch.float64), "cerebras")
        for optimizer in pipe.optimizers:
            for p in optimizer.param_groups[0]["params"] if begin is not None else ():
                optimizer.state[p]["momentum_buffer"] = torch.full_like(p, begin)
        found.append(pipe.push(*data(1, dtype=torch.float64)[0]).item())
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("vectorize", [False, True])
def test_states_of_all_stages_are_compared_in_one_pass_once_they_stay(vectorize, monkeypatch):
    """Also in a run of ticks, at whose end only stages are told how many updates they have made."""
    pairs = data(30, dtype=torch.float64)
    pipe = pipeline(network(dtype=torch.float64), "pb", vectorize=vectorize)
    for pair in pairs[:-1]:
        pipe.push(*pair)
    looked = []
    monkeypatch.setattr("pipeback.runtime.optimizer_state_watch._kept", lambda stage: looked.append(stage) or [])
    pipe.push(*pairs[-1])
    assert not looked
