"""What a cut model computes is compared with its own forward: values, and which weights get a gradient."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipeback.splitting.forward_check import check_equal
from pipeback.splitting.module_walk import walked

X = torch.ones(2, 4)


class Model(nn.Module):
    """Two layers, something between them, and a skip connection."""

    def __init__(self, between=lambda h: h):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.between = nn.Linear(4, 4), nn.Linear(4, 4), between

    def forward(self, x):
        h = self.a(x)
        return self.b(self.between(h)), h


class Stage(nn.Module):
    def __init__(self, does):
        super().__init__()
        self.does = does

    def forward(self, x):
        return self.does(*x) if isinstance(x, tuple) else self.does(x)


def check(model, *stages):
    check_equal(walked(model), lambda: model(X), [Stage(stage) for stage in stages], X, nullcontext)


def cut(model, first=lambda h: h, second=lambda h: h):
    """Check two stages, with something at the end of the first and at the beginning of the second."""

    def begin(x):
        h = model.a(x)
        return first(h), h

    check(model, begin, lambda h, skipped: (model.b(second(h)), skipped))


def test_stages_that_do_the_same_pass():
    cut(Model())
    cut(Model(torch.Tensor.detach), first=torch.Tensor.detach)
    cut(Model(torch.Tensor.detach), second=torch.Tensor.detach)
    in_place = Model(lambda h: h.clone().mul_(2))
    check(in_place, in_place.a, lambda h: (in_place.b(h.clone().mul_(2)), h))
    writing = Model(lambda h: h)
    check(writing, lambda x: (writing.a(x), writing.a(x)), lambda h, skipped: (writing.b(h.mul_(1)), skipped))


def test_another_value_is_found():
    with pytest.raises(ValueError, match="do not give what its forward does"):
        cut(Model(), second=lambda h: 2 * h)


@pytest.mark.parametrize("place", ["first", "second"])
def test_a_weight_that_would_get_no_gradient_is_named(place):
    with pytest.raises(ValueError, match=r"the stages of Model would not give 'a\.\w+' a gradient, unlike its forward"):
        cut(Model(), **{place: torch.Tensor.detach})


def test_a_weight_that_should_get_no_gradient_is_named():
    with pytest.raises(ValueError, match=r"the stages of Model would give 'a\.\w+' a gradient, unlike its forward"):
        cut(Model(torch.Tensor.detach))


def test_outputs_are_compared_one_by_one():
    """All weights get a gradient, but from another part of the output."""
    model = Model(torch.Tensor.detach)
    with pytest.raises(ValueError, match="a gradient, unlike its forward"):
        check(model, model.a, lambda h: (model.b(h), h.detach()))


def test_frozen_weights_are_no_matter():
    model = Model()
    model.a.requires_grad_(False)
    cut(model)


def test_a_function_of_its_own_may_hide_weights():
    """A reentrant checkpoint gives gradients to weights that are no inputs of it."""
    model = Model()
    model.forward = lambda x: checkpoint(lambda x: Model.forward(model, x), x.requires_grad_(), use_reentrant=True)
    check_equal(
        walked(model), lambda: model(X.clone()), [Stage(lambda x: Model.forward(model, x))], X, nullcontext
    )  # the stages have no checkpoint
