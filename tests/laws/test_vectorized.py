"""Law: stages that run as one are the event loop, to rounding; the order that they run in has its bits."""

import gc

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss, scaled_dot_product_attention

import pipeback
from tests.choice import mostly_rare
from tests.laws.cases import CASES, OPTIMIZERS, allowed, data, everything, network, pipeline, weights

S = 7
pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")


def block():
    return nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh())


def model(dtype=torch.float64, make=block):
    """A first stage and a head of their own, and in between what is alike."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), *[make() for _ in range(S - 2)], nn.Linear(6, 6, bias=False)).to(dtype)


def doubles(count=50, **options):
    return data(count, dtype=torch.float64, **options)


def trained(case, optimizer="momentum", some=None, build=model, push=None, **options):
    pipe = pipeline(build(), CASES[case](S), optimizer, **options)
    losses = [(push or pipe.push)(x, y) for x, y in some or doubles()]
    flying = weights(pipe)
    pipe.drain()
    return pipe, torch.stack([loss.double() for loss in losses]), flying, weights(pipe)


def same(found, wanted, within=1e-10):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=within, atol=within)


def agree(case, optimizer="momentum", **options):
    _, *wanted = trained(case, optimizer, **options)
    pipe, *found = trained(case, optimizer, vectorize=True, **options)
    assert any(told.startswith("as one") for told in pipe.vectorized.values())
    same(found, wanted)
    return pipe


@pytest.mark.parametrize("case", CASES)
def test_every_method_equals_the_event_loop(case):
    pipe = agree(case)
    assert list(pipe.vectorized) == ["stages 1 … 5"]


@pytest.mark.parametrize("case", mostly_rare(CASES, "pb-slack1", "gpipe-4", "cerebras", "pipedream-vertical"))
def test_the_skewed_order_has_the_bits_of_the_grouped_one(case):
    some = data(23)
    wanted = trained(case, some=some, build=lambda: network(S))
    found = trained(case, some=some, build=lambda: network(S), order="skewed")
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
    [{"clip_norm": 0.02}, {"clip_value": 0.01}, {"micro_batch_size": 2}, {"micro_batch_size": 2, "weights": "samples"}],
    ids=str,
)
@pytest.mark.parametrize("case", mostly_rare(["pb", "gpipe"], "pb"))
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


# -- what happens between pushes -----------------------------------------------------------------------------------


def test_looking_in_changes_nothing():
    _, *wanted = trained("cerebras")

    def push(x, y):
        loss = pipe.push(x, y)
        if push.count % 3 == 1:
            float(loss)
        if push.count % 5 == 2:
            pipe.evaluate(x)
            pipe.model.state_dict()
            pipe.state_dict()
            pipe.memory()
        push.count += 1
        return loss

    push.count = 0
    pipe = pipeline(model(), "cerebras", vectorize=True)
    losses = [push(x, y) for x, y in doubles()]
    flying = weights(pipe)
    pipe.drain()
    same([torch.stack([loss.double() for loss in losses]), flying, weights(pipe)], wanted)


@pytest.mark.parametrize("at", mostly_rare([1, 3, 11], 11))
@pytest.mark.parametrize("case", mostly_rare(CASES, "cerebras", "pipedream", "gpipe-4", "pipedream-vertical"))
def test_resumed_in_flight(case, at):
    """With the bits of the run that was not interrupted at the same places: to save finishes what was pushed."""
    some = doubles(30)
    one = pipeline(model(), CASES[case](S), vectorize=True)
    for x, y in some[:at]:
        one.push(x, y)
    state = one.state_dict()
    other = pipeline(model(), CASES[case](S), vectorize=True)
    for x, y in some[:2]:
        other.push(x, y)
    other.load_state_dict(state)
    for pipe in (one, other):
        for x, y in some[at:]:
            pipe.push(x, y)
    assert torch.equal(everything(one), everything(other)) and other.vectorized.keys() == one.vectorized.keys()


@pytest.mark.parametrize("case", mostly_rare(CASES, "cerebras", "pipedream", "gpipe-4"))
def test_a_state_of_the_event_loop_goes_on_as_one(case):
    some = doubles(30)
    plain = pipeline(model(), CASES[case](S))
    for x, y in some[:11]:
        plain.push(x, y)
    pipe = pipeline(model(), CASES[case](S), vectorize=True)
    pipe.load_state_dict(plain.state_dict())
    for each in (plain, pipe):
        for x, y in some[11:]:
            each.push(x, y)
    same([weights(pipe)], [weights(plain)])


def test_a_state_of_stages_that_do_not_fit():
    """What "auto" leaves as it is goes on with the bits of the event loop."""
    make = lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))  # noqa: E731
    some, found = doubles(20), []
    plain = pipeline(model(make=make), "pb")
    for x, y in some[:9]:
        plain.push(x, y)
    state = plain.state_dict()
    for on in (False, "auto"):
        pipe = pipeline(model(make=make), "pb", vectorize=on)
        pipe.load_state_dict(state)
        for x, y in some[9:]:
            pipe.push(x, y)
        found.append(everything(pipe))
    assert "changes a buffer" in pipe.vectorized["stages 1 … 5"]
    assert torch.equal(*found)


def test_a_state_in_flight_needs_stacks():
    pipe = pipeline(model(), "pb", vectorize=True)
    for x, y in doubles(9):
        pipe.push(x, y)
    state = pipe.state_dict()
    with pytest.raises(
        ValueError, match=r"stage 1 .* was saved in flight with vectorize=.*vectorize=True, or .* drained"
    ):
        pipeline(model(), "pb").load_state_dict(state)
    pipe.drain()
    plain = pipeline(model(), "pb")
    plain.load_state_dict(pipe.state_dict())
    assert torch.equal(weights(plain), weights(pipe))


def test_a_loss_can_be_read_when_nobody_holds_the_pipeline():
    pipe = pipeline(model(), "pb", vectorize=True)
    losses = [pipe.push(x, y) for x, y in doubles(9)]
    float(losses[0])
    del pipe
    gc.collect()
    with pytest.raises(RuntimeError, match="the pipeline is gone|closed before this loss"):
        float(losses[-1])


def test_memory_counts_what_waits():
    pipe = trained("pb", vectorize=True)[0]
    assert pipe.memory().activations > 0


# -- what does not fit ---------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self, by):
        super().__init__()
        self.linear, self.by = nn.Linear(6, 6), by

    def forward(self, x):
        return self.by * self.linear(x)


def wider():
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 6)).double()


class Doubled(nn.Module):
    def forward(self, x):
        return x, 2 * x


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, pair):
        return self.linear(pair[0]), pair[1]


class Summed(nn.Module):
    def forward(self, pair):
        return pair[0] + pair[1]


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: model(make=lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.1))), "draws random numbers"),
        (lambda: model(make=lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))), "changes a buffer"),
        (
            lambda: nn.Sequential(*[Scaled(by) for by in (1.0, 2.0, 1.0)], nn.Linear(6, 6)).double(),
            "something else than",
        ),
        (
            lambda: model(make=lambda: nn.Sequential(nn.Linear(6, 6), Branching())),
            "torch cannot run them as one",
        ),
        (lambda: nn.Sequential(Doubled(), *[Pair() for _ in range(3)], Summed()).double(), "they are given tuple"),
    ],
    ids=["dropout", "batch statistics", "another factor", "branches", "pairs"],
)
def test_what_does_not_fit_runs_as_it_is(build, reason):
    torch.manual_seed(0)
    pipe = pipeline(build(), "pb", vectorize=True)
    before = weights(pipe)
    with pytest.raises(ValueError, match=f'vectorize=True: no stages can run as one .*{reason}.*"auto" or False'):
        pipe.push(*doubles(1)[0])
    assert torch.equal(weights(pipe), before)
    torch.manual_seed(0)
    wanted = trained("pb", build=build, some=doubles(9))
    torch.manual_seed(0)
    found = trained("pb", build=build, some=doubles(9), vectorize="auto")
    assert reason in found[0].vectorized[next(iter(found[0].vectorized))]
    same(found[1:], wanted[1:], 0)


class Branching(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def test_stages_of_which_none_are_alike():
    with pytest.raises(
        ValueError, match='vectorize=True: no neighbouring stages are alike .*vectorize="auto" or False'
    ):
        pipeline(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6)), "pb", vectorize=True)
    assert pipeline(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6)), "pb", vectorize="auto").vectorized == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vectorize": "yes"}, 'vectorize must be True, False or "auto"'),
        ({"vectorize": True, "workers": 2}, "vectorize=True does not go with workers=2; use workers=None"),
        ({"vectorize": True, "store": "host"}, "does not go with store='host'"),
        ({"vectorize": "auto", "activations": "host"}, "vectorize='auto' does not go with activations='host'"),
        ({"vectorize": True, "order": "random"}, "does not go with order='random'"),
        ({"vectorize": True, "replicas": 2}, "does not go with replicas=2"),
        ({"order": "skewed", "workers": 2}, 'order="skewed" does not go with workers=2'),
    ],
)
def test_what_does_not_go_together(options, message):
    with pytest.raises(ValueError, match=message):
        pipeline(network(), "pb", **options)


def test_what_a_run_as_one_cannot_do():
    pipe = trained("pb", some=doubles(5), vectorize=True)[0]
    with pytest.raises(ValueError, match="record: stages that run as one cannot be measured apart"):
        pipe.record()
    with torch.autocast("cpu"), pytest.raises(ValueError, match="vectorize: stages that run as one know no autocast"):
        pipe.push(*doubles(1)[0])
    hooked = model()
    hooked[2].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="there are hooks on their modules"):
        pipeline(hooked, "pb", vectorize=True).push(*doubles(1)[0])


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


def test_auto_tells_what_it_measured():
    pipe = trained("pb", some=doubles(9), vectorize="auto")[0]
    (told,) = pipe.vectorized.values()
    assert "times as fast" in told


@pytest.mark.parametrize("case", ["pb", pytest.param("cerebras", marks=pytest.mark.soak)])
def test_compiled(case):
    pytest.importorskip("torch._inductor")
    _, *wanted = trained(case, some=doubles(25))
    _, *found = trained(case, some=doubles(25), vectorize=True, compile=True)
    same(found, wanted)


@pytest.mark.soak
def test_stages_that_are_left_compile_on_their_own():
    make = lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))  # noqa: E731
    options = {"some": doubles(9), "build": lambda: model(make=make), "compile": True}
    _, *wanted = trained("pb", **options)
    pipe, *found = trained("pb", vectorize="auto", **options)
    assert "changes a buffer" in pipe.vectorized["stages 1 … 5"] and pipe._stages[2].call is not pipe._stages[2].module
    same(found, wanted, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", ["pb", "cerebras", "pipedream"])
def test_on_a_gpu(case):
    some = [(x.cuda(), y.cuda()) for x, y in doubles()]
    agree(case, some=some, build=lambda: model().cuda())
