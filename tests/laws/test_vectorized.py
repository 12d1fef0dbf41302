"""Law: stages that run as one are the event loop, to rounding; the order that they run in has its bits."""

import gc
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss, scaled_dot_product_attention
from torch.utils._pytree import tree_leaves, tree_map

import pipeback
from pipeback import methods
from pipeback.methods.base import described
from pipeback.methods.cerebras import Cerebras
from pipeback.vectorized.capture import capture_loss_stage
from pipeback.vectorized.cuda_graph import CudaGraphed
from pipeback.vectorized.stack import Stack
from pipeback.vectorized.steady import Steady
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
    one = ["stages 1 … 5"]
    assert list(pipe.vectorized) == (one if turns(case) < 2 else ["stages 1, 3, … 5", "stages 2, 4, … 4"])


def turns(case):
    """2 where stages of even and of odd number take turns."""
    return getattr(CASES[case](S).schedule, "turns", 0)


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


class Twice(nn.Module):
    """Two weights whose gradients are one and the same."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.one(x) + self.other(x))


@pytest.mark.parametrize(("make", "size"), [(block, 3), (Twice, 1)], ids=["block", "Twice"])
@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
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


# -- ticks at which all stages do the same ----------------------------------------------------------------------------

LEAP = ("pb", "pb-slack1", "lwp", "lwp-horizon3", "sc", "sc-horizon2", "cerebras", "spectrain", "spectrain-slack2",
        "pipedream", "pipedream-slack2", "pipemare", "pipemare-t1", "pipemare-t2")  # fmt: skip


@pytest.fixture
def leapt(monkeypatch):
    """How many ticks were done so, of every run of them."""
    found, run = [], Steady.run

    def counted(self, order, ticks):
        found.append(run(self, order, ticks))
        return found[-1]

    monkeypatch.setattr(Steady, "run", counted)
    return found


def pushed(pipe, sizes=(9, 1, 23, 2, 15), before=lambda n: None):
    """Losses and weights in flight, and drained; so many micro-batches of three samples a push."""
    xs, ys = map(torch.cat, zip(*doubles(sum(sizes)), strict=True))
    losses = []
    for n, (x, y) in enumerate(zip(*(v.split([3 * size for size in sizes]) for v in (xs, ys)), strict=True)):
        before(n)
        losses.append(pipe.push(x, y))
    flying = weights(pipe)
    pipe.drain()
    return [torch.stack([loss.double() for loss in losses]), flying, weights(pipe)]


def pipelines(case, optimizer="momentum", build=model, **options):
    """The event loop's, and one that runs stages as one."""
    for on in ({}, {"vectorize": True}):
        method = CASES[case](S) if isinstance(case, str) else case
        yield pipeline(build(), method, optimizer, **{"micro_batch_size": 3, **options, **on})


@pytest.mark.parametrize("case", mostly_rare(CASES, *LEAP, "gpipe-4", "pipemare", "lwp-weight"))
def test_many_micro_batches_a_push(case, leapt):
    one, other = pipelines(case)
    same(pushed(other), pushed(one))
    assert sorted(other.ledger) == sorted(one.ledger)
    assert (sum(leapt) > 30) == (case in LEAP)
    assert other.memory() is not None and [s.peak_flights for s in other._stages] == [
        s.peak_flights for s in one._stages
    ]


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("case", mostly_rare(["pb", "cerebras", "pipedream", "gpipe-4"], "cerebras", "pipedream"))
def test_recomputed_activations(case, compile, leapt):
    """On the weights in force at B, as in the event loop; what waits is the input alone."""
    one, whole = pipelines(case)
    one = pipeline(model(), CASES[case](S), micro_batch_size=3, activations="recompute")
    other = pipeline(
        model(), CASES[case](S), micro_batch_size=3, activations="recompute", vectorize=True, compile=compile
    )
    same(pushed(other), pushed(one))
    pushed(whole)
    assert (sum(leapt) > 30) == (case in LEAP)
    assert other.memory().activations < whole.memory().activations


TURNS = ("pb-slack1", "spectrain", "pipedream")  # stages of even and of odd number do something in turn


@pytest.mark.parametrize("blocks", [2, 3, 4, 5])
@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("case", mostly_rare(TURNS, "pipedream"))
def test_stages_that_take_turns_in_runs_of_any_length(case, ends, blocks, leapt):
    """With stages of their own around them, or a head alone."""

    def build():
        torch.manual_seed(0)
        first = [nn.Linear(6, 6)] if ends else []
        return nn.Sequential(*first, *[block() for _ in range(blocks)], nn.Linear(6, 6, bias=False)).double()

    one, other = pipelines(case, build=build)
    same(pushed(other), pushed(one))
    assert sum(leapt) > 60 and len(other.vectorized) == 2


@pytest.mark.parametrize("case", [*TURNS, "pipemare"])
def test_states_between_ticks(case, leapt):
    """Saved and taken up before every push; rates that differ by stage, and change."""
    found = []
    for pipe in pipelines(case):

        def again(n, pipe=pipe):
            pipe.load_state_dict(pipe.state_dict())
            for s, optimizer in enumerate(pipe.optimizers):
                optimizer.param_groups[0]["lr"] *= 0.9 + 0.01 * s

        found.append(pushed(pipe, (23, 1, 30, 8, 25), again))
    same(*reversed(found))
    assert sum(leapt) > 50


def test_rates_that_were_annealed_and_are_taken_back(leapt):
    """A state from before, taken up when nothing is in flight, and the same options all along."""
    found = []
    for pipe in pipelines("pipemare"):
        begin = pipe.state_dict()
        pushed(pipe)
        pipe.load_state_dict(begin)
        found.append(pushed(pipe, (10, 9)))
    same(*reversed(found))
    assert sum(leapt) > 40


def test_stashed_versions_are_counted():
    """As many as the event loop keeps, and beside them the places that are made for more."""
    one, other = pipelines("pipedream")
    for pipe in (one, other):
        pushed(pipe)
    assert other.memory().copies == one.memory().copies
    kept = sum((stage.peak_copies - 1) * stage.bytes() for stage in other._stages[1:-1])
    stacks = {id(stage.stack): stage.stack for stage in other._stages[1:-1]}.values()
    strips = {id(s.weights.strip): s.weights.strip.beside for s in other._stages if s.weights.strip is not None}
    assert sum(stack.stash.nbytes for stack in stacks) == kept + other.memory().beside - sum(strips.values())


@pytest.mark.parametrize("compile", [False, True])
def test_weights_with_one_gradient(compile, leapt, monkeypatch):
    monkeypatch.setattr("pipeback.vectorized.stack.LARGE", 0)
    one, _ = pipelines("pb", build=partial(model, make=Twice))
    other = pipeline(model(make=Twice), "pb", micro_batch_size=3, vectorize=True, compile=compile)
    same(pushed(other), pushed(one))
    assert sum(leapt) > 30


@pytest.mark.parametrize(
    ("case", "large"),
    mostly_rare(
        product(("pb", "cerebras", "sc", "gpipe-4", "spectrain", "pipedream", "pipemare"), (0, 1 << 20)),
        ("cerebras", 0), ("cerebras", 1 << 20), ("spectrain", 1 << 20), ("pipedream", 0), ("pipemare", 1 << 20),
    ),
)  # fmt: skip
def test_many_micro_batches_a_push_compiled(case, large, leapt, monkeypatch):
    """large: bytes beyond which weights are stepped outside of what is compiled."""
    monkeypatch.setattr("pipeback.vectorized.stack.LARGE", large)
    one, _ = pipelines(case)
    other = pipeline(model(), CASES[case](S), micro_batch_size=3, vectorize=True, compile=True)
    same(pushed(other), pushed(one))
    assert (sum(leapt) > 30) == (case in LEAP)


def test_what_a_compiled_tick_takes_for_granted_may_change(leapt):
    """It is not checked at every call: how inputs lie in memory, decays, momentum, whether rates differ by stage."""
    found = []
    for on in ({}, {"vectorize": True, "compile": True}):
        pipe = pipeline(model(), "pb", micro_batch_size=3, **on)

        def change(n, pipe=pipe):
            for s, optimizer in enumerate(pipe.optimizers):
                group = optimizer.param_groups[0]
                if n == 1:
                    group["weight_decay"] = 0.1
                elif n == 2:
                    group["momentum"] = 0.5
                elif n == 3:
                    group["momentum"] = 0.0
                elif n == 4:
                    group["lr"] *= 1 + s / 10

        xs, ys = map(torch.cat, zip(*doubles(100), strict=True))
        losses = []
        for n, (x, y) in enumerate(zip(xs.split(60), ys.split(60), strict=True)):
            change(n)
            losses.append(pipe.push(*(v.t().contiguous().t() if n % 2 else v for v in (x, y))))
        found.append([torch.stack([loss.double() for loss in losses]), weights(pipe)])
    same(*reversed(found))
    assert sum(leapt) > 60


def test_the_graph_of_the_last_stage_does_nothing_twice():
    """A linear layer and its loss: two transpositions, three products, the loss and its gradient, a bias."""
    head, (x, y) = nn.Linear(6, 6, dtype=torch.float64), (v[:1] for v in doubles(1)[0])
    graph = capture_loss_stage(head, mse_loss, x, y)
    operations = [node for node in graph.__self__.graph.nodes if node.op.startswith("call")]
    assert len(operations) == 8, graph.__self__.code
    wanted = mse_loss(head(x), y)
    wanted.backward()
    loss, _, *grads = graph(head.weight.detach(), head.bias.detach(), x, y)
    same([loss, *grads], [wanted.detach(), head.weight.grad, head.bias.grad], 1e-14)


def nudged(params):
    """Weights of two kinds, the few first, each with rate and decay of its own."""
    few, many = ([p for p in params if (p.dim() < 2) == low] for low in (True, False))
    groups = [{"params": few, "lr": 0.01}, {"params": many, "weight_decay": 0.01}]
    return torch.optim.SGD([group for group in groups if group["params"]], lr=0.02, momentum=0.9)


def decayed(params):
    """Groups in another order than the weights, of which one decays."""
    many, few = [p for p in params if p.dim() > 1], [p for p in params if p.dim() < 2]
    groups = [{"params": few, "lr": 0.003}, {"params": many, "weight_decay": 0.1}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01, weight_decay=0.0)


def curious(params):
    return torch.optim.Adam(params, lr=0.01, amsgrad=True)


@pytest.mark.parametrize(
    "factory", [*OPTIMIZERS.values(), nudged, decayed, curious], ids=[*OPTIMIZERS, "nudged", "decayed", "curious"]
)
@pytest.mark.parametrize("changing", [False, True])
@pytest.mark.parametrize("method", mostly_rare(["pb", "pipedream", "pipemare"], "pb"))
def test_optimizers_and_rates_of_ticks(method, factory, changing, leapt):
    """Rates that change at every push, so that rows are stepped with different ones."""
    found = []
    for on in (False, True):
        pipe = pipeback.Pipeline(
            model(), loss=mse_loss, optimizer=factory, method=CASES[method](S), micro_batch_size=3, vectorize=on
        )

        def slower(n, pipe=pipe):
            for s, optimizer in enumerate(pipe.optimizers):
                optimizer.param_groups[0]["lr"] *= 0.9 + 0.01 * s if changing else 1

        found.append(pushed(pipe, before=slower))
    same(*reversed(found))
    assert (sum(leapt) > 30) == (factory is not curious)


@pytest.mark.parametrize("case", ["pipedream", "pipemare"])
def test_adam_where_backwards_run_on_other_weights(case, leapt):
    found = []
    for on in (False, True):
        pipe = pipeback.Pipeline(
            model(), loss=mse_loss, optimizer=decayed, method=CASES[case](S), micro_batch_size=3, vectorize=on
        )
        found.append(pushed(pipe))
    same(*reversed(found))
    assert sum(leapt) > 30


def test_adam_of_compiled_ticks(leapt):
    found = []
    for on in ({}, {"vectorize": True, "compile": True}):
        pipe = pipeback.Pipeline(
            model(), loss=mse_loss, optimizer=decayed, method="pb", micro_batch_size=3, check_finite=True, **on
        )

        def slower(n, pipe=pipe):
            for s, optimizer in enumerate(pipe.optimizers):
                optimizer.param_groups[0]["lr"] *= 0.9 + 0.01 * s

        found.append(pushed(pipe, before=slower))
    same(*reversed(found))
    assert sum(leapt) > 30


def test_predictions_at_the_rates_of_the_push(leapt):
    found = []
    for pipe in pipelines("cerebras"):

        def slower(n, pipe=pipe):
            for optimizer in pipe.optimizers:
                optimizer.param_groups[0]["lr"] *= 0.8

        found.append(pushed(pipe, before=slower))
    same(*reversed(found))
    assert sum(leapt) > 30


def test_two_stacks_and_stages_between_them(leapt):
    def several():
        torch.manual_seed(0)
        odd = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.0))
        return nn.Sequential(block(), block(), odd, *[nn.Linear(6, 6) for _ in range(3)], nn.Linear(6, 6)).double()

    one, other = pipelines("cerebras", build=several)
    same(pushed(other), pushed(one))
    assert len(other.vectorized) == 2 and sum(leapt) > 30


def test_a_loss_of_the_users_own_is_asked_every_time(leapt):
    def loss(output, target):
        loss.calls += 1
        return (1 + loss.calls % 3) / 4 * mse_loss(output, target)

    found = []
    for on in (False, True):
        pipe = pipeback.Pipeline(
            model(), loss=loss, optimizer=OPTIMIZERS["momentum"], method="pb", micro_batch_size=3, vectorize=on
        )
        loss.calls = 0
        float(pipe.push(*(v[:3] for v in doubles(1)[0])))
        loss.calls = 0  # however often it was tried
        found.append(pushed(pipe))
    same(*reversed(found))
    assert sum(leapt) > 30


@pytest.mark.parametrize("compile", [False, True])
def test_a_loss_that_is_not_finite_moves_nothing_of_the_last_stage(compile, leapt):
    users = model()
    pipe = pipeline(users, "pb", micro_batch_size=3, vectorize=True, compile=compile, check_finite=True)
    xs, ys = map(torch.cat, zip(*doubles(40), strict=True))
    pipe.push(xs[:60], ys[:60])
    ys[90] = float("nan")
    with pytest.raises(RuntimeError, match=r"stage 6 .*micro-batch 30: the loss is nan; lower the rate"):
        pipe.push(xs[60:], ys[60:])
    assert sum(leapt) > 5 and all(p.isfinite().all() for p in users.parameters())


def test_micro_batches_of_two_forms(leapt):
    """Micro-batches of three samples, and one of a single sample among them."""
    found = []
    for pipe in pipelines("pb"):
        xs, ys = map(torch.cat, zip(*doubles(70), strict=True))
        losses = [pipe.push(x, y).double() for x, y in zip(xs.split(103), ys.split(103), strict=True)]
        found.append([torch.stack(losses), weights(pipe)])
    same(*reversed(found))
    assert sum(leapt) > 30


class Louder(nn.Linear):
    """Twice as loud while it trains."""

    def forward(self, x):
        return super().forward(x).tanh() * (2.0 if self.training else 1.0)


def test_the_mode_may_change(leapt):
    """What is in flight keeps the mode that it came with, and what comes is computed in its own."""

    def losses(vectorize, modes=(True, False)):
        def switch(n):
            pipe._model.train(modes[n])

        still = partial(torch.optim.SGD, lr=0.0, momentum=0.9)
        pipe = pipeback.Pipeline(
            model(make=lambda: Louder(6, 6)), loss=mse_loss, optimizer=still, method="pb", micro_batch_size=3,
            vectorize=vectorize,
        )  # fmt: skip
        return pushed(pipe, (30, 30), switch)[0]

    found, wanted = losses(True), losses(False)
    assert leapt[0] > S
    assert leapt[-1] > S
    same(found[1:], wanted[1:])
    assert not torch.allclose(wanted[1], losses(False, (True, True))[1])


def test_hooks_of_a_subclass_are_asked(leapt):
    class Doubled(Cerebras):
        def forward_weights(self, weights, state, when):
            shift = super().forward_weights(weights, state, when)
            return shift._replace(coefficients=[2 * c for c in shift.coefficients])

    assert described(Cerebras()) and not described(Doubled())
    one, other = pipelines(Doubled())
    same(pushed(other), pushed(one))
    assert not any(leapt)


@pytest.mark.parametrize(("case", "optimizer"), [("cerebras", "momentum"), ("pb", "adamw")])
def test_resumed_between_such_ticks(case, optimizer, leapt):
    _, one = pipelines(case, optimizer)
    pushed_before = one.push(*map(torch.cat, zip(*doubles(30), strict=True)))
    assert pushed_before.isfinite()
    _, other = pipelines(case, optimizer)
    other.load_state_dict(one.state_dict())
    for found in (one, other):
        found.push(*map(torch.cat, zip(*doubles(30), strict=True)))
    assert torch.equal(everything(one), everything(other)) and sum(leapt) > 40


class Again(CudaGraphed):
    """A graph as the CPU can play it: the call once more, on what lies where it read, to where it wrote."""

    def captured(self, call):
        found = call()

        def replay():
            tree_map(torch.Tensor.copy_, found, call())

        self.count = getattr(self, "count", 0) + 1
        return replay, found


@pytest.mark.parametrize("optimizer", ["momentum", "sgd"])
@pytest.mark.parametrize("case", mostly_rare(["pb", "cerebras", "pipedream", "pipemare"], "cerebras", "pipedream"))
def test_ticks_as_graphs(case, optimizer, leapt):
    """What changes from tick to tick is copied to where a graph reads, with rates that change, too."""
    if not allowed(case, optimizer):
        return
    found, graphs = [], []
    for pipe in pipelines(case, optimizer):
        for stack in pipe._setting.stacks:
            stack.fuse = lambda function: graphs.append(Again(function)) or graphs[-1]

        def slower(n, pipe=pipe):
            for each in pipe.optimizers:
                each.param_groups[0]["lr"] *= 0.8

        found.append(pushed(pipe, before=slower))
    same(*reversed(found))
    assert sum(leapt) > 30 and [graph.count for graph in graphs] == [1] * turns(case)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: ticks as CUDA graphs")
@pytest.mark.parametrize("case", ["pb", "cerebras"])
def test_ticks_as_cuda_graphs(case, leapt):
    xs, ys = (torch.cat(v).cuda() for v in zip(*doubles(50), strict=True))
    found = []
    for on in (False, "cuda_graph"):
        pipe = pipeline(model().cuda(), CASES[case](S), micro_batch_size=3, vectorize=on)
        pipe.push(xs, ys)
        found.append(weights(pipe))
    same([found[1]], [found[0]])
    assert sum(leapt) > 30


def test_packed_rings_without_a_compiler():
    """As where torch gives a compilation up."""
    one, _ = pipelines("gpipe-4")
    with torch._dynamo.config.patch(suppress_errors=True), torch.compiler.set_stance("force_eager"):
        other = pipeline(model(), CASES["gpipe-4"](S), micro_batch_size=3, vectorize=True, compile=True)
        found = pushed(other)
    same(found, pushed(one))


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
    """The rings as they are, and what the others have in flight."""
    pipe = trained("pb", vectorize=True)[0]
    stages = pipe._stages
    (stack,) = {id(stage.stack): stage.stack for stage in stages if stage.stack is not None}.values()
    others = sum(s.activation_bytes * s.peak_flights for s in stages if s.stack is None)
    slots = 2 * (S - 1 - 1) + 2  # what is in flight at the first of its stages, and one to come
    saved = 6 * 4 + 2  # the input, what the norm is given and makes of it, what tanh gives; its mean and deviation
    each = slots * 3 * (saved + 2 * 6) * 8  # three samples, and the inputs and gradients that wait, in doubles
    assert pipe.memory().activations == others + len(stack.stages) * each


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
        ({"vectorize": "yes"}, 'vectorize must be True, False, "auto" or "cuda_graph"'),
        ({"vectorize": "cuda_graph"}, 'vectorize="cuda_graph" needs all stages on a CUDA device; move the model'),
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


@pytest.mark.parametrize(
    ("case", "gain", "as_one"),
    [("pb", 1.3, True), ("pb", 1.1, False), ("gpipe", 4.0, True), ("gpipe", 1.5, False), ("pipedream", 1.3, True),
     ("pipedream", 1.1, False), ("pb-slack1", 1.3, True), ("pipedream-vertical", 4.0, False),
     ("pipedream-vertical", 6.0, True), ("lwp-weight", 2.1, True), ("lwp-weight", 1.9, False)],
)  # fmt: skip
def test_auto_asks_for_more_where_ticks_cost_more(case, gain, as_one, monkeypatch):
    """gain: of F and B alone. Ticks that are gone through stage by stage cost, and twice as many cost more."""
    monkeypatch.setattr(Stack, "gain", lambda stack: gain)
    method = methods.create("gpipe", micro_batches=32) if case == "gpipe" else CASES[case](S)
    pipe = pipeline(model(), method, vectorize="auto")
    pipe.push(*doubles(1)[0])
    for told in pipe.vectorized.values():
        assert told.startswith("as one, F and B " if as_one else "as they are, for as one F and B are "), told
        assert as_one or (case in LEAP) == ("which pays from 1.2 on" in told)


@pytest.mark.parametrize(
    "options",
    [{"clip_norm": 1.0}, {"weights": "samples"}, {"optimizer": partial(torch.optim.RMSprop, lr=0.01)}],
    ids=["clipped", "samples", "RMSprop"],
)
def test_auto_asks_for_more_where_options_forbid_whole_ticks(options, monkeypatch):
    monkeypatch.setattr(Stack, "gain", lambda stack: 1.5)
    given = {"loss": mse_loss, "optimizer": OPTIMIZERS["momentum"], **options}
    pipe = pipeback.Pipeline(model(), method="pb", vectorize="auto", **given)
    pipe.push(*doubles(1)[0])
    (told,) = pipe.vectorized.values()
    assert "which pays from 2 on" in told


@pytest.mark.parametrize("vectorize", [True, "auto"])
@pytest.mark.parametrize("case", ["pb", "pipedream"])
def test_the_callers_random_state_stays(case, vectorize, leapt):
    """Stages are compared, measured and made graphs of, on numbers that nobody else draws."""
    some, state = doubles(60), torch.get_rng_state()
    pipe = pipeline(model(), case, micro_batch_size=3, vectorize=vectorize)
    torch.set_rng_state(state)
    pipe.push(*map(torch.cat, zip(*some, strict=True)))
    assert torch.equal(torch.get_rng_state(), state) and sum(leapt) > 30


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
