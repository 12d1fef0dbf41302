"""Graphs are traced once for all modules that are alike in everything that decides what they compute, and anew for any
other.
"""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from pipeback.vectorized.making import known_graphs, verify
from pipeback.vectorized.making.known_graphs import description
from tests.laws.as_one import S, doubles, model
from tests.laws.cases import CASES, pipeline, weights


@pytest.fixture(autouse=True)
def none_known(monkeypatch):
    monkeypatch.setattr(known_graphs, "_KNOWN", known_graphs.BoundedCache())


@pytest.fixture
def traces(monkeypatch):
    """The modules that were traced."""
    found, capture = [], verify.capture
    monkeypatch.setattr(verify, "capture", lambda module, *given: found.append(module) or capture(module, *given))
    return found


def trained(build=model, case="pb", some=None):
    pipe = pipeline(build(), CASES[case](S), vectorize=True)
    losses = [pipe.push(x, y) for x, y in some or doubles(12)]
    pipe.drain()
    return torch.stack([loss.double() for loss in losses]), weights(pipe)


def test_the_next_pipeline_traces_nothing(traces):
    wanted = trained()
    assert traces
    traces.clear()
    found = trained()
    assert not traces
    assert all(map(torch.equal, found, wanted))


def test_a_method_of_other_corrections_traces_nothing_more(traces):
    trained()
    traces.clear()
    trained(case="lwp")
    assert not traces


class Mine(nn.Module):
    """Computes with a number that no attribute of it holds."""

    by = 1.0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.by * self.linear(x))


def test_modules_of_the_users_are_traced_every_time(traces, monkeypatch):
    build = partial(model, make=Mine)
    before = trained(build)
    first = len(traces)
    monkeypatch.setattr(Mine, "by", 1.0 + 1e-6)
    after = trained(build)
    assert len(traces) > first and not torch.equal(before[1], after[1])


def block():
    return nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU(), nn.Dropout(0.0), nn.Linear(6, 6))


def other_eps(module):
    module[1].eps = 1e-3


def evaluates(module):
    module.eval()


def one_evaluates(module):
    module[3].eval()


def tanh_gelu(module):
    module[2].approximate = "tanh"


def draws(module):
    module[3].p = 0.5


def an_integer_of_the_same_value(module):
    module[3].p = 0


def a_function_of_torch(module):
    module[2].activation = nn.functional.relu


def another_layer(module):
    module[2] = nn.ReLU()


def another_order(module):
    module[2], module[3] = module[3], module[2]


def frozen(module):
    module[0].bias.requires_grad_(False)


def without_a_bias(module):
    module[0].bias = None


def one_weight_twice(module):
    module[4].weight = module[0].weight


def one_layer_twice(module):
    module[4] = module[0]


def a_number_more(module):
    module.number = 3


CHANGES = (other_eps, evaluates, one_evaluates, tanh_gelu, draws, an_integer_of_the_same_value, a_function_of_torch,
           another_layer,
           another_order, frozen, without_a_bias, one_weight_twice, one_layer_twice, a_number_more)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_decides_is_described(change):
    found, other = block(), block()
    told = description(found)
    assert told is not None and told == description(other) == description(copy.deepcopy(found))
    hash(told)
    change(found)
    assert description(found) not in (told, None)


def a_list(module):
    module.numbers = [1.0]


def a_function_of_the_users(module):
    module[2].activation = lambda x: x


def a_closure_of_torch(module):
    module.function = torch.no_grad()(nn.functional.relu)


def a_compiled_layer(module):
    module[0].compile(backend="eager")


def a_forward_of_its_own(module):
    module[0].forward = lambda x: x


def a_buffer(module):
    module.register_buffer("mean", torch.zeros(6))


def a_hook(module):
    module[0].register_forward_hook(lambda *_: None)


def a_tensor(module):
    module.by = torch.ones(6)


def a_layer_of_the_users(module):
    module[2] = Mine()


def a_parametrized_weight(module):
    nn.utils.parametrizations.weight_norm(module[0])


UNKNOWN = (a_list, a_function_of_the_users, a_closure_of_torch, a_compiled_layer, a_forward_of_its_own, a_buffer,
           a_hook, a_tensor, a_layer_of_the_users, a_parametrized_weight)  # fmt: skip


@pytest.mark.parametrize("change", UNKNOWN, ids=lambda change: change.__name__)
def test_what_nobody_can_describe_is_traced(change):
    module = block()
    change(module)
    assert description(module) is None


def test_a_class_that_was_given_another_forward(monkeypatch):
    told = description(block())
    monkeypatch.setattr(nn.GELU, "forward", lambda self, x: x)
    assert description(block()) != told


def test_another_setting_is_traced(traces):
    """Other rows, inputs of another type or shape, torch's own settings."""
    trained()
    traces.clear()
    for some in (doubles(12, samples=5), None):
        trained(some=some)
        assert bool(traces) == (some is not None)
        traces.clear()
    trained(partial(model, dtype=torch.float32), some=[(x.float(), y.float()) for x, y in doubles(12)])
    assert traces
    traces.clear()
    torch.use_deterministic_algorithms(True)
    try:
        trained()
        assert traces
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_oldest_ones_are_dropped(monkeypatch):
    monkeypatch.setattr(known_graphs, "MOST", 3)
    for width in range(2, 8):
        layer = nn.Linear(width, width)
        known_graphs.known(layer, (), lambda: lambda: None)
        known_graphs.known(layer, (1,), lambda: lambda: None)
    assert len(known_graphs._KNOWN) == 3
