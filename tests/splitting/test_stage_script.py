"""The text that a stage of a followed model runs: what it says, what it lets go, how it is copied and compared."""

import copy
import gc
import math
import pickle
import traceback
import weakref

import pytest
import torch
from torch import Tensor, nn

from pipeback.splitting import stage_script as scripts
from pipeback.splitting.script_values import without_gradient
from pipeback.splitting.split import split_model
from pipeback.splitting.stage_script import Script


def times(factor, module=None):
    script = Script()
    x = script.take()
    y = script.call(Tensor.mul, (x, factor))
    return script.end([script.call(script.part("layer", module), (y,)) if module is not None else y])


@pytest.mark.parametrize("value", [
    3, True, None, -2.5, math.inf, 1j, "it's", b"x", ..., torch.float16, torch.Size([2, 3]), slice(1, None), range(3),
    [1, (2,), {"a": (), 3: [None]}], slice(torch.float16),
])  # fmt: skip
def test_what_is_given_arrives(value):
    script, seen = Script(), []
    script.call(seen.append, (value,))
    script.call(lambda **more: seen.append(more), (), {"key": value, "class": value, "two words": value})
    assert script.end([]).function() == ()
    assert seen == [value, {"key": value, "class": value, "two words": value}]
    assert [type(part) for part in seen] == [type(value), dict]


def test_what_can_be_changed_is_made_anew_for_every_call():
    script, seen = Script(), []
    script.call(seen.append, ([1, {}],))
    script.end([])
    script.function(), script.function()
    assert seen[0] is not seen[1] and seen[0][1] is not seen[1][1]


def test_values_are_let_go_where_they_are_needed_last():
    script, alive = Script(), []
    x = script.take()
    y = script.call(Tensor.add, (x, 1))
    script.call(lambda y: alive.append(weakref.ref(y)), (y,))
    used, unused = script.unpack(lambda y: [y * 1, y * 2], (y,), 2)
    z = script.call(Tensor.sub, (used, 0))
    script.call(lambda: (gc.collect(), alive.append(alive[0]() is None)), ())
    script.end([z])
    assert torch.equal(script.function(torch.ones(2))[0], torch.full((2,), 2.0)) and alive[1]
    assert f"{unused.text} = None" in script.source


def test_blocks_that_are_alike_are_compiled_once():
    scripts._compiled.cache_clear()
    found = [times(2, nn.Linear(2, 2)) for _ in range(5)]
    assert scripts._compiled.cache_info().misses == 1
    assert len({script.function.__code__.co_code for script in found}) == 1
    assert len({id(script.function.__code__) for script in found}) == 5  # torch.compile counts by code
    assert "self.layer(v1)" in found[0].code()


def test_a_copy_has_modules_of_its_own_and_the_functions():
    layer = nn.Linear(2, 2)
    script = times(2, layer)
    copied, own = copy.deepcopy((script, layer))
    assert copied.held["m_0"] is own and copied.others["mul_0"] is script.others["mul_0"]
    with torch.no_grad():
        own.weight.zero_(), own.bias.fill_(7)
    assert torch.equal(copied.function(torch.ones(2))[0], torch.full((2,), 7.0))
    assert torch.equal(script.function(torch.ones(2))[0], layer(2 * torch.ones(2)))
    again = pickle.loads(pickle.dumps(script))
    assert torch.equal(again.function(torch.ones(2))[0], layer(2 * torch.ones(2)))


def test_scripts_are_the_same_where_they_do_the_same():
    layer = nn.Linear(2, 2)
    assert times(2, layer).does(times(2, layer))
    assert times(torch.float16).does(times(torch.float16))
    assert not times(2).does(times(3)) and not times(torch.float16).does(times(torch.float32))
    assert not times(2, layer).does(times(2, nn.Linear(2, 2)))


def test_functions_under_no_grad_are_told_apart():
    def ungraded(function):
        script = Script()
        return script.end([script.call(without_gradient, (function, script.take()))])

    assert ungraded(torch.relu).does(ungraded(torch.relu))
    assert not ungraded(torch.relu).does(ungraded(torch.tanh))


def test_an_error_shows_its_line():
    script = times("no number")
    with pytest.raises(TypeError) as caught:
        script.function(torch.ones(2))
    assert "v1 = mul_0(x0, 'no number')" in "".join(traceback.format_exception(caught.value))


def test_a_device_is_asked_for_once():
    class Made(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            x = self.a(x + torch.ones(3, device=x.device))
            return self.b(x) + torch.ones(3, device=x.device) + torch.zeros(3, device=x.device)

    codes = [part.module.__script__() for part in split_model(Made(), "layer", torch.randn(2, 3)).parts]
    assert [code.count("'device'") for code in codes] == [1, 1], codes
