"""The modules and tensors of a model by their names are those that torch's own functions give, in the same order."""

import pytest
import torch
from torch import nn

from pipeback.splitting.module_walk import beside, held, identical, walked


class Renamed(nn.Module):
    """Names its modules itself."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        yield from self.inner.named_modules(memo, prefix, remove_duplicate)


class Shared(nn.Module):
    """The same module twice, the same weight twice, names without a module or a tensor, and one in a list."""

    def __init__(self):
        super().__init__()
        self.a = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)))
        self.b, self.missing = self.a[1], None
        self.register_module("none", None)
        self.tied = nn.Linear(2, 2)
        self.tied.weight = self.a[0].weight
        self.own, self.plain = nn.Parameter(torch.zeros(2)), torch.zeros(3)


@pytest.mark.parametrize("make", [lambda: nn.Linear(2, 2), Shared, Renamed, lambda: nn.Sequential(Renamed(), Shared())])
def test_names_are_those_that_torch_gives(make):
    model = make()
    modules = walked(model)
    assert list(modules.items()) == list(model.named_modules())
    for found, expected in ((held(modules, "_parameters"), model.named_parameters()),
                            (held(modules, "_buffers"), model.named_buffers())):  # fmt: skip
        assert [(name, id(tensor)) for name, tensor in found] == [(name, id(tensor)) for name, tensor in expected]


def test_tensors_in_plain_attributes():
    model = nn.Sequential(Shared())
    assert beside(walked(model)) == {id(model[0].plain): "0.plain"}


def test_attributes_are_identical_by_name_order_and_value():
    value, other = [1], [1]
    assert identical({"a": value, "b": 2}, {"a": value, "b": 2})
    for changed in ({"a": other, "b": 2}, {"b": 2, "a": value}, {"c": value, "b": 2}, {"a": value}, {}):
        assert not identical({"a": value, "b": 2}, changed)
