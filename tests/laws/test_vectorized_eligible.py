"""Which stages can run as one, what is said of those that cannot, and what "auto" asks for."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipeback
from pipeback import methods
from pipeback.vectorized.making import closeness
from pipeback.vectorized.making.graph_maker import GraphMaker
from pipeback.vectorized.stacks import whole_cost
from pipeback.vectorized.stacks.stack import Stack
from pipeback.vectorized.tracing.capture import Unlike
from tests.helpers.choice import diagonal, mostly_rare, rare
from tests.laws.as_one import LEAP, Doubled, Pair, S, Summed, doubles, model, pipelines, pushed, same, trained
from tests.laws.cases import CASES, OPTIMIZERS, network, pipeline, weights

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")


class Scaled(nn.Module):
    def __init__(self, by):
        super().__init__()
        self.linear, self.by = nn.Linear(6, 6), by

    def forward(self, x):
        return self.by * self.linear(x)


class Reading(nn.Module):
    """Reads something from its input."""

    def __init__(self, factor):
        super().__init__()
        self.linear, self.factor = nn.Linear(6, 6), factor

    def forward(self, x):
        return self.linear(x) + 0.0 * self.factor(x)


class Old(torch.autograd.Function):
    """As functions were written before torch could batch them."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: model(make=lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.1))), "draws random numbers"),
        (lambda: model(make=lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))), "changes a buffer"),
        (
            lambda: model(make=lambda: nn.Sequential(nn.Linear(6, 6), Branching())),
            "decides by the value of a tensor",
        ),
        (lambda: model(make=lambda: Reading(lambda x: x.sum().item())), "reads a number out of a tensor"),
        (lambda: model(make=lambda: Reading(lambda x: x.detach().numpy().mean())), "takes the values of a tensor out"),
        (lambda: model(make=lambda: Reading(lambda x: x[x > 0].sum())), "shape depends on values"),
        (lambda: model(make=lambda: Reading(lambda x: x.nonzero().sum())), "shape depends on values"),
        (lambda: model(make=lambda: Reading(lambda x: x.masked_select(x > 0).sum())), "shape depends on values"),
        (lambda: model(make=lambda: Reading(Old.apply)), "without `setup_context`"),
        (
            lambda: model(make=lambda: nn.Sequential(nn.Linear(6, 6), Masked())),
            "computes with tensors that are no weights, such as the buffer '1.mask'",
        ),
        (
            lambda: model(make=lambda: Scaled(torch.ones(6, dtype=torch.float64))),
            "their forward computes with tensors that are no weights",
        ),
    ],
    ids=[
        "dropout",
        "batch statistics",
        "branches",
        "a number",
        "numpy",
        "a mask",
        "nonzero",
        "selected",
        "a function",
        "a buffer",
        "a tensor",
    ],
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
    assert reason in found[0].vectorized["stages 1 … 5"]
    same(found[1:], wanted[1:])


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(6).double())

    def forward(self, x):
        return x * self.mask


class Branching(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def unlike():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Linear(4, 6)).double()


def test_stages_of_which_none_are_alike(leapt):
    """Each is a graph of its own where a whole tick is one function, and no part of it elsewhere."""
    with pytest.raises(ValueError, match='vectorize=True: no stages are alike .*vectorize="auto" or False'):
        pipeline(unlike(), "sgd", vectorize=True)
    assert pipeline(unlike(), "sgd", vectorize="auto").vectorized == {}
    one, other = pipelines("pb", build=unlike)
    same(pushed(other), pushed(one))
    assert list(other.vectorized) == ["stage 0", "stage 1", "stage 2"] and sum(leapt) > 30


def test_stages_that_compute_different_things():
    """They look alike; each is a graph of its own."""
    build = lambda: nn.Sequential(*[Scaled(by) for by in (1.0, 2.0, 1.0)], nn.Linear(6, 6)).double()  # noqa: E731
    torch.manual_seed(0)
    wanted = trained("pb", build=build)
    torch.manual_seed(0)
    found = trained("pb", build=build, vectorize=True)
    assert list(found[0].vectorized) == ["stage 0", "stage 1", "stage 2"]
    same(found[1:], wanted[1:])
    with pytest.raises(ValueError, match="no stages can run as one .*something else than"):
        pipeline(build(), "gpipe", vectorize=True).push(*doubles(1)[0])


class Every(nn.Module):
    """Gives what each of its blocks gives, so that a later stage hands on more."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(S)])

    def forward(self, x, beside):
        found = []
        for block in self.blocks:
            x = block(x)
            found.append(x)
        return sum(found) + beside


def test_stages_that_hand_on_more_are_not_alike():
    """Two of them may be given the same."""
    torch.manual_seed(0)
    x = torch.randn(2, 6, dtype=torch.float64)
    pipe = pipeline(Every().double(), CASES["pb"](S), vectorize=True, example=(x, x), stages="layer")
    pipe.push((x, x), x)
    assert not any("torch cannot run them" in told for told in pipe.vectorized.values())


def test_stages_that_hand_on_pairs():
    build = lambda: nn.Sequential(Doubled(), *[Pair() for _ in range(3)], Summed()).double()  # noqa: E731
    torch.manual_seed(0)
    wanted = trained("pb", build=build)
    torch.manual_seed(0)
    found = trained("pb", build=build, vectorize=True)
    assert list(found[0].vectorized) == ["stage 0", "stages 1, 2, 3"]
    same(found[1:], wanted[1:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vectorize": "yes"}, 'vectorize must be True, False, "auto" or "cuda_graph"'),
        ({"vectorize": "cuda_graph"}, 'vectorize="cuda_graph" needs all stages on a CUDA device; move the model'),
        ({"vectorize": "cuda_graph", "store": "host"}, "^a store does not .* use vectorize=True"),
        ({"vectorize": "auto", "activations": "host"}, "vectorize='auto' does not go with activations='host'"),
        ({"vectorize": True, "debug": pipeback.Debug(order="random")}, "does not go with order='random'"),
        ({"debug": pipeback.Debug(order="skewed"), "workers": 2}, 'order="skewed" does not go with workers=2'),
    ],
)
def test_what_does_not_go_together(options, message):
    with pytest.raises(ValueError, match=message):
        pipeline(network(), "pb", **options)


class Casting(Scaled):
    """Computes in bfloat16 with weights in float32."""

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


@pytest.mark.parametrize("case", ["pb", rare("cerebras"), rare("pipedream"), "gpipe-4", rare("pipemare")])
def test_autocast_inside_the_modules(case):
    """They round as in the event loop; and a constant is told apart, though it moves no more than rounding does."""
    some = [(x.float(), y.float()) for x, y in doubles(40)]
    build = partial(model, torch.float32, lambda: Casting(1.0))
    wanted, found = (trained(case, some=some, build=build, vectorize=vectorize) for vectorize in (False, True))
    assert any(told.startswith("as one") for told in found[0].vectorized.values())
    torch.testing.assert_close(found[1:], wanted[1:], rtol=1.6e-2, atol=1.6e-2, check_dtype=False)
    odd = build()
    odd[3].by = 1.01
    stack = trained(case, some=some[:1], build=lambda: odd, vectorize="auto")[0]._engine.stages[3].stack
    assert stack is None or stack.alone


class Waves(Scaled):
    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(super().forward(x)), n=6)


@pytest.mark.parametrize(("kind", "rough"), [(Scaled, False), (Waves, False), (Casting, True)])
def test_only_half_types_are_compared_roughly(kind, rough, monkeypatch):
    monkeypatch.setattr(closeness, "ROUGH", -1.0)
    monkeypatch.setattr(closeness, "TIMES", -1.0)  # nothing is as close as that
    some = [(x.float(), y.float()) for x, y in doubles(1)]
    pipe = trained("pb", some=some, build=partial(model, torch.float32, lambda: kind(1.0)), vectorize="auto")[0]
    assert all(stage.stack is None for stage in pipe._engine.stages[1:-1]) == rough


def test_what_a_run_as_one_cannot_do():
    pipe = trained("pb", some=doubles(5), vectorize=True)[0]
    with pytest.raises(ValueError, match="record: stages that run as one cannot be measured apart"):
        pipe.record()
    skewed = pipeline(network(), "pb", debug=pipeback.Debug(order="skewed"))
    with torch.autocast("cpu"), pytest.raises(ValueError, match='with order="skewed" a push leaves work to later'):
        skewed.push(*doubles(1)[0])
    hooked = model()
    hooked[2].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="there are hooks on their modules"):
        pipeline(hooked, "pb", vectorize=True).push(*doubles(1)[0])


@pytest.mark.parametrize(
    ("case", "gain", "as_one"),
    [("gpipe", 1.3, True), ("gpipe", 0.98, False), ("pb-slack1", 1.3, True), ("pipedream", 0.98, False),
     ("pipedream-vertical", 0.98, False), ("ef", 1.3, True), ("pipeoptim-xpipe", 1.3, True),
     *(rare(case, 1.3, True) for case in ("pb", "pipedream", "pipedream-vertical", "lwp-weight")),
     *(rare(case, 0.98, False) for case in ("pb", "ef"))],
)  # fmt: skip
def test_auto_asks_for_more_where_ticks_cost_more(case, gain, as_one, monkeypatch):
    """gain: what is measured. Ticks that are gone through stage by stage cost, and twice as many cost more."""
    monkeypatch.setattr(whole_cost, "gain", lambda stack, under, whole: gain)
    monkeypatch.setattr(Stack, "flush_gain", lambda stack, count: gain)
    method = methods.create("gpipe", micro_batches=32) if case == "gpipe" else CASES[case](S)
    pipe = pipeline(model(), method, vectorize="auto")
    pipe.push(*doubles(1)[0])
    for name, told in pipe.vectorized.items():
        if name == "stage 0":
            continue
        assert told.startswith("as one" if as_one else "stage by stage: as "), told
        assert as_one or (case in LEAP) == ("which pays from 1 on" in told)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"clip_norm": 1.0}, "as one, "),
        ({"optimizer": partial(torch.optim.RMSprop, lr=0.01)}, "which pays from 2 on"),
        ({"optimizer": partial(torch.optim.RMSprop, lr=0.01), "method": "pipedream"}, "which pays from 5 on"),
        # a micro-batch for itself needs no weight in the mean
        ({"micro_batch_size": pipeback.MicroBatches(weights="samples")}, "as one, "),
    ],
    ids=["clipped", "RMSprop", "in turns", "samples"],
)
def test_auto_asks_for_more_where_options_forbid_whole_ticks(options, told, monkeypatch):
    monkeypatch.setattr(whole_cost, "gain", lambda stack, under, whole: 1.5)
    given = {"loss": mse_loss, "optimizer": OPTIMIZERS["momentum"], "method": "pb", **options}
    pipe = pipeback.Pipeline(model(), vectorize="auto", **given)
    pipe.push(*doubles(1)[0])
    assert told in list(pipe.vectorized.values())[-1]


@pytest.mark.parametrize(("case", "vectorize"), diagonal(["pb", "pipedream"], [True, "auto"]))
def test_the_callers_random_state_stays(case, vectorize, leapt):
    """Stages are compared, measured and made graphs of, on numbers that nobody else draws."""
    some, state = doubles(60), torch.get_rng_state()
    pipe = pipeline(model(), case, micro_batch_size=3, vectorize=vectorize)
    torch.set_rng_state(state)
    pipe.push(*map(torch.cat, zip(*some, strict=True)))
    assert torch.equal(torch.get_rng_state(), state) and sum(leapt) > 30


@pytest.mark.parametrize(
    "case",
    mostly_rare(
        ["pb", "dc_asgd", "pipeoptim", "cerebras", "pipemare", "eigendelay", "pb-slack1"],
        "pipeoptim", "cerebras", "eigendelay", "pb-slack1",
    ),
)  # fmt: skip
def test_auto_times_what_a_micro_batch_costs(case, monkeypatch):
    """As one, one by one, and each as a graph of its own, with the method's update; no weight of the user's changes."""
    timed = []

    def seconds(calls, device, repeats=7):
        for call in calls:
            for _ in range(3):
                call()
        timed.append(len(calls))
        return [2.0, 1.0]

    monkeypatch.setattr(whole_cost, "seconds", seconds)
    pipe = pipeline(model(), CASES[case](S), vectorize="auto")
    before = weights(pipe)
    pipe._engine.ready(pipe._engine.batches(*doubles(1)[0]))
    assert set(timed) == {2} and len(timed) > 2
    assert torch.equal(weights(pipe), before) and not any(optimizer.state for optimizer in pipe.optimizers)
    assert all("which makes F, B and U 2.0 times as fast" in told for told in pipe.vectorized.values())


@pytest.mark.parametrize("apart", [True, False])
def test_auto_takes_graphs_of_single_stages_where_they_are_faster(apart, monkeypatch):
    monkeypatch.setattr(whole_cost, "gain", lambda stack, under, whole: 1.5)
    monkeypatch.setattr(whole_cost, "faster_apart", lambda stack, under, by: apart)
    pipe = pipeline(model(), CASES["dc_asgd"](S), vectorize="auto")
    pipe.push(*doubles(1)[0])
    assert ("stage 3" in pipe.vectorized) == apart


@pytest.mark.parametrize(
    ("case", "reason"),
    [("sgd", "at slack=0")],
)
def test_why_no_tick_is_one_function(case, reason):
    pipe = trained(case, some=doubles(3), vectorize=True)[0]
    assert all(f"no tick is one function: {reason}" in told for told in pipe.vectorized.values())


def test_auto_tells_what_it_measured():
    pipe = trained("pb", some=doubles(9), vectorize="auto")[0]
    assert len(pipe.vectorized) == 2 and all("times as fast" in told for told in pipe.vectorized.values())


def test_why_no_flush_is_done_as_a_whole():
    """Workers that hold few micro-batches at once would wait for each other."""
    pipe = trained("one_f_one_b-3", some=doubles(8), vectorize=True, workers=2)[0]
    pipe.close()
    assert all("several workers do whole flushes of gpipe alone" in told for told in pipe.vectorized.values())


def test_stages_that_turn_out_to_have_no_graphs_of_their_own(monkeypatch):
    def single(*_):
        raise Unlike("they compute now this, now that")

    monkeypatch.setattr(GraphMaker, "single", single)
    monkeypatch.setattr(whole_cost, "gain", lambda *_, **__: 2.0)
    wanted = trained("pb", some=doubles(9))
    found = trained("pb", some=doubles(9), vectorize="auto")
    assert "now this, now that" in found[0].vectorized["stages 1 … 5"]
    same(found[1:], wanted[1:])
