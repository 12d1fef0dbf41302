"""Law: what changes a view in place trains on after a resume in flight as if nothing had been saved, bit for bit.

torch hides the node of such a change, and what that saved, in one that shows nothing.
"""

from itertools import product

import pytest
import torch
from torch import nn

import pipeback
from tests.helpers.choice import mostly_rare
from tests.laws.cases import OPTIMIZERS, everything

WIDTH, LENGTH = 6, 4


def flat(y):
    return y.view(-1, WIDTH)  # so that a view is changed on every version of torch, whatever its Linear returns


def added(layer, x):
    y = layer.a(x)
    flat(y).add_(flat(torch.tanh(x)))
    y += x
    return layer.b(y)


def multiplied(layer, x):
    y = layer.a(x)
    flat(y).mul_(torch.tanh(x).reshape(-1, WIDTH))
    return layer.b(y)


def by_a_number(layer, x):
    y = layer.a(x)
    flat(y).mul_(0.5).sigmoid_()
    return layer.b(y)


def by_a_weight(layer, x):
    y = layer.a(x)
    flat(y).mul_(layer.scale)
    return layer.b(y)


def by_parts_of_one(layer, x):
    y, z = layer.a(x), torch.tanh(x)
    y[..., :3].addcmul_(z[..., :3], z[..., 3:], value=0.3)
    return layer.b(y)


def a_slice(layer, x):
    y = layer.a(x)
    y[:, 1:3] = torch.tanh(y[:, 1:3] * 2)
    y[:, 0] = x[:, 0] * x[:, 2]
    y[:, -1].div_(2 + torch.sigmoid(x[:, 0]))
    return layer.b(y)


def chained(layer, x):
    y = layer.a(x)
    flat(y).t()[1:4].mul_(torch.sigmoid(x).flatten(0, 1).t()[2:5])
    y.transpose(0, 1)[..., ::2].exp_()
    return layer.b(y).view(-1, 2, 3).tanh_().view(x.shape)


def drawn(layer, x):
    y = layer.a(x)
    nn.functional.dropout(flat(y), 0.4, layer.training, inplace=True)
    return layer.b(y)


CHANGES = {
    f.__name__: f for f in (added, multiplied, by_a_number, by_a_weight, by_parts_of_one, a_slice, chained, drawn)
}


class Layer(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.a, self.b, self.change = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), (change,)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x):
        return self.change[0](self, x)


class Followed(nn.Module):
    """The same between layers, in a forward that is followed."""

    def __init__(self, change):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.middle = nn.ModuleList(Layer(change) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for layer in self.middle:
            x = layer.change[0](layer, x)
        return self.last(x)


def batches(count):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(2, 3, LENGTH, WIDTH, generator=generator).unbind() for _ in range(count)]


def build(change, kind, method, seed=0, **options):
    torch.manual_seed(seed)
    if kind == "followed":
        model, options = Followed(change), dict(options, example=batches(1)[0][0], stages="layer")
    else:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Layer(change), Layer(change), nn.Linear(WIDTH, WIDTH))
    return pipeback.Pipeline(
        model, loss=nn.functional.mse_loss, optimizer=OPTIMIZERS["momentum"], method=method,
        debug=pipeback.Debug(weight_functions="warn"), **options,
    )  # fmt: skip


WAYS = list(product(["sequence", "followed"], ["device", "host", "recompute"]))


@pytest.mark.parametrize(
    ("change", "kind", "activations"),
    mostly_rare(
        [(change, *way) for change in CHANGES for way in WAYS],
        *((change, *WAYS[n % len(WAYS)]) for n, change in enumerate(CHANGES)), *(("chained", *way) for way in WAYS),
    ),
)  # fmt: skip
def test_resume_in_flight(change, kind, activations):
    method = "pipedream" if activations == "recompute" else "pb"
    every = batches(18)
    first = build(CHANGES[change], kind, method, activations=activations)
    for x, y in every[:11]:
        first.push(x, y)
    state = first.state_dict()
    second = build(CHANGES[change], kind, method, seed=9, activations=activations)
    second.load_state_dict(state)
    assert torch.equal(everything(second), everything(first))
    third = build(CHANGES[change], kind, method, seed=8, activations=activations)
    third.load_state_dict(second.state_dict())  # what has been put back is saved again
    for pipe in (first, second, third):
        for x, y in every[11:14]:
            pipe.push(x, y)
    assert torch.equal(everything(second), everything(first)) and torch.equal(everything(third), everything(first))
    for pipe in (first, second, third):
        for x, y in every[14:]:
            pipe.push(x, y)
        pipe.drain()
    assert torch.equal(everything(second), everything(first)) and torch.equal(everything(third), everything(first))


def test_saving_calls_no_hook_and_changes_nothing():
    calls = []

    def hooked(layer, x):
        y = layer.a(x)
        flat(y).mul_(torch.tanh(x).reshape(-1, WIDTH))
        z = y * 2
        if z.requires_grad:
            z.register_hook(lambda grad: calls.append(0))
        return layer.b(z)

    silent, saving = (build(hooked, "sequence", "pb") for _ in range(2))
    first, *rest = batches(9)
    for pipe in (silent, saving):
        pipe.push(*first)  # the rehearsal goes back as often as it takes to measure the time
    calls.clear()
    for x, y in rest:
        silent.push(x, y)
    wanted, calls[:] = len(calls), []
    for x, y in rest:
        saving.push(x, y)
        before = len(calls)
        saving.state_dict()
        assert len(calls) == before
    assert len(calls) == wanted and torch.equal(everything(saving), everything(silent))


@pytest.mark.parametrize("what", ["add_", "slice"])
def test_a_hidden_number_taken_from_the_weights_is_refused(what):
    """The forward that builds the graph anew finds another one."""

    def taken(layer, x):
        y = layer.a(x)
        number = layer.scale.detach().sum().item()
        if what == "add_":
            flat(y).add_(flat(x), alpha=number)
        else:
            y[:, int(number > 18)] = x[:, 0]
        return layer.b(y)

    pipe = build(taken, "sequence", "pb")
    with torch.no_grad():
        pipe.model[1].scale.copy_(torch.arange(WIDTH))
    for x, y in batches(9):
        pipe.push(x, y)
    state = pipe.state_dict()
    state["stages"][1]["weight/scale"].add_(1)
    with pytest.raises(ValueError, match=r"stage 1 \(1\).*a different graph"):
        build(taken, "sequence", "pb").load_state_dict(state)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        ctx.factor = 2.0
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor


def test_a_function_of_ones_own_is_refused_with_a_cure():
    def doubled(layer, x, copy=False):
        y = flat(layer.a(x))
        y = Doubled.apply(y.clone() if copy else y)
        return layer.b(y.view(x.shape))

    pipe = build(doubled, "sequence", "pipedream")
    for x, y in batches(6):
        pipe.push(x, y)
    with pytest.raises(TypeError, match=r"stage 1 \(1\).*Doubled.*x = x.clone\(\) before.*drain\(\) before saving"):
        pipe.state_dict()
    pipe.drain()
    pipe.state_dict()

    def cured(layer, x):
        return doubled(layer, x, copy=True)

    first, second = (build(cured, "sequence", "pipedream", seed) for seed in (0, 3))
    for x, y in batches(6):
        first.push(x, y)
    second.load_state_dict(first.state_dict())
    for pipe in (first, second):
        pipe.drain()
    assert torch.equal(everything(first), everything(second))


def test_a_hidden_function_of_the_weights_is_refused():
    """Its backward would run on old weights, which plain pb does not."""

    def shifted(layer, x):
        y = layer.a(x)
        flat(y).mul_(layer.scale * 2)
        return layer.b(y)

    torch.manual_seed(0)
    pipe = pipeback.Pipeline(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), Layer(shifted), nn.Linear(WIDTH, WIDTH)), loss=nn.functional.mse_loss,
        optimizer=OPTIMIZERS["momentum"], method="pb",
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"stage 1 \(1\): its graph saves a function of the weights"):
        pipe.push(*batches(1)[0])
