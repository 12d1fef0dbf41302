"""A state that is unlike the pipeline is refused before anything changes, and goes on where the cure says so."""

import pytest
import torch

from tests.laws.cases import OPTIMIZERS, data, network, pipeline, weights


def decaying(first):
    """Two groups: weights of `first` dimensions, and the others. Only matrices decay."""

    def optimizer(params):
        params = list(params)
        some = [[p for p in params if (p.ndim == first) == same] for same in (True, False)]
        return torch.optim.SGD(
            [{"params": each, "weight_decay": 0.1 * (each[0].ndim == 2)} for each in some], lr=0.01, momentum=0.9
        )

    return optimizer


def built(optimizer=None, half=False):
    model = network(4, dtype=torch.bfloat16 if half else torch.float32)
    return pipeline(model, "pb", masters=half, **({} if optimizer is None else {"optimizer": optimizer}))


def pushed(pipe, half=False, seed=1):
    for x, y in data(6, dtype=torch.bfloat16 if half else torch.float32, seed=seed):
        pipe.push(x, y)
    return pipe


def test_groups_of_other_weights(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "matrices first", decaying(2))
    monkeypatch.setitem(OPTIMIZERS, "vectors first", decaying(1))
    here, other, again = built("matrices first"), built("vectors first"), built("matrices first")
    state = pushed(here).state_dict()
    before = weights(pushed(other, seed=2))
    with pytest.raises(ValueError, match=r"stage 0 \(0\): the optimizer's parameter groups have other weights"):
        other.load_state_dict(state)
    assert torch.equal(weights(other), before)
    pushed(other)  # it goes on
    again.load_state_dict(state)
    assert torch.equal(weights(pushed(again)), weights(pushed(here)))
    for plain in state["plain"]["stages"]:
        del plain["members"], plain["types"]  # as older versions have written it
    built("matrices first").load_state_dict(state)


@pytest.mark.parametrize("half", [False, True])
def test_micro_batches_in_flight_of_another_type(half):
    here, other = pushed(built(half=half), half), pushed(built(half=not half), not half, seed=2)
    before = weights(other)
    with pytest.raises(ValueError, match=r"stage 0 \(0\): its micro-batches in flight were computed with weights of"):
        other.load_state_dict(here.state_dict())
    assert torch.equal(weights(other), before)
    here.drain()  # the cure
    other.load_state_dict(here.state_dict())
    pushed(other, not half)
