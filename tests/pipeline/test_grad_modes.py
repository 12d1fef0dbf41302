"""In whatever mode of autograd a pipeline is called, it does the same; what cannot be is refused with a cure."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipeback
from tests.helpers.choice import diagonal
from tests.laws.cases import data, network, weights

MODES = {"no grad": torch.no_grad, "inference mode": torch.inference_mode}
RUNTIMES = [{}, {"workers": 2}, {"store": "host"}, {"vectorize": True}]


class Followed(nn.Module):
    """It changes its input in place."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        x += 1
        return self.c(x + torch.relu(self.b(self.a(x).tanh())))


def built(kind, **options):
    made = network(4) if kind == "sequence" else Followed()
    more = {} if kind == "sequence" else {"example": data(1)[0][0], "stages": "layer"}
    sgd = lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9)  # noqa: E731
    return pipeback.Pipeline(made, loss=mse_loss, optimizer=sgd, method="pb", **more, **options)


def calls(pipe, x, y):
    """Every call but push."""
    pipe.wait()
    found = [pipe.evaluate(x), pipe.evaluate(x, y), pipe.run(x)]
    pipe.memory(), pipe.model, list(pipe.values())
    state = pipe.state_dict()
    pipe.load_state_dict(state)
    return [*found, pipe.state_dict()]


@pytest.mark.parametrize(("mode", "kind", "options"), diagonal(MODES, ["sequence", "followed"], RUNTIMES), ids=str)
def test_calls_in_between(mode, kind, options):
    found = []
    for context in (torch.enable_grad, MODES[mode]):
        pipe, told = built(kind, **options), []
        for n, (x, y) in enumerate(data(12)):
            if n in (3, 8):
                with context():
                    told.append(calls(pipe, x.clone(), y.clone()))
            if n == 10:
                with context():
                    pipe.drain()
            told.append(pipe.push(x, y).clone())
        pipe.load_state_dict(told[3][-1])
        told.append(pipe.push(*data(1)[0]).clone())
        found.append([*(t for t in told if isinstance(t, torch.Tensor)), *told[3][:3], *told[9][:3], weights(pipe)])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("options", [{}, {"workers": 2}], ids=str)
@pytest.mark.parametrize("kind", ["sequence", "followed"])
def test_tensors_of_inference_mode(kind, options):
    pipe = built(kind, **options)
    (x, y), (more_x, more_y) = data(2)
    pipe.push(x, y)
    with torch.inference_mode():
        odd_x, odd_y = more_x.clone(), more_y.clone()
        assert torch.equal(pipe.evaluate(odd_x.clone()), pipe.evaluate(more_x.clone()))
        with pytest.raises(RuntimeError, match=r"call it outside torch.inference_mode\(\)"):
            pipe.push(x, y)
    for given in ((odd_x, more_y), (more_x, odd_y), (more_x, {"y": odd_y})):
        with pytest.raises(
            ValueError, match=r"push got tensors of inference mode, of which autograd keeps.*push a clone\(\) of each"
        ):
            pipe.push(*given)
    pipe.push(odd_x.clone(), odd_y.clone())  # the cure
    pipe.drain()


@pytest.mark.parametrize("kind", ["sequence", "followed"])
@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_pipeline_is_not_copied(how, kind):
    pipe, other = built(kind), built(kind)
    for x, y in data(3):
        pipe.push(x, y)
    with pytest.raises(
        TypeError, match=r"a Pipeline is not copied or pickled.*pipe.state_dict\(\).* load it into a new Pipeline"
    ):
        how(pipe)
    other.load_state_dict(pipe.state_dict())  # the cure
    assert torch.equal(pipe.push(x, y), other.push(x, y))
