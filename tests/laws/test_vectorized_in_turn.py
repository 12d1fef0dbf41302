"""Law: where the loss of each micro-batch is awaited before the next one comes, micro-batches go in turn through stages
that run as one, and are the event loop to rounding, states in flight included.
"""

from itertools import product

import pytest
import torch
from torch.nn.functional import mse_loss

import pipeback
from tests.helpers.choice import diagonal, mostly_rare, rare
from tests.laws.as_one import FLUSH, GROUPED, LEAP, S, block, doubles, model, pipelines, same
from tests.laws.cases import CASES, OPTIMIZERS, everything
from tests.laws.test_vectorized_short_pushes import read, unlike

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")
EVERY = sorted(LEAP)
ONES = (30, *[1] * 25, 2, 3, 9, 1, 1)


def headless():
    """Whose last stage is like the others, but for the loss."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*[block() for _ in range(S)]).double()


@pytest.mark.parametrize(
    ("case", "build"),
    mostly_rare(
        product(EVERY, [model, unlike]), ("cerebras", model), ("pipedream", unlike), ("gap_aware", model),
        ("pipemare-t3", unlike), ("pipedream-vertical", model),
    ),
)  # fmt: skip
def test_each_loss_is_awaited(case, build, turned):
    one, other = pipelines(case, build=build)
    same(read(other, ONES), read(one, ONES))
    assert sum(turned) == 25 + 2 + 3 + 2


@pytest.mark.parametrize("case", mostly_rare([*GROUPED, *FLUSH], "pipedream_2bw", "gpipe-4"))
def test_each_loss_of_a_group_is_awaited(case):
    """Stages that are alike do F one by one, and B as one."""
    one, other = pipelines(case)
    same(read(other, ONES), read(one, ONES))


@pytest.mark.parametrize(
    ("case", "optimizer"), [
        ("pb", "adamw"), rare("cerebras", "momentum"), ("pipemare-t3", "momentum"), ("pipedream-vertical", "momentum"),
    ],
)  # fmt: skip
def test_states_in_flight_and_rates_that_change(case, optimizer, turned):
    """A pipeline that goes on with a state gives the same bits."""
    found = []
    for pipe in pipelines(case, optimizer):
        xs, ys = map(torch.cat, zip(*doubles(60), strict=True))

        def train(pipe, first, end, xs=xs, ys=ys):
            for n in range(first, end):
                for s, each in enumerate(pipe.optimizers):
                    each.param_groups[0]["lr"] *= 0.97 + 0.01 * (s % 3)
                float(pipe.push(xs[3 * n : 3 * n + 3], ys[3 * n : 3 * n + 3]))

        train(pipe, 0, 30)
        state = pipe.state_dict()
        other = list(pipelines(case, optimizer))[len(found)]
        other.load_state_dict(state)
        for each in (pipe, other):
            train(each, 30, 60)
        assert torch.equal(everything(pipe), everything(other))
        pipe.drain()
        found.append(pipe.model.state_dict().values())
    same(*found)
    assert sum(turned) > 60


def test_who_does_not_wait_gets_ticks(turned, leapt):
    """After pushes whose losses nobody has read, and again in turn after one that was."""
    found = []
    for pipe in pipelines("pb"):
        xs, ys = map(torch.cat, zip(*doubles(90), strict=True))
        losses = []
        for n, (x, y) in enumerate(zip(xs.split(3), ys.split(3), strict=True)):
            losses.append(pipe.push(x, y))
            if n < 20 or n > 25:
                losses[-1] = losses[-1] + 0
        for x, y in zip(xs.split(3), ys.split(3), strict=True):
            losses.append(pipe.push(x, y))
        pipe.drain()
        found.append([torch.stack([loss.double() for loss in losses]), *pipe.model.state_dict().values()])
    same(*found)
    assert 20 < sum(turned) < 120 and sum(leapt) > 60


@pytest.mark.parametrize(("decay", "ones"), diagonal([0.01, 0.0], [True, False]))
def test_single_samples_of_weights_that_decay(decay, ones, turned, leapt):
    """Gradients that are products of columns with rows, and spike compensation without them."""
    found, count = [], 120
    xs, ys = map(torch.cat, zip(*doubles(count // 3), strict=True))
    for vectorize in (False, True):
        pipe = pipeback.Pipeline(
            model(), loss=mse_loss, method="cerebras", micro_batch_size=1, vectorize=vectorize,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=decay),
        )  # fmt: skip
        pushes = zip(xs.split(1), ys.split(1), strict=True) if ones else [(xs, ys)]
        found.append([torch.stack([pipe.push(x, y) + 0 for x, y in pushes]), *pipe.model.parameters()])
    same(*found)
    assert sum(turned if ones else leapt) > 60


@pytest.mark.parametrize("case", ["pipedream", "pipedream-vertical", "pipemare-t3"])
def test_the_ledger(case, turned):
    """A stage has done the same in the same order."""
    one, other = pipelines(case)
    for pipe in (one, other):
        read(pipe, ONES)
    assert turned and sorted(one.ledger) == sorted(other.ledger)
    for s in range(S):
        assert [r for r in one.ledger if r.stage == s] == [r for r in other.ledger if r.stage == s]


def test_a_loss_that_is_no_graph(turned):
    """Then the last stage runs by itself."""

    def loss(output, target):
        return (output - target).square().mean() if float(output.detach().sum()) < 1e9 else output.sum()

    found = []
    for vectorize in (False, True):
        pipe = pipeback.Pipeline(
            model(), loss=loss, optimizer=OPTIMIZERS["momentum"], method=CASES["pb"](S), vectorize=vectorize
        )
        found.append([torch.stack([pipe.push(x, y) + 0 for x, y in doubles(40)]), *pipe.model.parameters()])
    same(*found)
    assert sum(turned) > 20


@pytest.mark.parametrize(
    "case",
    mostly_rare(
        ["pb", "cerebras", "pipedream", "pb-slack1", "pipemare-t3", "pipedream-vertical"],
        "cerebras", "pipemare-t3", "pipedream-vertical",
    ),
)  # fmt: skip
def test_other_forms_of_micro_batches(case, turned):
    """A smaller one goes another way, and the next ones in turn again."""
    found = []
    for pipe in pipelines(case, micro_batch_size=None):
        losses = []
        for n, (x, y) in enumerate(doubles(90)):
            few = slice(2) if n == 45 else slice(None)
            losses.append(pipe.push(x[few], y[few]) + 0)
        pipe.drain()
        found.append([torch.stack(losses), *pipe.model.state_dict().values()])
    same(*found)
    assert sum(turned) > 40


def test_hooks_and_clipping_between_pushes(turned):
    """What needs single operations gets them."""
    xs, ys = map(torch.cat, zip(*doubles(30), strict=True))
    found, heard = [], []
    for pipe in pipelines("pb"):
        float(pipe.push(xs, ys))
        for norm, hook in ((None, False), (0.1, False), (None, True), (None, False)):
            before = sum(turned)
            pipe.clip(norm=norm)
            handle = pipe.optimizers[2].register_step_post_hook(lambda *_: heard.append(2)) if hook else None
            for x, y in zip(xs[:30].split(3), ys[:30].split(3), strict=True):
                float(pipe.push(x, y))
            if handle is not None:
                handle.remove()
            assert (sum(turned) > before) == (len(found) == 1 and not hook)
        pipe.drain()
        found.append(pipe.model.state_dict().values())
    same(*found)
    assert len(heard) == 20


@pytest.mark.parametrize(
    ("build", "case"),
    mostly_rare(
        product([model, headless], EVERY),
        (model, "pb"), (headless, "cerebras"), (model, "pipedream"), (headless, "pb-slack1"),
    ),
)  # fmt: skip
def test_a_loss_that_is_computed_outside(case, build, turned):
    """One micro-batch or a few between two steps."""
    optimizer = OPTIMIZERS["momentum"]
    found = []
    for vectorize in (False, True):
        pipe = pipeback.Pipeline(build(), loss=None, optimizer=optimizer, method=CASES[case](S), vectorize=vectorize)
        losses, data = [], doubles(60)

        def judge(output, y, losses=losses):
            loss = mse_loss(output, y)
            losses.append(loss.detach())
            loss.backward()
            return output.grad

        while data:
            n = 2 if len(data) in (20, 11) else 1
            some, data = data[:n], data[n:]
            ys = [y for _, y in some]
            (output,) = pipe.forward_many(
                [x for x, _ in some], expected=n, judge=lambda m, output, ys=ys: judge(output, ys[m])
            )
            pipe.backward(judge(output, ys[-1]))
            pipe.step()
        flying = torch.cat([p.detach().flatten().clone() for p in pipe.model.parameters()])
        pipe.drain()
        found.append([torch.stack(losses), flying, *pipe.model.state_dict().values()])
    same(*found)
    assert sum(turned) > 30
