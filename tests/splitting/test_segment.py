"""Segment: structures that cross boundaries are opened fast, and refused where they are not what they were."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from pipeback import Pipeline
from pipeback.splitting.call_outputs import opener
from pipeback.splitting.tracer import opened

A, B, C = torch.zeros(1), torch.ones(2), torch.ones(3)


@pytest.mark.parametrize("value", [
    A, (A, B), [A, B], {"a": A, "b": (B, [C, None])}, (A, 3, "word", True, None), ((), {}, A),
], ids=str)  # fmt: skip
def test_the_fast_way_finds_what_the_slow_one_does(value):
    tensors, form = opened(value)
    found = []
    assert opener(form)(value, found) and [id(t) for t in found] == [id(t) for t in tensors]


@pytest.mark.parametrize("value, other", [
    ((A, B), [A, B]), ((A, B), (A, B, C)), ((A, 3), (A, 4)), ((A, 3), (A, B)), ((A, B), (A, 3)),
    ({"a": A, "b": B}, {"b": B, "a": A}), ({"a": A}, {"b": A}), ({"a": [A]}, {"a": A}), (A, None),
], ids=str)  # fmt: skip
def test_another_structure_is_left_to_the_slow_way(value, other):
    assert not opener(opened(value)[1])(other, [])


def test_other_containers_are_left_to_the_slow_way():
    assert opener(opened(torch.return_types.max((A, B)))[1]) is None


class Fickle(nn.Module):
    """A block that gives what it is told to beside x."""

    def __init__(self):
        super().__init__()
        self.linear, self.more = nn.Linear(4, 4), "early"

    def forward(self, state):
        return {"x": self.linear(state["x"]), self.more: 1}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Fickle() for _ in range(3)), nn.Linear(4, 4)

    def forward(self, x):
        state = {"x": x}
        for block in self.blocks:
            state = block(state)
        return self.head(state["x"])


def test_another_structure_than_when_it_was_followed_is_refused():
    x = torch.randn(2, 4)
    sgd = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    model = Model()
    pipe = Pipeline(model, loss=mse_loss, optimizer=sgd, method="pb", stages="block", example=x)
    pipe.push(x, x)
    model.blocks[1].more = "late"
    with pytest.raises(Exception, match="Fickle 'blocks.1' gave another structure than when the model was traced"):
        pipe.push(x, x)


def test_replicas_have_segments_of_their_own():
    x, y = torch.randn(2, 4, 4)
    sgd = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    torch.manual_seed(0)
    model = Model()
    pipe = Pipeline(model, loss=mse_loss, optimizer=sgd, method="pb", stages="block", example=x[:2], replicas=2)
    before = [p.clone() for p in model.parameters()]
    for _ in range(6):
        pipe.push(x, y)
    pipe.drain()
    assert all(not torch.equal(a, b) for a, b in zip(before, pipe.model.parameters(), strict=True))
    pipe.close()


def test_a_copy_of_a_segment_is_not_one_of_the_model():
    class Whole(nn.Sequential):
        def __deepcopy__(self, memo):
            raise AssertionError("the model is copied")

        def forward(self, x):
            return super().forward(x)

    model = Whole(nn.Linear(3, 3), nn.Linear(3, 3), nn.Tanh())
    x = torch.randn(2, 3)
    pipe = Pipeline(model, loss=mse_loss, optimizer=torch.optim.SGD, example=x, stages="layer")
    segment = pipe.split.parts[1].module
    copied = copy.deepcopy(segment)
    assert torch.equal(copied(x), segment(x))
    assert not {id(p) for p in copied.parameters()} & {id(p) for p in model.parameters()}
