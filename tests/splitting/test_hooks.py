"""Hooks on any module, and a forward that is set on one, count as in a plain loop, or are refused with a cure."""

import copy
import re
import warnings
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipeback
from tests.helpers.choice import mostly_rare


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.l, self.m = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return x + self.m(torch.relu(self.l(x)))


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks, self.last = nn.Linear(4, 4), nn.ModuleList(Block() for _ in range(3)), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def sequence():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Block(), nn.Sequential(Block(), nn.Tanh()), nn.Linear(4, 4))


def _set(module):
    before = module.forward
    module.forward = lambda x: before(x) * 1.5


FORWARD = {
    "hook": lambda m: m.register_forward_hook(lambda module, given, output: output * 1.5),
    "pre-hook": lambda m: m.register_forward_pre_hook(lambda module, given: (given[0] * 1.5,)),
    "forward": _set,
}
GRADIENTS = {
    "hook": lambda m: m.register_full_backward_hook(
        lambda module, gi, go: tuple(g if g is None else g * 2 for g in gi)
    ),
    "pre-hook": lambda m: m.register_full_backward_pre_hook(lambda module, go: tuple(g * 2 for g in go)),
}
PLACES = {"model": lambda m: m, "block": lambda m: m.blocks[1], "layer": lambda m: m.blocks[1].l}
DATA = list(zip(*torch.randn(2, 7, 5, 4, generator=torch.Generator().manual_seed(1)), strict=True))


def sgd(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def built(model, **options):
    given = {"stages": "layer", "example": DATA[0][0], "method": "sgd", **options}
    return pipeback.Pipeline(model, loss=mse_loss, optimizer=sgd, **given)


def equals_plain(model, change=lambda model: None, at=0, **options):
    """Change both, the model and a copy, before push `at`; 0: before the pipeline is built."""
    plain = copy.deepcopy(model)
    optimizer = sgd(plain.parameters())
    if not at:
        change(model), change(plain)
    pipe = built(model, **options)
    for n, (x, y) in enumerate(DATA):
        if n and n == at:
            change(model), change(plain)
        loss = mse_loss(plain(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert torch.equal(pipe.push(x, y), loss.detach())
    assert all(map(torch.equal, pipe.model.parameters(), plain.parameters()))
    return pipe


USUAL = [
    ("hook", "model", 0, "layer"), ("hook", "block", 3, "block"), ("pre-hook", "layer", 3, 3),
    ("pre-hook", "model", 3, "layer"), ("forward", "block", 0, 3), ("forward", "layer", 3, "layer"),
]  # fmt: skip
EVERY = list(product(FORWARD, PLACES, [0, 3], ["layer", "block", 3]))


@pytest.mark.parametrize(("kind", "place", "at", "stages"), mostly_rare(EVERY, *USUAL))
def test_around_a_forward(kind, place, at, stages):
    equals_plain(Blocks(), lambda model: FORWARD[kind](PLACES[place](model)), at, stages=stages)


def test_a_hook_that_is_removed_again():
    handles = []

    def change(model):
        handles.append(FORWARD["hook"](model.blocks[1]))

    model = Blocks()
    equals_plain(model, change, 2)
    pipe = built(model)
    handles[0].remove()
    plain = copy.deepcopy(model)
    assert torch.equal(pipe.push(*DATA[0]), mse_loss(plain(DATA[0][0]), DATA[0][1]))


@pytest.mark.parametrize("kind", GRADIENTS)
def test_on_the_gradients_of_a_block_that_is_kept_whole_for_it(kind):
    with pytest.warns(UserWarning, match=r"Block 'blocks.1' has hooks on its gradients.*leaves=\['blocks.1'\]\) says"):
        pipe = equals_plain(Blocks(), lambda model: GRADIENTS[kind](model.blocks[1]))
    assert pipe.stages == 7
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the cure
        equals_plain(
            Blocks(), lambda model: GRADIENTS[kind](model.blocks[1]),
            stages=pipeback.Splitting("layer", leaves=["blocks.1"]),
        )  # fmt: skip
        equals_plain(Blocks(), lambda model: GRADIENTS[kind](model.blocks[1]), stages="block")
        equals_plain(Blocks(), lambda model: GRADIENTS[kind](model.blocks[1].l), at=3)


@pytest.mark.parametrize("kind", GRADIENTS)
def test_on_the_gradients_of_the_model(kind):
    model = Blocks()
    GRADIENTS[kind](model)
    with pytest.raises(ValueError, match=r"the model \(Blocks\) has hooks on its gradients") as told:
        built(model)
    cure = re.search(r"stages=(pipeback.*\))", str(told.value)).group(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is one stage
        equals_plain(Blocks(), GRADIENTS[kind], stages=eval(cure))


@pytest.mark.parametrize("place", ["model", "block"])
def test_on_the_gradients_between_pushes(place):
    model = Blocks()
    pipe = built(model)
    pipe.push(*DATA[0])
    handle = GRADIENTS["hook"](PLACES[place](model))
    with pytest.raises(ValueError, match="has got hooks on its gradients after the pipeline was built"):
        pipe.push(*DATA[1])
    handle.remove()
    pipe.push(*DATA[1])  # nothing has happened


@pytest.mark.parametrize("kind", FORWARD)
def test_around_a_sequence_the_forward_is_traced(kind):
    model = sequence()
    FORWARD[kind](model)
    with pytest.raises(TypeError, match=r"Sequential: .*which a sequence of stages would not run.* give example="):
        built(model, stages="auto", example=None)
    pipe = equals_plain(sequence(), FORWARD[kind], stages="auto")
    assert pipe.stages == 4


def _more(model):
    model.append(nn.Linear(4, 4))


@pytest.mark.parametrize("change", [*FORWARD.values(), GRADIENTS["hook"], _more])
def test_around_a_sequence_between_pushes(change):
    model = sequence()
    pipe = built(model, stages="auto", example=None)
    pipe.push(*DATA[0])
    change(model)
    with pytest.raises(RuntimeError, match="modules were added to the model, hooks .* build a new Pipeline"):
        pipe.push(*DATA[1])


def test_more_blocks_between_pushes():
    model = Blocks()
    pipe = built(model)
    pipe.push(*DATA[0])
    model.blocks.append(Block())
    with pytest.raises(ValueError, match=r"blocks.3"):
        pipe.push(*DATA[1])


def test_declared_stages():
    class Declared(Blocks):
        def pipeline_stages(self):
            return [self.first, *self.blocks, self.last]

    model = Declared()
    FORWARD["hook"](model)
    with pytest.raises(
        ValueError, match=r'Declared: it has hooks, .*pipeline_stages\(\).* stages="layer" and example='
    ):
        built(model, stages="auto", example=None)
    equals_plain(Declared(), FORWARD["hook"], stages="layer")
