"""Law: with the loss computed outside, stages that run as one are the event loop to rounding, for every method: weights
after each step, losses, and states in flight.
"""

from itertools import product

import pytest
import torch
from torch.nn.functional import mse_loss

import pipeback
from pipeback.vectorized.stacks import whole_cost
from pipeback.vectorized.stacks.stack import Stack
from tests.helpers.choice import mostly_rare
from tests.laws.as_one import S, doubles, model, same, turns
from tests.laws.cases import CASES, OPTIMIZERS, STEADY, allowed, pipeline

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")
QUICK = ["cerebras", "pipedream", "spectrain", "pipemare", "gpipe-4", "one_f_one_b-3", "pb-slack1"]


def optimizer(case):
    return next(name for name in ("momentum", "sgd", "adamw") if allowed(case, name))


def build(case, vectorize=False, net=None, **options):
    return pipeback.Pipeline(
        net or model(), loss=None, optimizer=OPTIMIZERS[optimizer(case)], method=CASES[case](S), vectorize=vectorize,
        **options,
    )  # fmt: skip


def trained(pipe, some, losses=None):
    """Train on some micro-batches that go forward together; return the weights as they are there, without waiting."""
    xs, ys = zip(*some, strict=True)
    losses = [] if losses is None else losses

    def judge(n, output):
        loss = mse_loss(output, ys[n])
        losses.append(loss.detach())
        loss.backward()
        return output.grad

    (output,) = pipe.forward_many(xs, expected=len(xs), judge=judge)
    pipe.backward(judge(len(xs) - 1, output))
    pipe.step()
    return torch.cat([p.detach().flatten().clone() for stage in pipe.split.parts for p in stage.module.parameters()])


def cut(sizes=(8, 3, 1, 8, 5, 2)):
    found = doubles(sum(sizes))
    return [found[sum(sizes[:n]) : sum(sizes[: n + 1])] for n in range(len(sizes))]


@pytest.mark.parametrize("case", mostly_rare(STEADY, *QUICK))
def test_judged_where_they_leave(case):
    found = []
    for vectorize in (True, False):
        losses, pipe = [], build(case, vectorize)
        after = [trained(pipe, some, losses) for some in cut()]
        told = " ".join(pipe.vectorized.values())
        pipe.drain()
        found.append((*after, torch.stack(losses), *pipe.model.parameters()))
        assert not vectorize or "as one" in told
    same(*found)


@pytest.mark.parametrize(
    ("case", "workers"),
    mostly_rare(
        [(case, n) for case in ("pb", "cerebras", "pipedream", "gpipe-4") for n in (None, 2, 3)],
        ("cerebras", 2), ("pb", 3), ("gpipe-4", None),
    ),
)  # fmt: skip
def test_several_forwards_before_a_step(case, workers):
    found = []
    for vectorize in (True, False):
        losses, pipe = [], build(case, vectorize, workers=workers)
        for some in cut((2, 1, 4, 3, 1, 8)):
            for x, y in some:
                output = pipe.forward(x, expected=len(some))
                loss = mse_loss(output, y)
                losses.append(loss.detach())
                pipe.backward(*torch.autograd.grad(loss, output))
            pipe.step()
        pipe.drain()
        found.append((torch.stack(losses), *(p.detach().clone() for p in pipe.model.parameters())))
        pipe.close()
    same(*found)


@pytest.mark.parametrize("case", ["pb", "cerebras", "pipemare-t3", "pipedream-vertical"])
def test_one_at_a_time(case, turned):
    """A micro-batch goes forward through all stages, and then B and U of all are done as one."""
    found = []
    for vectorize in (True, False):
        losses, pipe = [], build(case, vectorize)
        after = [trained(pipe, some, losses) for some in cut((8, *[1] * 30))]
        pipe.drain()
        found.append((*after, torch.stack(losses), *pipe.model.parameters()))
    same(*found)
    assert sum(turned) > 15  # after a warm-up, if there is one


@pytest.mark.parametrize(
    ("case", "saved"),
    mostly_rare(product(STEADY, (True, False)), ("pb", False), ("gpipe-4", True), ("pipedream", True)),
)
def test_a_state_in_flight_goes_on(case, saved):
    """Saved by stages that run as one, or by the event loop, amid a flush, too."""
    some = cut((5, 5, 5, 4, 3))
    wanted, before = build(case, False), build(case, saved)
    for batch in some[:3]:
        trained(wanted, batch)
        trained(before, batch)
    after = build(case, True)
    after.load_state_dict(before.state_dict())
    for batch in some[3:]:
        same([trained(after, batch)], [trained(wanted, batch)])


def test_what_cannot_be_dropped():
    """Others have begun behind it."""
    pipe = build("pb", True)
    some = cut()[0]
    with pytest.raises(ValueError, match="micro-batch 0: the loss depends on no output.*vectorize=False"):
        pipe.forward_many([x for x, _ in some], judge=lambda n, output: None)
    pipe = build("pb", True)
    pipe.forward(some[0][0])
    with pytest.raises(RuntimeError, match="forget, or a gradient of None.*gradient of zeros.*vectorize=False"):
        pipe.forget()


def test_whether_there_are_ticks(monkeypatch):
    xs = [x for x, _ in cut()[0]]
    assert build("pb", True).runs_ticks(xs)
    assert not build("pb", False).runs_ticks(xs)
    monkeypatch.setattr(whole_cost, "gain", lambda stack, under, whole: 3.0)
    pipe = build("sgd", "auto")
    assert not pipe.runs_ticks(xs) and all(told.startswith("stage by stage") for told in pipe.vectorized.values())


@pytest.mark.parametrize(
    ("gain", "drops", "case"),
    mostly_rare(
        product((3.0, 1.2), (False, True), ("pb", "pipemare-t3", "pipedream-vertical")),
        (3.0, False, "pb"), (3.0, False, "pipemare-t3"), (1.2, False, "pipedream-vertical"), (3.0, True, "pb"),
    ),
)  # fmt: skip
def test_whether_one_at_a_time_goes_in_turn(monkeypatch, gain, drops, case):
    """Of F, nothing is gained; and where a stage cannot be in a stack, ticks of one micro-batch would pass."""
    as_one = gain > 2 and not drops
    monkeypatch.setattr(whole_cost, "gain", lambda stack, under, whole: gain)
    monkeypatch.setattr(whole_cost, "faster_apart", lambda stack, under, by: False)
    net = model()
    if drops:
        net.insert(3, torch.nn.Dropout(0.5))
    monkeypatch.setattr(Stack, "gain", lambda stack: gain)  # of F and B, where U is not part of a tick
    pipe = pipeback.Pipeline(net, loss=None, optimizer=OPTIMIZERS["momentum"], method=CASES[case](S), vectorize="auto")
    assert pipe.runs_ticks([doubles(1)[0][0]]) is as_one
    assert any(told.startswith("as one") for told in pipe.vectorized.values()) is as_one


@pytest.mark.parametrize("case", mostly_rare((c for c in STEADY if turns(c)), "pb", "cerebras", "pipedream-vertical"))
def test_masters(case):
    masters_are_those_of_push(case)


def masters_are_those_of_push(case, **options):
    """Bit for bit, with the loss in the pipeline there; half types round too much for another measure."""
    options |= {"vectorize": True, "masters": True}
    losses, pipe = [], build(case, net=model(torch.bfloat16), **options)
    other = pipeline(model(torch.bfloat16), CASES[case](S), optimizer(case), **options)
    for some in halved():
        trained(pipe, some, losses)
        for x, y in some:
            assert torch.equal(other.push(x, y), losses[other.pushes - 1])
    for one in (pipe, other):
        assert "as one" in " ".join(one.vectorized.values())
        one.drain()
    assert all(map(torch.equal, pipe.model.parameters(), other.model.parameters()))
    for one in (pipe, other):
        one.close()


def halved(*sizes):
    return [[(x.bfloat16(), y.bfloat16()) for x, y in part] for part in cut(*sizes)]


def test_masters_in_flushes():
    """To torch's tolerance of bfloat16, but in flight, too."""
    some, found = halved((5, 5, 5, 4, 3)), []
    for vectorize in (True, False):
        pipe = build("gpipe-4", vectorize, model(torch.bfloat16), masters=True)
        for part in some[:3]:
            trained(pipe, part)
        after = build("gpipe-4", vectorize, model(torch.bfloat16), masters=True)
        after.load_state_dict(pipe.state_dict())
        found.append([trained(after, part) for part in some[3:]])
        assert not vectorize or "as one" in " ".join(after.vectorized.values())
    torch.testing.assert_close(*found, rtol=1.6e-2, atol=1e-3)


@pytest.mark.parametrize("workers", [None, 2])
@pytest.mark.parametrize("vectorize", [True, False])
def test_what_waits_between_forward_and_backward_is_refused_and_harmless(vectorize, workers):
    """With autograd graphs nothing but the newest micro-batch is under way, and waiting does nothing."""
    pipe, other = build("pb", vectorize, workers=workers), build("pb", False)
    net = pipe.model
    calls, waits = [pipe.drain, pipe.state_dict], [pipe.wait, net.eval, lambda: pipe.model]
    for n, some in enumerate(cut((8, 5, 3))):
        xs, ys = zip(*some, strict=True)
        judge = lambda n, output, ys=ys: torch.autograd.grad(mse_loss(output, ys[n]), output)[0]  # noqa: E731
        (output,) = pipe.forward_many(xs, expected=len(xs), judge=judge)
        for call in [*calls, *waits] if vectorize else calls:
            with pytest.raises(
                RuntimeError, match="call backward (with its gradient first|or forget before taking the state)"
            ):
                call()
        for call in [] if vectorize else [*waits, net.train]:
            call()
        pipe.backward(judge(len(xs) - 1, output))
        pipe.step()
        trained(other, some)
    for one in (pipe, other):
        one.drain()
    same(list(pipe.model.parameters()), list(other.model.parameters()))
    pipe.close()
