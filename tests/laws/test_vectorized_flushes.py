"""Law: flushes that are done as a whole, each stage on all micro-batches at once, are the event loop to rounding."""

from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import pipeback
from pipeback import methods
from tests.helpers.choice import diagonal, mostly_rare, rare
from tests.laws.as_one import FLUSH, Doubled, Pair, S, Summed, Twice, block, doubles, model, pipelines, pushed, same
from tests.laws.cases import CASES, OPTIMIZERS, everything, pipeline, weights

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")


@pytest.mark.parametrize("case", mostly_rare(FLUSH, "gpipe-4", "one_f_one_b-3", "zb_h1-4"))
def test_many_micro_batches_a_push(case, flushed):
    one, other = pipelines(case)
    same(pushed(other), pushed(one))
    assert sorted(other.ledger) == sorted(one.ledger) and sum(flushed) > 20
    if not case.startswith("zb"):  # where the event loop splits backwards, and so holds more
        assert [s.peak_flights for s in other._engine.stages] == [s.peak_flights for s in one._engine.stages]


OPTIONS = [
    (*which, options)
    for options in (
        {"clip_norm": 0.02}, {"clip_norm": pipeback.Clipping(value=0.01)}, {"micro_batch_size": 2},
        {"micro_batch_size": pipeback.MicroBatches(2, weights="samples")}, {"activations": "recompute"},
    )
    for which in (("gpipe-4", "momentum"), ("one_f_one_b", "adamw"))
]  # fmt: skip


@pytest.mark.parametrize(("case", "optimizer", "options"), mostly_rare(OPTIONS, *OPTIONS[::3], OPTIONS[4]), ids=str)
def test_options(case, optimizer, options, flushed):
    """Micro-batches of two, of which some are short, of another form."""
    one, other = pipelines(case, optimizer, **options)
    same(pushed(other, (9, 1, 23, 4)), pushed(one, (9, 1, 23, 4)))
    assert sum(flushed) > 20


def saved_and_loaded(pair, count, at, saved):
    """A state after `at` of `count` micro-batches, of the event loop or (`saved`) of whole flushes, goes on in these.

    pair: makes a pipeline of each.
    """
    x, y = (torch.cat(some) for some in zip(*doubles(count), strict=True))
    whole, after = pair()
    before = list(pair())[saved]
    for pipe in (whole, before):
        pipe.push(x[: 3 * at], y[: 3 * at])
    after.load_state_dict(before.state_dict())
    for pipe in (whole, after):
        pipe.push(x[3 * at :], y[3 * at :])
    same([weights(after)], [weights(whole)])
    whole.drain()
    after.drain()
    same([weights(after)], [weights(whole)])


@pytest.mark.parametrize(
    ("case", "saved", "at"),
    mostly_rare(
        product(FLUSH, [False, True], [24, 30]), ("gpipe-4", False, 24), ("one_f_one_b-3", True, 30),
        ("zb_h1-4", True, 24),
    ),
)  # fmt: skip
def test_states_in_flight_go_on(case, saved, at, flushed):
    """Saved by one and the other, at the end of a flush and amid one."""
    saved_and_loaded(lambda: pipelines(case), 49, at, saved)
    assert flushed


class Noisy(nn.Module):
    """Draws random numbers, and keeps statistics of the batch."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2))

    def forward(self, x):
        return self.inner(x)


def mixed():
    """Two that run one micro-batch after the other, among others."""
    torch.manual_seed(0)
    return nn.Sequential(block(), Noisy(), block(), Doubled(), Pair(), Summed(), Noisy(), nn.Linear(6, 6)).double()


def of_pictures():
    torch.manual_seed(0)
    convolution = lambda: nn.Sequential(nn.Conv1d(2, 2, 3, padding=1), nn.GroupNorm(1, 2), nn.ReLU())  # noqa: E731
    return nn.Sequential(
        nn.Unflatten(1, (2, 3)), convolution(), convolution(), nn.Sequential(nn.Flatten(), nn.Linear(6, 6))
    ).double()  # fmt: skip


@pytest.mark.parametrize(
    ("case", "build"), diagonal(["one_f_one_b-3", "gpipe"], [mixed, of_pictures, partial(model, make=Twice)])
)
def test_stages_of_all_kinds(case, build, flushed):
    found = []
    for vectorize in (False, True):
        torch.manual_seed(0)  # random streams begin with it
        pipe = pipeline(build(), CASES[case](S), micro_batch_size=3, vectorize=vectorize)
        found.append([*pushed(pipe), everything(pipe)])
    same(*reversed(found))
    assert sum(flushed) > 20


def test_words_and_classes(flushed):
    """Indices go in, and classes are the targets; the rates change at every push."""
    found = []
    for vectorize in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(9, 6), *(block() for _ in range(3)), nn.Linear(6, 5)).double()
        pipe = pipeback.Pipeline(
            net, loss=cross_entropy, optimizer=OPTIMIZERS["momentum"], method="one_f_one_b", micro_batch_size=2,
            vectorize=vectorize,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        losses = []
        for n in range(5):
            for optimizer in pipe.optimizers:
                optimizer.param_groups[0]["lr"] = 0.02 / (1 + n)
            x, y = (torch.randint(0, most, (16,), generator=generator) for most in (9, 5))
            losses.append(pipe.push(x, y).double() + 0)
        found.append([torch.stack(losses), weights(pipe)])
    same(*found)
    assert flushed == [8] * 5


def test_a_loss_of_the_users_own(flushed):
    """It is asked for every micro-batch."""
    seen = []

    def loss(output, target):
        seen.append(len(output))
        return mse_loss(output, target) * (1 + (output > 0).sum())

    found = []
    for vectorize in (False, True):
        pipe = pipeback.Pipeline(
            model(), loss=loss, optimizer=OPTIMIZERS["momentum"], method="gpipe", micro_batch_size=3,
            vectorize=vectorize,
        )  # fmt: skip
        found.append(pushed(pipe))
    same(*reversed(found))
    assert sum(flushed) == 50 and len(seen) >= 100


def test_a_loss_that_is_not_finite_changes_nothing(flushed):
    _, pipe = pipelines("gpipe", debug=pipeback.Debug(check_finite=True))
    xs, ys = map(torch.cat, zip(*doubles(8), strict=True))
    pipe.push(xs, ys)
    pipe.wait()
    before = [p.detach().clone() for stage in pipe._engine.stages for p in stage.module.parameters()]
    xs[7] = float("inf")
    with pytest.raises(pipeback.StageError, match="micro-batch 10: the loss is nan"):
        pipe.push(xs, ys)
    with pipe.shown():
        after = [p.detach().clone() for stage in pipe._engine.stages for p in stage.module.parameters()]
    assert flushed == [8] and all(map(torch.equal, after, before))


def test_memory_is_that_of_the_schedule(flushed):
    """1F1B holds fewer micro-batches than GPipe; what a flush holds at once is no more."""
    held = {}
    for name in ("gpipe", "one_f_one_b"):
        for vectorize in (False, True):
            pipe = pipeline(model(), name, micro_batch_size=3, vectorize=vectorize)
            pushed(pipe, (32, 32))
            stages = pipe._engine.stages[:-1]
            held[name, vectorize] = sum(
                stage.stack.flushed if vectorize else stage.learnt.activation_bytes * stage.peak_flights
                for stage in stages
            )
    assert held["one_f_one_b", True] < 0.2 * held["gpipe", True]
    for name in ("gpipe", "one_f_one_b"):
        assert 0 < held[name, True] <= held[name, False]


def test_the_training_mode_and_hooks_are_seen(flushed):
    """Graphs are of the mode in which micro-batches come, and hooks on the last stage are called."""
    found, heard = [], []
    for vectorize in (False, True):
        net = model()
        net[-1] = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.0))
        net.double()
        pipe = pipeline(net, "gpipe", micro_batch_size=3, vectorize=vectorize)
        losses = []
        for n, (x, y) in enumerate(
            zip(*(v.split(24) for v in map(torch.cat, zip(*doubles(32), strict=True))), strict=True)
        ):
            if n == 2:
                pipe._engine.stages[-1].module.register_forward_hook(lambda *_: heard.append(0))
            losses.append(pipe.push(x, y).double() + 0)
        found.append([torch.stack(losses), weights(pipe)])
    same(*found)
    assert len(heard) == 2 * 16


def test_masters(flushed):
    """Each stage steps its own and rounds them; sums over micro-batches differ in rounding of the half type."""
    found = []
    for vectorize in (False, True):
        pipe = pipeline(
            model(torch.bfloat16), "gpipe", micro_batch_size=3, vectorize=vectorize, masters=True, clip_norm=0.5
        )  # fmt: skip
        xs, ys = (torch.cat(some).bfloat16() for some in zip(*doubles(32), strict=True))
        losses = [float(pipe.push(x, y)) for x, y in zip(xs.split(24), ys.split(24), strict=True)]
        found.append((torch.tensor(losses), weights(pipe)))
    same(*found, within=0.02)
    assert flushed == [8] * 4


class Scaled(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.by = 1.0

    def forward(self, x):
        return self.by * super().forward(x)


@pytest.mark.parametrize("which", [rare([0]), [2], [1, 2, 3], [-1]], ids=str)
def test_what_a_module_computes_may_change(which, flushed):
    """Of one stage, which the others are not like then, or of all."""
    found = []
    for vectorize in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(*(Scaled(6, 6) for _ in range(5))).double()
        pipe = pipeline(net, "gpipe", micro_batch_size=3, vectorize=vectorize)
        xs, ys = map(torch.cat, zip(*doubles(24), strict=True))
        losses = []
        for n, (x, y) in enumerate(zip(xs.split(24), ys.split(24), strict=True)):
            for k in which if n == 1 else ():
                net[k].by = 3.0
            losses.append(float(pipe.push(x, y)))
        found.append((torch.tensor(losses, dtype=torch.float64), weights(pipe)))
    same(*found)
    assert flushed == [8, 8, 8]


# groups of a pipeline that is never emptied, all of which run on one older version


def two_versions(m=S + 1, slack=1):
    return methods.create("pipedream_2bw", micro_batches=m, slack=slack)


GROUPS = {
    "least": (two_versions(), "momentum"), "more": (two_versions(11), "adamw"),
    "slack2": (two_versions(2 * S, 2), "momentum"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "sizes"), diagonal(GROUPS, [(50,), (9, 1, 23, 2, 15), (40, 3, 30, 30, 16, 50)]), ids=str
)
def test_groups_between_two_updates(name, sizes, flushed):
    method, optimizer = GROUPS[name]
    one, other = pipelines(method, optimizer)
    same(pushed(other, sizes), pushed(one, sizes))
    assert sorted(other.ledger) == sorted(one.ledger)
    assert [s.peak_flights for s in other._engine.stages] == [s.peak_flights for s in one._engine.stages]
    assert [s.version for s in other._engine.stages] == [s.version for s in one._engine.stages]
    m, ahead = method.micro_batches, method.slack * (S - 1)
    least = sum(max(0, size - ahead) // m - 1 for size in sizes if size >= ahead + m)
    assert len(flushed) >= max(least, sizes[0] >= ahead + m) and set(flushed) <= {m}


@pytest.mark.parametrize("options", [{"clip_norm": 0.02}, {"micro_batch_size": 2}], ids=str)
def test_options_of_groups(options, flushed):
    one, other = pipelines(two_versions(), **options)
    same(pushed(other, (40, 30)), pushed(one, (40, 30)))
    assert len(flushed) >= 4


def test_rates_between_groups(flushed):
    """Those of a group's last micro-batch count; some are pushed at others."""
    found = []
    for pipe in pipelines(two_versions()):

        def slower(n, pipe=pipe):
            for optimizer in pipe.optimizers:
                optimizer.param_groups[0]["lr"] *= 0.7

        found.append(pushed(pipe, (37, 30, 27), slower))
    same(*reversed(found))
    assert len(flushed) >= 4


@pytest.mark.parametrize(("saved", "at"), diagonal([False, True], [24, 30, 37]))
def test_states_amid_groups_go_on(saved, at, flushed):
    saved_and_loaded(lambda: pipelines(two_versions()), 80, at, saved)
    assert flushed


def test_losses_that_are_read_between_groups(flushed):
    found = []
    for pipe in pipelines(two_versions()):
        xs, ys = map(torch.cat, zip(*doubles(150), strict=True))
        losses = [pipe.push(x, y).double() + 0 for x, y in zip(xs.split(90), ys.split(90), strict=True)]
        found.append([torch.stack(losses), weights(pipe)])
    same(*reversed(found))
    assert len(flushed) >= 8


# where the loss is computed outside of the pipeline


def judged(pipe, sizes, accumulates=1):
    """Train on so many micro-batches at a time; losses, and weights after each step."""
    some, found = iter(doubles(sum(sizes))), []
    for n, size in enumerate(sizes):
        xs, ys = zip(*(next(some) for _ in range(size)), strict=True)

        def judge(k, output, ys=ys):
            loss = mse_loss(output, ys[k])
            found.append(loss.detach())
            loss.backward()
            return output.grad

        (output,) = pipe.forward_many(xs, expected=size, judge=judge)
        pipe.backward(judge(size - 1, output))
        if n % accumulates == accumulates - 1:
            pipe.step()
            found.append(weights(pipe))
    return [v.reshape(-1) for v in found]


@pytest.mark.parametrize(
    ("case", "accumulates"),
    mostly_rare(
        product(["gpipe", "gpipe-4", "one_f_one_b", "one_f_one_b-3", "zb_h1-4"], [1, 2]),
        ("gpipe-4", 1), ("one_f_one_b-3", 2), ("zb_h1-4", 1),
    ),
)  # fmt: skip
def test_a_loss_that_is_computed_outside(case, accumulates, flushed):
    """All but the newest micro-batch of a flush are judged within the forward; its backward ends the flush."""
    found = []
    for vectorize in (False, True):
        pipe = pipeback.Pipeline(
            model(), loss=None, optimizer=OPTIMIZERS["adamw"], method=CASES[case](S), vectorize=vectorize,
            clip_norm=0.05,
        )  # fmt: skip
        found.append(judged(pipe, (12, 3, 1, 8, 12, 24), accumulates))
    same(*reversed(found))
    assert sum(flushed) >= 24 or accumulates == 2
    assert sorted(pipe.ledger)


def test_a_state_between_flushes_that_are_judged_outside(flushed):
    build = lambda on: pipeback.Pipeline(  # noqa: E731
        model(), loss=None, optimizer=OPTIMIZERS["momentum"], method="gpipe", vectorize=on
    )
    whole, before, after = build(False), build(True), build(True)
    for pipe in (whole, before):
        judged(pipe, (8, 8))
    after.load_state_dict(before.state_dict())
    same(judged(after, (8,)), judged(whole, (8,)))
    assert flushed == [8, 8, 8]


@pytest.mark.parametrize("case", ["gpipe-4", "one_f_one_b"])
def test_torchs_default_device_is_of_no_consequence(case, flushed):
    (one, other), (x, y) = pipelines(case), (torch.cat(some) for some in zip(*doubles(4), strict=True))
    expected = one.push(x, y)
    with torch.device("meta"):
        found = other.push(x, y)
    same([found], [expected])
    assert sum(flushed)
