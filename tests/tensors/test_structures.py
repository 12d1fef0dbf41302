"""Objects that a model passes between its layers, and those that it gives: made anew for every micro-batch."""

import copy
import threading
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import pipeback
from pipeback.tensors.structures import opened


@dataclass
class Seen:
    keys: list
    scale: float = 2.0

    def add(self, key):
        self.keys.append(key)
        return self.keys[-1]


class Shares(dict):
    """A dictionary with an attribute."""

    def __init__(self):
        super().__init__()
        self.last = None


class Block(nn.Module):
    """Fills what it is handed, and looks at what the block before has put there if it is to."""

    def __init__(self, looks):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.looks = looks

    def forward(self, h, seen, shares, notes):
        before = seen.keys[-1] if self.looks and seen.keys else 0
        h = seen.add(self.inner(h)) * seen.scale + before
        shares["h"], shares.last = h * 2, h
        if isinstance(notes, list):
            notes.append(h)
        return h


@dataclass
class Output:
    logits: torch.Tensor
    seen: Seen
    name: str = "out"


class Model(nn.Module):
    def __init__(self, looks=True, depth=3):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(looks) for _ in range(depth))

    def forward(self, h):
        seen, shares, notes = Seen([]), Shares(), []
        for block in self.blocks:
            h = block(h, seen=seen, shares=shares, notes=notes)
        return Output(h + shares["h"] + shares.last + sum(notes), seen)


def loss(output, y):
    assert type(output) is Output and type(output.seen) is Seen and output.name == "out"
    return nn.functional.mse_loss(output.logits, y) + sum(key.square().mean() for key in output.seen.keys)


def pipeline(model, example, **options):
    return pipeback.Pipeline(
        model, loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), example=example,
        **{"stages": "block", "method": "sgd", **options},
    )  # fmt: skip


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, 4, generator=generator) for _ in range(3)]


@pytest.mark.parametrize("options", [{}, {"stages": "layer"}, {"workers": 2}], ids=str)
@pytest.mark.parametrize("looks", [True, False])
def test_objects_that_blocks_fill(looks, options):
    plain = Model(looks)
    pipe = pipeline(copy.deepcopy(plain), batches()[0], **options)
    assert pipe.stages == 3
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x in batches():
        wanted = loss(plain(x), 0 * x)
        assert pipe.push(x, 0 * x).item() == wanted.item()
        wanted.backward()
        optimizer.step()
        optimizer.zero_grad()
    for found, known in zip(pipe.model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found, known)
    pipe.close()


def test_what_a_block_does_not_look_at_does_not_come_to_it():
    class Narrow(Model):
        def forward(self, h):
            seen = Seen([])
            for block in self.blocks:
                h = block(h, seen, Shares(), [])
            return h

    pipe = pipeback.Pipeline(
        Narrow(looks=False), loss=nn.functional.mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        example=batches()[0], stages="block", method="sgd",
    )  # fmt: skip
    pipe.push(batches()[0], batches()[0])
    for part in pipe.split.parts[:-1]:
        assert torch.is_tensor(part.module(batches()[0]))  # not keys beside
    pipe.model.blocks[2].looks = True
    with pytest.raises(pipeback.StageError, match=r"looks at a tensor that it did not look at.*leaves="):
        pipe.push(batches()[0], batches()[0])


def test_an_object_in_two_places_is_refused():
    class Twice(Model):
        def forward(self, h):
            seen = Seen([])
            return Output(self.blocks[0](h, seen, Shares(), [seen]), seen)

    with pytest.raises(ValueError, match="object of Seen stands in two places"):
        pipeline(Twice(), batches()[0])


def test_objects_that_hold_what_nobody_can_make_anew():
    class Locked(Model):
        def forward(self, h):
            return Output(self.blocks[0](h, Seen([]), Shares(), threading.Lock()), Seen([]))

    with pytest.raises(ValueError, match="Locked.forward gives Block 'blocks.0' an object of lock, which every micro"):
        pipeline(Locked(), batches()[0])


def test_what_is_opened_is_made_as_it_was():
    shares = Shares()
    shares["a"], shares.last = torch.ones(2), Seen([torch.zeros(1)], 3.0)
    tensors, form = opened({"x": shares, "more": (1, shares["a"])})
    made = form.fill(tensors)["x"]
    assert type(made) is Shares and made is not shares and list(made) == ["a"]
    assert made["a"] is shares["a"] and made.last.keys[0] is shares.last.keys[0] and made.last.scale == 3.0


class Installs(nn.Module):
    """Exchanges a module of its own in its first forward."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, h):
        if type(self.inner) is nn.Linear:
            old, self.inner = self.inner, nn.Sequential(nn.Linear(4, 4), nn.Tanh())
            self.inner[0].weight, self.inner[0].bias = old.weight, old.bias
        return self.inner(h)


def test_modules_that_are_made_in_a_first_forward():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Installs())
    wanted = copy.deepcopy(model)(batches()[0]).detach()
    pipe = pipeback.Pipeline(
        model, loss=nn.functional.mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), example=batches()[0],
        stages="layer", method="sgd",
    )  # fmt: skip
    assert pipe.stages == 2 and torch.equal(pipe.evaluate(batches()[0]), wanted)


@pytest.mark.filterwarnings("ignore:.*use_cache=True")
@pytest.mark.parametrize(
    "name, leaves",
    [("T5ForConditionalGeneration", []), ("XLMWithLMHeadModel", []), ("GPT2LMHeadModel", ["transformer"])],
)
def test_models_of_transformers_compute_with_their_caches(name, leaves):
    """Key-value caches give their kernels other strides, which tells in the last bits."""
    pytest.importorskip("transformers")
    from pipeback.recipes import zoo
    from pipeback.recipes.foreign import build

    case = build(name)
    assert zoo.trained(case, "sgd", {"stages": pipeback.Splitting("block", leaves=leaves)}, count=3, lr=1e-2)[2] == 0
