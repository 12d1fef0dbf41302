"""A bad batch, whoever runs the stages: of another form it is refused before anything is let in; with a bad value it is
taken back, or closes a pipeline that a state reopens."""

import pytest
import torch
from torch import nn

import pipeback
from pipeback.errors import StageError

X, Y = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 1])
RUNTIMES = [{}, {"workers": 2}, {"store": "host"}, {"vectorize": True}, {"replicas": 2}]
OTHER_FORMS = {
    "wider": (torch.randn(4, 5), Y), "doubles": (X.double(), Y), "deeper": (X[:, None].expand(4, 2, 6), Y),
    "nothing": (None, Y), "no target": (X, None), "targets of another type": (X, Y.float()),
    "more targets": (X, Y[[*range(4), 0]]),
}  # fmt: skip


def build(options):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)] + [nn.Linear(6, 3)]
    return pipeback.Pipeline(
        layers, loss=nn.functional.cross_entropy, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        method="pb", **options,
    )  # fmt: skip


def trained_on(pipe, other):
    """Equal losses of both, and equal weights at the end."""
    assert [pipe.push(X, Y).item() for _ in range(3)] == [other.push(X, Y).item() for _ in range(3)]
    pipe.drain(), other.drain()
    return all(map(torch.equal, pipe.model.parameters(), other.model.parameters()))


@pytest.mark.parametrize("options", RUNTIMES, ids=str)
def test_another_form_is_refused_before_anything_is_let_in(options):
    pipe, other = build(options), build(options)
    for _ in range(6):
        pipe.push(X, Y), other.push(X, Y)
    for x, y in OTHER_FORMS.values():
        with pytest.raises((TypeError, ValueError)):
            pipe.push(x, y)
    assert trained_on(pipe, other)


@pytest.mark.parametrize("options", RUNTIMES, ids=str)
def test_a_state_reopens_at_once_what_only_a_loss_has_told(options):
    pipe, other = build(options), build(options)
    for _ in range(6):
        pipe.push(X, Y), other.push(X, Y)
    state = pipe.state_dict()
    with pytest.raises(StageError, match=r"stage 3 .*Target \d is out of bounds"):
        float(pipe.push(X, Y + 7))
    pipe.load_state_dict(state)
    assert trained_on(pipe, other)


@pytest.mark.parametrize("options", RUNTIMES, ids=str)
def test_a_bad_value_leaves_the_state_before_it_or_closes_what_a_state_reopens(options):
    pipe, other = build(options), build(options)
    for _ in range(6):
        pipe.push(X, Y), other.push(X, Y)
    state = pipe.state_dict()
    with pytest.raises(StageError, match=r"stage 3 .*Target \d is out of bounds"):
        pipe.push(X, Y + 7)
        pipe.wait()
    if options:
        with pytest.raises(RuntimeError, match=r"closed: stage 3 .*load_state_dict\(\) reopens it with a state of"):
            pipe.push(X, Y)
        pipe.load_state_dict(state)
    assert trained_on(pipe, other)


@pytest.mark.parametrize("options", RUNTIMES, ids=str)
def test_an_input_that_requires_a_gradient_is_refused_before_anything_is_let_in(options):
    pipe, other = build(options), build(options)
    with pytest.raises(ValueError, match=r"tensor of x requires a gradient.* give x\.detach\(\)"):
        pipe.push(nn.Linear(6, 6)(X), Y)
    assert trained_on(pipe, other)


def test_an_input_of_forward_that_requires_a_gradient_is_refused():
    pipe = pipeback.Pipeline(
        [nn.Linear(6, 6), nn.Linear(6, 3)], loss=None, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), method="pb"
    )
    x = nn.Linear(6, 6)(X)
    with pytest.raises(ValueError, match=r"tensor of x requires a gradient.* give x\.detach\(\)"):
        pipe.forward(x)
    pipe.backward(torch.ones_like(pipe.forward(x.detach())))  # the cure
    pipe.step()
