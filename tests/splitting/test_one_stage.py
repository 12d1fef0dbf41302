"""Leaves that leave one stage: a warning says so, and each of its cures works as typed."""

import re
import warnings

import pytest
import torch
from torch import nn

import pipeback
from pipeback.splitting.split import split_model


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(6, 6) for _ in range(2)), nn.Linear(6, 6)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Listed()

    def forward(self, x):
        return self.inner(x).tanh()


def split(model, splitting):
    return split_model(model, splitting.stages, torch.randn(4, 6), splitting.leaves)


@pytest.mark.parametrize("cuts", ["auto", "layer"])
@pytest.mark.parametrize(("model", "path"), [(Around, "inner"), (lambda: nn.Sequential(Listed()), "0")])
def test_leaves_that_make_one_stage_say_so(model, path, cuts):
    with pytest.warns(
        UserWarning,
        match="keep 3 layers of .* whole, so that it is one stage and nothing is pipelined; keep less whole",
    ) as said:
        assert len(split(model(), pipeback.Splitting(cuts, leaves=[path])).parts) == 1
    assert len(said) == 1
    less, one = re.findall(r"stages=(pipeback\.Splitting\(.*?\]\))", str(said[0].message))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(split(model(), eval(one)).parts) == 1
        assert len(split(model(), eval(less)).parts) == 3


def test_one_stage_that_leaves_do_not_make_is_none_of_their_affair():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        split(nn.Sequential(nn.Sequential(nn.Linear(6, 6))), pipeback.Splitting(leaves=["0"]))
        split(Around(), pipeback.Splitting(leaves=[""]))
        split(Around(), pipeback.Splitting(["inner"], leaves=["inner"]))
