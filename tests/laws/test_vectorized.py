"""Law: stages that run as one are the event loop, to rounding; the order that they run in has its bits."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss, scaled_dot_product_attention
from torch.utils._pytree import tree_leaves

import pipeback
from pipeback import methods
from tests.helpers.choice import mostly_rare, rare
from tests.laws.as_one import (
    FLUSH,
    GROUPED,
    LEAP,
    S,
    Twice,
    block,
    doubles,
    model,
    pipelines,
    pushed,
    same,
    trained,
    turns,
)
from tests.laws.cases import OPTIMIZERS, STEADY, STEADY_EACH, allowed, data, everything, network, pipeline, weights

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")


def agree(case, optimizer=None, **options):
    _, *wanted = trained(case, optimizer, **options)
    pipe, *found = trained(case, optimizer, vectorize=True, **options)
    assert any(told.startswith("as one") for told in pipe.vectorized.values())
    same(found, wanted)
    return pipe


@pytest.mark.parametrize("case", mostly_rare(STEADY, *STEADY_EACH[::2]))
def test_every_method_equals_the_event_loop(case):
    pipe = agree(case)
    # where a whole tick is one function, or a flush is done as a whole, it has part in it
    first = ["stage 0"] if case in (*LEAP, *FLUSH, *GROUPED) else []
    assert list(pipe.vectorized) == [
        *first,
        *(["stages 1 … 5"] if turns(case) < 2 else ["stages 1, 3, 5", "stages 2, 4"]),
    ]


@pytest.mark.parametrize("case", mostly_rare(STEADY, "pb-slack1", "gpipe-4", "cerebras", "pipedream-vertical"))
def test_the_skewed_order_has_the_bits_of_the_grouped_one(case):
    some = data(23)
    wanted = trained(case, some=some, build=lambda: network(S))
    found = trained(case, some=some, build=lambda: network(S), debug=pipeback.Debug(order="skewed"))
    for a, b in zip(found[1:], wanted[1:], strict=True):
        assert torch.equal(a, b)
    assert torch.equal(everything(found[0]), everything(wanted[0]))
    assert sorted(found[0].ledger) == sorted(wanted[0].ledger)


def test_the_ledger_is_that_of_the_event_loop():
    wanted, found = (trained("pb", vectorize=on)[0] for on in (False, True))
    assert sorted(found.ledger) == sorted(wanted.ledger)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", mostly_rare(["pb", "gpipe-4", "lwp-weight"], "pb"))
def test_every_optimizer(case, optimizer):
    if allowed(case, optimizer):
        agree(case, optimizer)


@pytest.mark.parametrize(
    "options",
    [
        {"clip_norm": 0.02},
        {"clip_norm": pipeback.Clipping(value=0.01)},
        {"micro_batch_size": 2},
        {"micro_batch_size": pipeback.MicroBatches(2, weights="samples")},
    ],
    ids=str,
)
@pytest.mark.parametrize("case", mostly_rare(["pb", "gpipe", "pipedream"], "pb"))
def test_options(case, options):
    """Three samples in micro-batches of two: every second one is short, of another form."""
    agree(case, **options)


def test_rates_that_change_and_groups_of_weights():
    def split(params):
        many, few = [p for p in params if p.dim() > 1], [p for p in params if p.dim() < 2]
        groups = [{"params": many, "weight_decay": 0.01}, {"params": few, "lr": 0.05}]
        return torch.optim.SGD([group for group in groups if group["params"]], lr=0.02, momentum=0.9)

    found = []
    for on in (False, True):
        for factory in (split, OPTIMIZERS["momentum"]):
            pipe = pipeback.Pipeline(model(), loss=mse_loss, optimizer=factory, method="pb", vectorize=on)
            for n, (x, y) in enumerate(doubles()):
                for optimizer in pipe.optimizers:
                    optimizer.param_groups[0]["lr"] = 0.02 / (1 + n // 5)
                pipe.push(x, y)
            found.append(weights(pipe))
    same(found[2:], found[:2])


def test_one_stage_with_another_rate():
    found = []
    for on in (False, True):
        pipe = pipeline(model(), "pb", vectorize=on)
        pipe.optimizers[3].param_groups[0]["lr"] = 0.001
        for x, y in doubles():
            pipe.push(x, y)
        found.append(weights(pipe))
    same(*[[each] for each in found])


def frozen():
    """Of every block the norm, of one all."""
    found = model()
    for n in range(1, S - 1):
        found[n][1].requires_grad_(False)
    return found


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 6)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 3)).permute(2, 0, 3, 1, 4)
        return x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Conv1d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv1d(4, 2, 1))

    def forward(self, x):
        return x + self.inner(x)


def encoder():
    return nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)


@pytest.mark.parametrize("make", [Attention, encoder, Convolution], ids=lambda make: make.__name__)
@pytest.mark.parametrize("case", mostly_rare(["cerebras", "pipedream"], "cerebras"))
def test_layers_as_users_write_them(case, make):
    generator = torch.Generator().manual_seed(3)
    some = [torch.randn(2, 2, 2, 6, dtype=torch.float64, generator=generator).unbind() for _ in range(25)]
    agree(case, some=some, build=lambda: model(make=make))


def test_frozen_weights():
    agree("pb", build=frozen)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = block()

    def forward(self, x):
        return x + self.inner(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.blocks, self.head = (
            nn.Linear(6, 6),
            nn.ModuleList(Residual() for _ in range(4)),
            nn.Linear(6, 6),
        )

    def forward(self, x):
        x = self.before(x)
        for each in self.blocks:
            x = each(x)
        return self.head(x)


def test_a_model_whose_forward_is_followed():
    found = []
    for on in (False, True):
        torch.manual_seed(0)
        pipe = pipeline(Model().double(), "pb", vectorize=on, example=doubles(1)[0][0], stages="block")
        found.append([torch.stack([pipe.push(x, y).double() for x, y in doubles()]), weights(pipe)])
    assert any(told.startswith("as one") for told in pipe.vectorized.values())
    same(*found)


@pytest.mark.parametrize(("name", "make", "size"), [
    ("gpipe", Twice, 1), ("one_f_one_b", block, 3), rare("gpipe", block, 3), rare("one_f_one_b", Twice, 1),
])  # fmt: skip
def test_long_flushes(name, make, size):
    """Sums of gradients of many micro-batches; a flush that is cut short, and states taken up then and within one.

    Of single samples the gradients of two biases lie at one place.
    """
    one, other = pipelines(
        methods.create(name, micro_batches=16), build=partial(model, make=make), micro_batch_size=size
    )
    same(pushed(other, (32, 7)), pushed(one, (32, 7)))
    found, states = [], []

    def again(n):
        state = pipe.state_dict()
        tensors = [v for v in tree_leaves(state) if isinstance(v, torch.Tensor)]
        states.append((tensors, [v.clone() for v in tensors]))
        pipe.load_state_dict(state)

    for pipe in (one, other):
        found.append(pushed(pipe, (21, 14), again))
    same(*reversed(found))
    assert all(torch.equal(a, b) for tensors, before in states for a, b in zip(tensors, before, strict=True))


def test_watched():
    found = []
    for on in (False, True):
        pipe = pipeline(model(), "pb", vectorize=on)
        for x, y in doubles(20):
            pipe.push(x, y)
        watch = pipe.watch()
        watch.follow()
        for x, y in doubles(20):
            pipe.push(x, y)
        pipe.wait()
        found.append((watch.gap, watch.delay))
    assert found[0][0] == pytest.approx(found[1][0]) and found[0][1] == found[1][1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", ["pb", "cerebras", "pipedream"])
def test_on_a_gpu(case):
    some = [(x.cuda(), y.cuda()) for x, y in doubles()]
    agree(case, some=some, build=lambda: model().cuda())
