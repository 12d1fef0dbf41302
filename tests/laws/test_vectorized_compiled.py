"""Law: compiled ticks and ticks as graphs are the event loop, to rounding."""

from contextlib import contextmanager
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils._pytree import tree_map

import pipeback
from pipeback.vectorized.making.cuda_graph import CudaGraphed
from pipeback.vectorized.ticks.captured_ticks import CapturedTicks
from pipeback.vectorized.tracing.capture import capture_loss_stage
from tests.helpers.choice import mostly_rare, rare
from tests.laws.as_one import LEAP, SEVERAL, S, Twice, decayed, doubles, model, pipelines, pushed, same, trained, turns
from tests.laws.cases import CASES, allowed, pipeline, weights

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")


@pytest.fixture(autouse=True)
def forgotten():
    """What another test has compiled is not looked through."""
    torch._dynamo.reset()


AOT = {"backend": "aot_eager"}  # the same graphs, not compiled further


@pytest.mark.parametrize(
    ("case", "compile"),
    mostly_rare(
        product(["pb", "cerebras", "pipedream", "gpipe-4"], [False, True, AOT]),
        ("cerebras", AOT), ("pipedream", False),
    ),
)  # fmt: skip
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


@pytest.mark.parametrize("compile", [False, rare(True)])
def test_weights_with_one_gradient(compile, leapt, monkeypatch):
    monkeypatch.setattr("pipeback.vectorized.making.graph_maker.LARGE", 0)
    one, _ = pipelines("pb", build=partial(model, make=Twice))
    other = pipeline(model(make=Twice), "pb", micro_batch_size=3, vectorize=True, compile=compile)
    same(pushed(other), pushed(one))
    assert sum(leapt) > 30


@pytest.mark.parametrize(
    ("case", "large", "compile"),
    mostly_rare(
        product(("pb", "cerebras", "sc", "gpipe-4", "spectrain", "pipedream", "pipemare"), (0, 1 << 20), (True, AOT)),
        ("cerebras", 1 << 20, AOT), ("pipedream", 0, AOT),
    ),
)  # fmt: skip
def test_many_micro_batches_a_push_compiled(case, large, compile, leapt, monkeypatch):
    """large: bytes beyond which weights are stepped outside of what is compiled."""
    monkeypatch.setattr("pipeback.vectorized.making.graph_maker.LARGE", large)
    one, _ = pipelines(case)
    other = pipeline(model(), CASES[case](S), micro_batch_size=3, vectorize=True, compile=compile)
    same(pushed(other), pushed(one))
    assert (sum(leapt) > 30) == (case in LEAP)


@pytest.mark.parametrize(
    ("case", "optimizer", "compile"),
    mostly_rare(
        [
            (*some, compile)
            for some in (
                ("spectrain-v2", "momentum"), ("lwp-weight", "momentum"), ("lwp-weight", "adamw"), ("sc", "adam"),
                ("lwp-weight+sc", "adamw"), ("ef", "momentum"), ("dc_asgd", "adamw"), ("msnag-stash", "adamw"),
                ("gap_aware", "momentum"), ("dc_asgd+pipeoptim", "momentum"),
            )
            for compile in (True, AOT)
        ],
        ("lwp-weight+sc", "adamw", AOT),
    ),
)  # fmt: skip
def test_shifts_and_steps_of_every_optimizer_compiled(case, optimizer, compile, leapt, monkeypatch):
    monkeypatch.setattr("pipeback.vectorized.making.graph_maker.LARGE", 0)
    one, _ = pipelines(case, optimizer)
    other = pipeline(model(), CASES[case](S), optimizer, micro_batch_size=3, vectorize=True, compile=compile)
    same(pushed(other), pushed(one))
    assert sum(leapt) > 30


LAYOUTS = (), ("weight_decay", 0.1)
FEW = *LAYOUTS, ("momentum", 0.0), ("lr", 0.03)
ALL = *LAYOUTS, ("momentum", 0.5), ("momentum", 0.0), ("lr", 0.03)


@pytest.mark.parametrize(
    ("backend", "changes"),
    [
        pytest.param("inductor", ((), ()), id="inductor"), rare("aot_eager", LAYOUTS, id="aot_eager"),
        rare("aot_eager", FEW, id="aot_eager-few"),
        rare("inductor", LAYOUTS, id="inductor-all"), rare("aot_eager", ALL, id="aot_eager-all"),
    ],
)  # fmt: skip
def test_what_a_compiled_tick_takes_for_granted_may_change(backend, changes, leapt):
    """It is not checked at every call: how inputs lie in memory, decays, momentum, whether rates differ by stage.

    Where things lie is compiled in by inductor alone; numbers are by every backend, and one without C++ is soon done.
    """
    found = []
    for on in ({}, {"vectorize": True, "compile": {"backend": backend}}):
        pipe = pipeline(model(), "pb", micro_batch_size=3, **on)
        xs, ys = map(torch.cat, zip(*doubles(20 * len(changes)), strict=True))
        losses = []
        for n, (x, y) in enumerate(zip(xs.split(60), ys.split(60), strict=True)):
            for s, optimizer in enumerate(pipe.optimizers if changes[n] else ()):
                name, value = changes[n]
                optimizer.param_groups[0][name] = value * (1 + s / 10) if name == "lr" else value
            losses.append(pipe.push(*(v.t().contiguous().t() if n % 2 else v for v in (x, y))))
        found.append([torch.stack([loss.double() for loss in losses]), weights(pipe)])
    same(*reversed(found))
    assert sum(leapt) > 8 * len(changes)


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


@pytest.mark.parametrize("compile", [AOT, rare(True)])
def test_a_last_stage_whose_backward_gives_its_memory_away(compile):
    """A compiled graph of a norm goes backward once; which inputs get a gradient is asked for by that."""
    found = []
    for options in ({}, {"compile": compile}):
        net = model()
        net[-1] = nn.Sequential(nn.LayerNorm(6), net[-1]).double()
        pipe = pipeline(net, "pb", micro_batch_size=3, vectorize=True, **options)
        found.append(pushed(pipe, (9, 5)))
    same(*found)


@pytest.mark.parametrize("compile", [AOT, rare(True)])
def test_adam_of_compiled_ticks(compile, leapt):
    found = []
    for on in ({}, {"vectorize": True, "compile": compile}):
        pipe = pipeback.Pipeline(
            model(),
            loss=mse_loss,
            optimizer=decayed,
            method="pb",
            micro_batch_size=3,
            debug=pipeback.Debug(check_finite=True),
            **on,
        )

        def slower(n, pipe=pipe):
            for s, optimizer in enumerate(pipe.optimizers):
                optimizer.param_groups[0]["lr"] *= 0.9 + 0.01 * s

        found.append(pushed(pipe, before=slower))
    same(*reversed(found))
    assert sum(leapt) > 30


@pytest.mark.parametrize("compile", [False, rare(True)])
def test_a_loss_that_is_not_finite_moves_nothing_of_the_last_stage(compile, leapt):
    users = model()
    pipe = pipeline(
        users, "pb", micro_batch_size=3, vectorize=True, compile=compile, debug=pipeback.Debug(check_finite=True)
    )
    xs, ys = map(torch.cat, zip(*doubles(40), strict=True))
    pipe.push(xs[:60], ys[:60])
    ys[90] = float("nan")
    with pytest.raises(RuntimeError, match=r"stage 6 .*micro-batch 30: the loss is nan; lower the learning rate"):
        pipe.push(xs[60:], ys[60:])
    assert sum(leapt) > 5 and all(p.isfinite().all() for p in users.parameters())


@pytest.fixture
def further(monkeypatch):
    """How many ticks a graph did after one for which it got all from outside."""
    found, go_on = [], CapturedTicks.go_on
    monkeypatch.setattr(CapturedTicks, "go_on", lambda *given: found.append(go_on(*given)) or found[-1])
    return found


class Again(CudaGraphed):
    """A graph as the CPU can play it: the call once more, on what lies where it read, to where it wrote."""

    def captured(self, call):
        found = call()

        def replay():
            tree_map(lambda a, b: a if a is None else a.copy_(b), found, call())

        self.count = getattr(self, "count", 0) + 1
        return replay, found


@pytest.mark.parametrize("changes", [True, False])
@pytest.mark.parametrize("optimizer", ["momentum", "sgd", "adamw"])
@pytest.mark.parametrize("case", mostly_rare(["pb", "cerebras", "pipedream", "pipemare"], "cerebras", "pipedream"))
def test_ticks_as_graphs(case, optimizer, changes, leapt, further):
    """What changes from tick to tick is copied to where a graph reads, or handed on within it; rates may change."""
    if not allowed(case, optimizer):
        return
    found, graphs = [], []
    for pipe in pipelines(case, optimizer):
        for stack in pipe._engine.setting.stacks:
            stack.maker.fuse = lambda function: graphs.append(Again(function)) or graphs[-1]

        def slower(n, pipe=pipe):
            for each in pipe.optimizers:
                each.param_groups[0]["lr"] *= 0.8

        found.append(pushed(pipe, **({"before": slower} if changes else {})))
    same(*reversed(found))
    assert sum(leapt) > 30 and [graph.count for graph in graphs] == [1] * turns(case)
    # in a run of ticks with one rate, at which all stages run, and B on the newest weights
    assert sum(further) > 15 or changes or case in ("pipedream", "pipemare")


@pytest.mark.parametrize(
    ("case", "sizes", "room", "graphs"),
    [
        ("pb", (20, 1, 29), True, 1),
        ("pb", (20, 1, 29), False, 0),
        ("pb", (8, 42), True, 0),
        ("gpipe-4", (48,), True, 0),
    ],
)
def test_auto_on_one_device_that_has_graphs(case, sizes, room, graphs, monkeypatch):
    """Ticks become graphs if the first push is of more than a few micro-batches and there is room; no flush does."""
    made, stacks = [], "pipeback.vectorized.stacks"
    monkeypatch.setattr("pipeback.pipeline.build._graphed", lambda *given: True)
    monkeypatch.setattr(f"{stacks}.choose_stacks.CudaGraphed", lambda tick: made.append(Again(tick)) or made[-1])
    monkeypatch.setattr(f"{stacks}.fit_stacks.room_for", lambda nbytes, device: room)
    one, _ = pipelines(case, "momentum")
    auto = pipeline(model(), CASES[case](S), "momentum", micro_batch_size=3, vectorize="auto")
    same(pushed(auto, sizes), pushed(one, sizes))
    assert [graph.count for graph in made] == [1] * graphs


def test_auto_goes_on_with_graphs_where_a_state_has_some_in_flight(monkeypatch):
    """Also if the first push after it is of a single micro-batch."""
    monkeypatch.setattr(
        "pipeback.pipeline.build._graphed", lambda stages, options, holding: options.vectorize == "auto"
    )
    monkeypatch.setattr("pipeback.vectorized.stacks.choose_stacks.CudaGraphed", Again)
    found, (xs, ys) = [], map(torch.cat, zip(*doubles(50), strict=True))
    for on in (False, "auto"):
        pipe = pipeline(model(), "pb", "momentum", micro_batch_size=3, vectorize=on)
        pipe.push(xs[:60], ys[:60])
        state = pipe.state_dict()
        pipe = pipeline(model(), "pb", "momentum", micro_batch_size=3, vectorize=on)
        pipe.load_state_dict(state)
        for begin, end in ((60, 63), (63, 66), (66, 150)):
            pipe.push(xs[begin:end], ys[begin:end])
        found.append(weights(pipe))
    same([found[1]], [found[0]])


def test_a_tick_that_cannot_be_captured_says_what_to_use(monkeypatch):
    @contextmanager
    def refused(graph):
        yield
        raise RuntimeError("operation not permitted when stream is capturing\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr("pipeback.pipeline.build._graphed", lambda *given: True)
    monkeypatch.setattr(torch.cuda, "graph", refused)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    told = r"stages 0 … 5 and the loss: a tick failed: it cannot become a CUDA graph \(operation not permitted when "
    xs, ys = map(torch.cat, zip(*doubles(20), strict=True))
    with pytest.raises(pipeback.StageError, match=told + r"stream is capturing\); use vectorize=True$"):
        pipeline(model(), "pb", "momentum", micro_batch_size=3, vectorize="auto").push(xs, ys)
    monkeypatch.undo()
    assert pipeline(model(), "pb", "momentum", micro_batch_size=3, vectorize=True).push(xs, ys).isfinite()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: ticks as CUDA graphs")
@pytest.mark.parametrize(("case", "optimizer"), [("pb", "momentum"), ("pb", "adamw"), ("cerebras", "momentum")])
def test_ticks_as_cuda_graphs(case, optimizer, leapt):
    xs, ys = (torch.cat(v).cuda() for v in zip(*doubles(50), strict=True))
    found = []
    for on in (False, "cuda_graph"):
        pipe = pipeline(model().cuda(), CASES[case](S), optimizer, micro_batch_size=3, vectorize=on)
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
    assert (
        "changes a buffer" in pipe.vectorized["stages 1 … 5"]
        and pipe._engine.stages[2].call is not pipe._engine.stages[2].module
    )
    same(found, wanted, 0)


@pytest.mark.parametrize("case", mostly_rare(SEVERAL, "pipedream-vertical"))
def test_ticks_that_are_not_compiled(case, leapt):
    """Their forwards and backwards are compiled, and called tick by tick."""
    one, _ = pipelines(case)
    other = pipeline(model(), CASES[case](S), micro_batch_size=3, vectorize=True, compile=AOT)
    same(pushed(other), pushed(one))
    assert not sum(leapt)
    assert all("which no compiled tick does" in told for name, told in other.vectorized.items() if name != "stage 0")
