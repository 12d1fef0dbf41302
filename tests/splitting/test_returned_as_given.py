"""A module may return the tensor that it was given: whether it does so for each micro-batch or not, nothing differs."""

import pytest
import torch
from torch import nn

import pipeback
from tests.splitting.plain_training import equals_plain_training, pipeline

BATCHES = [torch.randn(5, 4, generator=torch.Generator().manual_seed(n)) * (n % 3 + 1) for n in range(8)]


class Around(nn.Module):
    """Uses what it gave to a module beside what it got."""

    def __init__(self, module, changes=False, twice=True):
        super().__init__()
        self.twice = twice
        torch.manual_seed(0)
        self.a, self.module, self.b, self.c = nn.Linear(4, 4), module, nn.Linear(4, 4), nn.Linear(4, 4)
        self.changes = changes

    def forward(self, x):
        x = self.a(x)
        got = self.module(x)
        got = got.add_(1.0) if self.changes else got
        return self.c(self.b(got) + x + got if self.twice else self.b(got) + x)


class Decides(nn.Module):
    """By the values that it gets."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return x if x.sum() > 0 else self.layer(x)


def kept():
    return pipeback.Splitting("layer", leaves=["module"])


@pytest.mark.parametrize("sign", [1, -1])
def test_a_module_that_does_so_now_and_then(sign):
    """The first micro-batch, by which the model is traced, is returned as it is, or is not."""
    batches = [sign * x for x in BATCHES]
    taken = {bool(Around(nn.Identity()).a(x).sum() > 0) for x in batches}
    assert taken == {False, True}
    equals_plain_training(Around(Decides(), twice=False), batches, stages=kept())


@pytest.mark.parametrize("sign", [1, -1])
def test_the_first_module_does_so(sign):
    """What it returns needs no gradient then, and needs one later."""
    torch.manual_seed(0)
    equals_plain_training(
        nn.Sequential(Decides(), nn.Linear(4, 4)), [sign * x for x in BATCHES], stages=pipeback.Splitting(leaves=["0"])
    )


def test_dropout_that_begins_later():
    """With p=0 it returns its input."""
    pipe = pipeline(Around(nn.Dropout(0.0)), BATCHES[0], stages=kept())
    x = BATCHES[0]
    pipe.push(x, torch.zeros(5, 4))
    pipe.model.module.p = 1.0
    model = pipe.model
    with torch.no_grad():
        wanted = nn.functional.mse_loss(model.c(model.b(torch.zeros(5, 4)) + model.a(x)), torch.zeros(5, 4))
    assert torch.equal(pipe.push(x, torch.zeros(5, 4)), wanted)


@pytest.mark.parametrize("module", [nn.Identity(), nn.ReLU(inplace=True), nn.Dropout(0.0), nn.Dropout1d(0.0)], ids=str)
def test_a_module_that_always_does_so(module):
    equals_plain_training(Around(module), BATCHES)


@pytest.mark.parametrize("module", [nn.Identity(), nn.Dropout(0.0)], ids=str)
def test_what_it_returns_is_changed_in_place(module):
    equals_plain_training(Around(module, changes=True), BATCHES)


class Seen:
    """What blocks hand on: a tensor, and what they have seen."""

    def __init__(self, x):
        self.x, self.trace = x, []


class Looks(nn.Module):
    """Changes the object that it is given, and returns it, alone or among others."""

    def __init__(self, pair):
        super().__init__()
        self.linear, self.pair = nn.Linear(4, 4), pair

    def forward(self, seen):
        seen.x = seen.x + self.linear(seen.x).tanh()
        seen.trace.append(seen.x.mean(0))
        return (seen, seen.x) if self.pair else seen


class Carries(nn.Module):
    def __init__(self, pair):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.pair = nn.ModuleList(nn.Sequential(Looks(pair)) for _ in range(3)), pair

    def forward(self, x):
        seen = Seen(x)
        for block in self.blocks:
            seen = block(seen)[0] if self.pair else block(seen)
        return seen.x + sum(seen.trace)


@pytest.mark.parametrize("pair", [False, True])
def test_a_changed_object(pair):
    assert equals_plain_training(Carries(pair), BATCHES, stages="block").stages == 3


class Attends(nn.Module):
    """Attention that hands its mask along, as the layers of T5 do; or a mask of its own making."""

    def __init__(self, own=False):
        super().__init__()
        self.qkv, self.scale, self.own = nn.Linear(16, 48), nn.Parameter(torch.ones(())), own

    def forward(self, h, mask):
        mask = mask * self.scale if self.own and h.sum() > 0 else mask
        q, k, v = self.qkv(h).view(2, 15, 3, 4, 4).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
        return h + attended.transpose(1, 2).flatten(2), mask


class Attention(nn.Module):
    def __init__(self, own=False):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.ModuleList(Attends(own) for _ in range(4)), nn.Linear(16, 4)

    def forward(self, x):
        h, mask = x, torch.zeros(2, 4, 15, 15).masked_fill(torch.ones(15, 15).triu(1).bool(), -1e4)
        for block in self.blocks:
            h, mask = block(h, mask)
        return self.head(h)


SENTENCES = [torch.randn(2, 15, 16, generator=torch.Generator().manual_seed(n)) for n in range(4)]


def test_a_mask_that_layers_hand_along_gets_no_gradient():
    """Attention would take other kernels, which give other last bits."""
    for splitting in ("block", "layer"):
        assert equals_plain_training(Attention(), SENTENCES, stages=splitting).stages >= 5


def test_a_mask_that_gets_a_gradient_after_all_is_not_cut_off():
    """The first micro-batch does not take the branch that makes one, and the second one does."""
    few, many = SENTENCES[0] - 3.0, SENTENCES[1] + 3.0
    pipe = pipeline(Attention(own=True), few, stages="block")
    assert pipe.push(few, torch.zeros(2, 15, 4)).isfinite()
    with pytest.raises(pipeback.StageError, match="needs_gradient gave True, but False when the model was traced") as e:
        pipe.push(many, torch.zeros(2, 15, 4))
    assert "leaves=['']" in str(e.value)
    equals_plain_training(Attention(own=True), [few, many], stages=pipeback.Splitting(leaves=[""]))
