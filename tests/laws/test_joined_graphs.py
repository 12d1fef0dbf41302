"""Law: within a whole flush, and in plain training, stages of one worker make one graph of a micro-batch, and no bit
changes.
"""

from itertools import product

import pytest
import torch
from torch import nn

import pipeback
from pipeback.runtime.loop import Loop
from pipeback.schedules.placement import place
from tests.helpers.choice import diagonal, mostly_rare
from tests.laws.cases import everything

FLUSHING = ("gpipe", "one_f_one_b", "zb_h1", "zb_h2", "interleaved", "looped_bfs", "zb_v")
WIDTH = 6


class InPlace(nn.Module):
    """Changes its input in place."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x.mul_(1.5).tanh_())


class Two(nn.Module):
    """Gives what it was given, and something new."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x, self.linear(x).tanh()


class Odd(nn.Module):
    """Its output, and so the gradient that it hands on, is laid otherwise than its input."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return (self.linear(x).t().contiguous() * x.t().exp()).t()


class Join(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, both):
        x, y = both
        return self.linear(x) + x * y


def frozen(module):
    return module.requires_grad_(False)


def model():
    torch.manual_seed(3)
    return nn.Sequential(
        frozen(nn.Linear(WIDTH, WIDTH)),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)),
        InPlace(),
        nn.Tanh(),
        Odd(),
        Two(),
        Join(),
        frozen(nn.Linear(WIDTH, WIDTH)),
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH)),
        InPlace(),
        nn.Linear(WIDTH, WIDTH),
        nn.Linear(WIDTH, WIDTH),
    ).double()


def pipeline(method, net=None, **options):
    return pipeback.Pipeline(
        model() if net is None else net,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        method=method,
        **{"loss": nn.functional.mse_loss, "micro_batch_size": 4, **options},
    )


def evenly_placed(pipe):
    """A pipeline of 8 stages and 2 workers whose parts have as many stages, whatever these take here and now."""
    parts = [s * 2 * pipe.method.chunks // 8 for s in range(8)]
    pipe._engine.holding.placement = lambda seconds=None: place(pipe.method.placement, 2, parts)
    return pipe


def data(pushes, micro_batches=5):
    torch.manual_seed(1)
    return [torch.randn(2, 4 * micro_batches, WIDTH, dtype=torch.float64).unbind() for _ in range(pushes)]


def trained(method, batches, **options):
    torch.manual_seed(7)
    pipe = pipeline(method, **options)
    losses = torch.stack([pipe.push(x.clone(), y).clone() for x, y in batches])
    result = losses, everything(pipe), [(r.stage, r.kind, r.mb, r.version) for r in pipe.ledger]
    pipe.close()
    return result


@pytest.mark.filterwarnings("ignore:.*takes its statistics")
@pytest.mark.parametrize(
    ("name", "options"),
    diagonal(FLUSHING, [{}, {"clip_norm": 0.1}, {"micro_batch_size": pipeback.MicroBatches(4, weights="samples")}]),
)
def test_workers_equal_the_event_loop(name, options):
    batches = data(3)
    if "micro_batch_size" in options:
        batches[1] = batches[1][0][:18], batches[1][1][:18]
    losses, weights, ledger = trained("gpipe", batches, **options)
    for workers in (2, 3):
        found = trained(name, batches, workers=workers, **options)
        assert torch.equal(found[0], losses) and torch.equal(found[1], weights), workers
        assert sorted(found[2]) == sorted(ledger)


class Probe(nn.Module):
    """Notes whether its input is where a graph begins."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()
        self.begins = []

    def forward(self, x):
        self.begins.append(x.is_leaf)
        return self.linear(x)


@pytest.mark.parametrize("name", FLUSHING)
def test_only_the_first_stage_of_a_part_begins_a_graph(name):
    """Unless somebody listens to a stage, which then runs alone; stages of a split backward run alone, too."""
    probes = [Probe() for _ in range(8)]
    pipe = evenly_placed(pipeline(name, nn.Sequential(*probes), workers=2))
    ((x, y),) = data(1)

    def begin():
        for probe in probes:
            probe.begins.clear()
        pipe.push(x, y)
        pipe.wait()
        return [set(probe.begins) for probe in probes]

    heads = {0, 2, 4, 6} if pipe.method.chunks == 2 else {0, 4}
    alone = {"zb_h1": {4, 5, 6, 7}, "zb_h2": {4, 5, 6, 7}, "zb_v": set(range(2, 8))}.get(name, set())
    begin()
    assert begin() == [{s in heads | alone} for s in range(8)]
    probes[1].linear.register_forward_hook(lambda *_: None)
    assert begin() == [{s in heads | alone | {1, 2}} for s in range(8)]
    pipe.close()


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise ArithmeticError("no gradient")


class Broken(nn.Module):
    """Fails at its n-th micro-batch."""

    def __init__(self, what, n):
        super().__init__()
        self.linear, self.what, self.left = nn.Linear(WIDTH, WIDTH).double(), what, n

    def forward(self, x):
        self.left -= 1
        y = self.linear(x)
        if self.left or not self.training:
            return y
        if self.what == "forward":
            raise ArithmeticError("no output")
        if self.what == "function":
            return Fails.apply(y)
        if self.what == "hook":
            y.register_hook(lambda g: g[:, 7])
            return y
        return y * float("nan")


ERRORS = {
    "forward": "micro-batch {}: the forward failed: no output",
    "function": "micro-batch {}: the backward failed: no gradient",
    "hook": "micro-batch {}: the backward failed: index 7 is out of bounds",
    "value": "micro-batch {}: the output is not finite",
}
AT, NAMES = (1, 2, 5, 6), ("gpipe", "one_f_one_b", "interleaved")


@pytest.mark.parametrize(
    ("name", "what", "at"),
    mostly_rare(
        product(NAMES, ERRORS, AT),
        *((name, what, AT[(n + m) % 4]) for n, name in enumerate(NAMES) for m, what in enumerate(ERRORS)),
    ),
)
def test_an_error_names_its_stage(name, what, at):
    told = ERRORS[what]
    net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH).double() for _ in range(8)])
    net[at] = Broken(what, 10**6)
    pipe = evenly_placed(pipeline(name, net, workers=2, debug=pipeback.Debug(check_finite=True)))
    batches = data(2)
    pipe.push(*batches[0])
    pipe.wait()
    net[at].left = 3  # the third micro-batch of the next flush
    if what == "value":  # the last worker alone sees the loss, and what its own stages have computed
        at = next(s for s in ((2, 3, 6, 7) if name == "interleaved" else (4, 5, 6, 7)) if s >= at)
    with pytest.raises(pipeback.StageError, match=rf"stage {at} \({at}\), " + told.format(7)):
        pipe.push(*batches[1])
        pipe.wait()
    pipe.close()


# -- in one worker -----------------------------------------------------------------------------------------------------


@pytest.fixture
def cut(monkeypatch):
    """A function from whose call on each stage makes a graph of its own."""
    return lambda: monkeypatch.setattr(Loop, "_flushes", lambda self: False)


ALONE = ("sgd", "gpipe")
OPTIONS = (
    {}, {"clip_norm": 0.1}, {"micro_batch_size": pipeback.MicroBatches(4, weights="samples")}, {"micro_batch_size": 3},
    {"activations": ["device"] * 4 + ["recompute"] * 2 + ["device"] * 6},
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*takes its statistics")
@pytest.mark.parametrize(("name", "options"), product(ALONE, OPTIONS), ids=str)
def test_bits_are_those_of_graphs_that_are_cut(name, options, cut):
    batches = data(3, micro_batches=14)  # more than there are stages
    found = trained(name, batches, **options)
    cut()
    wanted = trained(name, batches, **options)
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
    assert sorted(found[2]) == sorted(wanted[2])


@pytest.mark.parametrize("name", ALONE)
def test_all_stages_make_one_graph(name):
    """Unless somebody listens to a stage; after a push nothing of it is left."""
    probes = [Probe() for _ in range(6)]
    pipe = pipeline(name, nn.Sequential(*probes))
    ((x, y),) = data(1)

    def begin():
        for probe in probes:
            probe.begins.clear()
        pipe.push(x, y)
        return [s for s, probe in enumerate(probes) if all(probe.begins)]

    begin()
    assert begin() == [0]
    assert not any(pipe._engine.loops[0].worker.executor.joined.flying)
    probes[1].linear.register_forward_hook(lambda *_: None)
    assert begin() == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "what", "listens"),
    mostly_rare(product(ALONE, ERRORS, (False, True)),
                *((name, what, (n + m) % 2 == 0) for n, name in enumerate(ALONE) for m, what in enumerate(ERRORS))),
)  # fmt: skip
def test_what_has_failed_leaves_no_trace(name, what, listens, cut):
    """The next micro-batch has its number. listens: from then on, a stage runs alone."""
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH).double() for _ in range(6)])
        net[2] = Broken(what, 10**6)
        pipe = pipeline(name, net, debug=pipeback.Debug(check_finite=True))
        batches = data(3)
        pipe.push(*batches[0])
        net[2].left = 3  # the third micro-batch
        with pytest.raises(pipeback.StageError, match=r"stage 2 \(2\), " + ERRORS[what].format(7)):
            pipe.push(*batches[1])
        handle = net[4].register_forward_hook(lambda *_: None) if listens else None
        found.append([torch.tensor(pipe.arrived), pipe.push(*batches[2]), everything(pipe)])
        del handle
        cut()
    assert all(map(torch.equal, *found))


def test_a_stage_holds_what_its_schedule_says():
    """1F1B does not: its stages hold fewer micro-batches than would fly in one graph."""
    ((x, y),) = data(1, micro_batches=8)
    for name, held in (("sgd", [1] * 12), ("gpipe", [8] * 12), ("one_f_one_b", [8, 8, 8, 8, 8, 7, 6, 5, 4, 3, 2, 1])):
        pipe = pipeline(name)
        pipe.push(x, y)
        assert [stage.peak_flights for stage in pipe._engine.stages] == held


def test_what_is_dropped_leaves_no_trace(cut):
    """Where the loss is computed outside."""
    found = []
    for _ in range(2):
        pipe = pipeline("sgd", loss=None, micro_batch_size=None)
        for n, (x, y) in enumerate(data(5, micro_batches=1)):
            output = pipe.forward(x)
            if n in (0, 3):
                pipe.forget()
                continue
            nn.functional.mse_loss(output, y).backward()
            pipe.backward(output.grad)
            pipe.step()
        found.append(everything(pipe))
        cut()
    assert torch.equal(*found)


def test_it_is_measured_and_watched_stage_by_stage():
    """Also from a micro-batch on that has gone forward before."""
    pipe = pipeline("sgd", loss=None, micro_batch_size=None)
    ((x, y),) = data(1, micro_batches=1)
    for n in range(3):
        output = pipe.forward(x)
        if n == 1:
            pipe._engine.loops[0].worker.record(True)
        nn.functional.mse_loss(output, y).backward()
        pipe.backward(output.grad)
        pipe.step()
    kinds = [kind for *_, kind, _ in pipe._engine.loops[0].worker.trace]
    assert kinds.count("F") == 12 and kinds.count("B") == 12
