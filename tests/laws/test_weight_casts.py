"""Law: where a stage saves casts of its weights alone, no operation is recorded, and no bit differs from recording.

The reference records every operation of every forward (`Afresh.casts` is False); tests/laws/test_afresh.py compares
that with equations in float64.
"""

import gc

import pytest
import torch
from torch import nn
from torch._C import _len_torch_dispatch_stack

import pipeback
from pipeback import methods
from pipeback.stages.recomputed_functions import Afresh
from pipeback.stages.weight_casts import cast_of
from tests.laws.cases import everything

WIDTH = 6


class Watched(nn.Module):
    """A residual block, which writes down how many dispatch modes watch it."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.norm, self.seen = inner, nn.LayerNorm(WIDTH), []

    def forward(self, x):
        self.seen.append(_len_torch_dispatch_stack())
        return x + self.inner(self.norm(x))


class Square(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)


class Convolved(nn.Conv1d):
    def __init__(self):
        super().__init__(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x):
        return super().forward(x.mT).mT


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Parts(nn.Module):
    """Casts of views of a weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / 3)

    def forward(self, x):
        up, down = self.weight.chunk(2)
        return torch.relu(nn.functional.linear(x, up)) @ down + nn.functional.linear(x, self.weight)[..., WIDTH:]


class ByHand(Square):
    """Casts by itself, without autocast."""

    def forward(self, x):
        return nn.functional.linear(x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16()).to(x.dtype)


class Scaled(Square):
    """The cast of a function of the weights, which no graph of a cast tells."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight * 0.5, self.bias)


class Doubled(Square):
    """A function of the cast."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight.bfloat16() * 2, self.bias)


TOLD = [Square, Convolved, Attention]
FURTHER = [ByHand, lambda: nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))]
OTHERS = [Scaled, Doubled, Parts]


def pipeline(kinds, method="pb", **options):
    torch.manual_seed(0)
    model = [Watched(kind()) for kind in kinds]
    sgd = lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)  # noqa: E731
    return pipeback.Pipeline(model, loss=nn.functional.mse_loss, optimizer=sgd, method=method, **options)


def pairs(count, length=3):
    generator = torch.Generator().manual_seed(1)
    draw = lambda: torch.randn(2, length, WIDTH, generator=generator)  # noqa: E731
    return [(draw(), draw()) for _ in range(count)]


def push(pipe, batches):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for x, y in batches:
            pipe.push(x, y)


def afresh(pipe):
    """What its stages call that recompute."""
    modules = {id(m) for m in pipe.model}
    return [a for a in gc.get_objects() if type(a) is Afresh and id(a.inner) in modules]


def trained(kinds, method, *, recorded, batches):
    """The state after these batches, and how many modes have watched the forwards of training."""
    pipe = pipeline(kinds, method)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pipe.plan(*batches[0])  # rehearses
    if recorded:
        for each in afresh(pipe):
            each.casts = False
    for module in pipe.model:
        module.seen.clear()
    push(pipe, batches)
    pipe.drain()
    return everything(pipe), max(max(module.seen) for module in pipe.model)


@pytest.mark.parametrize("method", ["pb", "cerebras", methods.create("pipemare", anneal=8), "msnag"], ids=str)
def test_no_bit_differs_from_recording(method):
    for kinds in ([*TOLD, Square, Square], [*FURTHER, *FURTHER]):
        found, watched = trained(kinds, method, recorded=False, batches=pairs(12))
        expected, recording = trained(kinds, method, recorded=True, batches=pairs(12))
        assert torch.equal(found, expected)
        assert (watched, recording) == (0, 1)


@pytest.mark.parametrize("other", OTHERS)
def test_anything_else_is_recorded(other):
    pipe = pipeline([*TOLD[:2], other, Square, Square])
    push(pipe, pairs(2))
    found = {type(each.inner.inner): each.casts for each in afresh(pipe)}
    assert found.pop(other) is False
    assert len(found) == 2 and all(found.values())
    assert torch.equal(*(trained([Square, other, Square], "pb", recorded=r, batches=pairs(8))[0] for r in (0, 1)))


class Longer(Square):
    """For long inputs, the cast of a function of the weights."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight * 0.5 if x.shape[1] > 4 else self.weight, self.bias)


def test_another_function_that_comes_with_another_shape():
    """It trains as it would if it had always been recorded."""
    found = []
    for recorded in (False, True):
        pipe = pipeline([Square, Longer, Square])
        push(pipe, pairs(4))
        (middle,) = (each for each in afresh(pipe) if type(each.inner.inner) is Longer)
        assert middle.casts is True
        middle.casts = not recorded
        push(pipe, pairs(4, length=5))
        assert middle.casts is False
        push(pipe, pairs(4))
        pipe.drain()
        found.append(everything(pipe))
    assert torch.equal(*found)


def test_autocast_that_ends():
    """Without casts, the same stages save their weights."""
    pipe, plain = pipeline(TOLD), pipeline(TOLD)
    push(pipe, pairs(1))
    plain.load_state_dict(pipe.state_dict())
    assert all(each.casts for each in afresh(pipe))
    for some in (pipe, plain):
        for x, y in pairs(8):
            some.push(x, y)
        some.drain()
    assert torch.equal(everything(pipe), everything(plain))


@pytest.mark.parametrize("recorded", [(False, True), (True, False), (False, False)], ids=str)
def test_states_in_flight(recorded):
    """From a state in flight, whoever saved it, the same bits. What is loaded finds out anew what its graphs tell."""
    ways, batches = [], pairs(12)
    pipe = pipeline(TOLD)
    push(pipe, batches[:1])
    for each in afresh(pipe):
        each.casts = not recorded[0]
    push(pipe, batches[1:6])
    again = pipeline(TOLD)
    again.load_state_dict(pipe.state_dict())
    if recorded[1]:
        for each in afresh(again):
            each.casts = False
    for some in (pipe, again):
        push(some, batches[6:])
        ways.append([each.casts for each in afresh(some)])
        some.drain()
    assert torch.equal(everything(pipe), everything(again))
    assert ways == [[not recorded[0]] * 2, [not recorded[1]] * 2]


@pytest.mark.parametrize("options", [{"workers": 2}, {"store": "host"}], ids=str)
def test_workers_and_a_store(options):
    found = []
    for given in ({}, options):
        pipe = pipeline([*TOLD, *FURTHER], **given)
        push(pipe, pairs(10))
        pipe.drain()
        found.append(everything(pipe))
        pipe.close()
    assert torch.equal(*found)


def test_a_cast_that_was_changed_in_place_is_none():
    weight = nn.Parameter(torch.randn(3, 2))
    known, cast, other = {id(weight): weight}, weight.bfloat16(), weight.bfloat16()
    made = cast_of(cast.mT[1:], known)
    assert torch.equal(made.make(), cast.mT[1:].detach()) and made.make().stride() == cast.mT[1:].stride()
    assert cast_of(cast, {}) is None and cast_of(cast * 1, known) is None and cast_of(weight, known) is None
    with torch.no_grad():
        other.mul_(2)
    assert cast_of(other, known) is None
