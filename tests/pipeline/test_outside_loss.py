"""A loss that is computed outside: forward, backward and step are push in three parts, bit for bit."""

import math
import time

import pytest
import torch
from torch.nn.functional import mse_loss

import pipeback
from pipeback import methods
from pipeback.runtime.staleness import Watch
from tests.helpers.choice import mostly_rare
from tests.laws.cases import CASES, EACH, OPTIMIZERS, allowed, data, everything, network, pipeline, suited

STAGES = 5


def outside(case, optimizer="momentum", **options):
    return pipeback.Pipeline(
        network(), loss=None, optimizer=OPTIMIZERS[optimizer], method=CASES[case](STAGES), **options
    )  # fmt: skip


def train(pipe, batches, expected=1, step=True):
    losses = []
    for x, y in batches:
        output = pipe.forward(x, expected=expected)
        loss = mse_loss(output, y)
        loss.backward()
        pipe.backward(output.grad)
        if step:
            pipe.step()
        losses.append(loss.detach())
    return losses


EVERY = [(case, optimizer, True) for case in CASES for optimizer in OPTIMIZERS if allowed(case, optimizer)]
# each method with one optimizer of those it allows
USUAL = [rows[n % len(rows)] for n, case in enumerate(EACH) for rows in [[row for row in EVERY if row[0] == case]]]
# without `step` the updates come with the next forward; only a flush waits for it
WITHOUT = [(case, suited(case), False) for case in CASES if not CASES[case](STAGES).flush_each_push]


@pytest.mark.parametrize(
    ("case", "optimizer", "step"), mostly_rare([*EVERY, *WITHOUT], *USUAL, *(row for row in WITHOUT if row[0] in EACH))
)
def test_three_parts_are_a_push(case, optimizer, step):
    batches = data(14)
    inside, other = pipeline(network(), CASES[case](STAGES), optimizer), outside(case, optimizer)
    expected = [inside.push(x, y) for x, y in batches]
    assert torch.equal(torch.stack(expected), torch.stack(train(other, batches, step=step)))
    assert [*other.ledger] == [*inside.ledger]
    inside.drain(), other.drain()
    a, b = everything(inside), everything(other)
    assert torch.equal(a, b)


@pytest.mark.parametrize("case", ["gpipe", "one_f_one_b", "zb_h1"])
@pytest.mark.parametrize("expected", [4, 9])
def test_a_flush_ends_with_step(case, expected):
    batches = data(8)
    inside, other = pipeline(network(), CASES[case](STAGES), micro_batch_size=3), outside(case)
    for n in (0, 4):
        x, y = (torch.cat(part) for part in zip(*batches[n : n + 4], strict=True))
        inside.push(x, y)
        # the same slices: kernels round otherwise where a tensor lies at another place within 64 bytes
        train(other, list(zip(x.split(3), y.split(3), strict=True)), expected, step=False)
        other.step()
    assert torch.equal(everything(inside), everything(other))


@pytest.mark.parametrize("workers", [None, 2])
@pytest.mark.parametrize("case", ["pb", "cerebras", "pipedream", "pipedream-vertical", "spectrain-v2", "pipedream_2bw"])
def test_forgotten_micro_batches_leave_no_trace(case, workers):
    batches = data(14)
    plain, other = outside(case), outside(case, workers=workers)
    losses = train(plain, batches)
    for n, (x, y) in enumerate(batches):
        if n % 3 == 1:
            other.forward(x + 1)
            other.forget()
        assert torch.equal(*train(other, [(x, y)]), losses[n])
    assert torch.equal(everything(plain), everything(other))


def test_resume_in_flight():
    batches = data(12)
    whole, first, second = outside("cerebras"), outside("cerebras"), outside("cerebras")
    train(whole, batches)
    train(first, batches[:7], step=False)  # the last updates are still due: state_dict quiesces
    second.load_state_dict(first.state_dict())
    train(second, batches[7:])
    assert torch.equal(everything(whole), everything(second))


def test_a_state_taken_up_forgets_what_has_gone_forward():
    batches = data(9)
    pipe = outside("pb")
    train(pipe, batches[:5])
    state = pipe.state_dict()
    pipe.forward(batches[5][0])
    pipe.load_state_dict(state)
    train(pipe, batches[5:])
    never = outside("pb")
    train(never, batches)
    assert torch.equal(everything(pipe), everything(never))


@pytest.mark.parametrize("options", [{}, {"workers": 2}])
def test_gradients_may_be_made_means_before_a_step(options):
    batches = data(8)
    plain, other = outside("gpipe", **options), outside("gpipe", **options)
    for n in (0, 4):
        train(plain, batches[n : n + 4], 4, step=False)
        train(other, batches[n : n + 4], 4, step=False)
        params = [p for part in other.split.parts for p in part.module.parameters()]
        sums = [p.grad.clone() for p in params]
        assert other.average()
        assert all(torch.equal(p.grad, g / 4) for p, g in zip(params, sums, strict=True))
        plain.step(), other.step()
    assert torch.equal(everything(plain), everything(other))


@pytest.mark.parametrize(
    ("case", "options"), [("pb", {}), ("gpipe", {"vectorize": True}), ("gpipe", {"store": "host"})]
)
def test_gradients_are_left_as_they_are_where_no_step_takes_all(case, options):
    pipe = outside(case, **options)
    train(pipe, data(4), 4, step=False)
    assert not pipe.average()


def test_clip_value_and_norm_are_torchs():
    x, y = data(1)[0]
    for options, clip in (
        ({"clip_norm": 0.01}, lambda ps: torch.nn.utils.clip_grad_norm_(ps, 0.01)),
        ({"clip_norm": pipeback.Clipping(value=1e-3)}, lambda ps: torch.nn.utils.clip_grad_value_(ps, 1e-3)),
    ):
        pipe, model = pipeline(network(), methods.create("sgd"), "sgd", **options), network()
        pipe.push(x, y)
        pipe.drain()
        mse_loss(model(x), y).backward()
        for stage in model:
            clip(stage.parameters())
        OPTIMIZERS["sgd"](model.parameters()).step()
        for a, b in zip(pipe.model.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-7)


def test_a_watch_follows_the_same_micro_batch_at_every_worker(monkeypatch):
    """The first worker looks at its forwards long after the second has done those of the same micro-batch."""
    looked = Watch.forward

    def late(watch, ops):
        time.sleep(0.05 * (ops[0][0].index == 0))
        looked(watch, ops)

    monkeypatch.setattr(Watch, "forward", late)
    pipe, batches = outside("pb", workers=2), data(12)
    try:
        watch = pipe.watch()
        watch.follow()
        train(pipe, batches)
        assert not any(math.isnan(gap) for gap in watch.gap)
        watch.follow()
        train(pipe, batches)
        assert watch.delay == pipe.delays
    finally:
        pipe.close()


def test_watch_tells_what_happens_and_changes_nothing():
    batches = data(30)
    plain, watched = outside("pb"), outside("pb")
    watch = watched.watch()
    train(plain, batches)
    weights = []
    for n, batch in enumerate(batches):
        if n == 15:
            watch.follow()
            watch.mark()
        weights.append([[w.detach().clone() for w in stage.parameters()] for stage in watched.model])
        train(watched, [batch])
    assert torch.equal(everything(plain), everything(watched))
    assert watch.delay == watched.delays
    for s, delay in enumerate(watched.delays):  # F(15) ran on what was there before it; B came `delay` updates later
        now, used = weights[15 + delay][s], weights[15][s]
        gap = sum(float((a - b).square().sum()) for a, b in zip(now, used, strict=True)) ** 0.5
        assert watch.gap[s] == pytest.approx(gap, abs=1e-6)
        step = sum(float((a - b).square().sum()) for a, b in zip(weights[16][s], weights[15][s], strict=True)) ** 0.5
        assert watch.update[s] == pytest.approx(step, abs=1e-6)
    assert watch.clip_share == [0.0] * STAGES
    watched.clip(norm=1e-6)
    watch.mark()
    train(watched, batches[:3])
    assert watch.clip_share == [1.0] * STAGES


@pytest.mark.parametrize(
    ("do", "message"),
    [
        (lambda p: p.push(*data(1)[0]), "this pipeline has loss=None; call forward and backward"),
        (lambda p: p.backward(torch.zeros(3, 6)), "backward comes after forward"),
        (lambda p: p.forget(), "forget comes after forward"),
        (lambda p: (p.forward(data(1)[0][0]), p.forward(data(1)[0][0])), "forward was called twice"),
        (lambda p: (p.forward(data(1)[0][0]), p.state_dict()), "has gone forward; call backward or forget"),
    ],
)
def test_calls_out_of_turn(do, message):
    with pytest.raises(RuntimeError, match=message):
        do(outside("pb"))


@pytest.mark.parametrize(
    "option",
    [
        {"replicas": 2},
        {"micro_batch_size": 1},
        {"micro_batch_size": pipeback.MicroBatches(weights="samples")},
        {"debug": pipeback.Debug(check_finite=True)},
    ],
)
def test_options_that_need_the_loss_inside(option):
    with pytest.raises(ValueError, match=f"loss=None does not go with .*; use {next(iter(option))}="):
        outside("pb", **option)


def test_forward_needs_the_loss_outside():
    with pytest.raises(RuntimeError, match="this one has a loss: call push"):
        pipeline(network(), "pb").forward(data(1)[0][0])


WRONG = [
    (torch.ones(2, 2), ValueError, r"a tensor of shape \(2, 2\).*of shape \(3, 6\)"),
    (torch.ones(1, 6), ValueError, r"a tensor of shape \(1, 6\)"),
    (torch.tensor(1.0), ValueError, r"a tensor of shape \(\)"),
    (torch.ones(3, 6, dtype=torch.complex64), ValueError, "torch.complex64, but"),
    (1.0, TypeError, "a float"),
    ({"a": torch.ones(3, 6)}, TypeError, "a dict"),
    ((torch.ones(3, 6), None), TypeError, "a tuple of 2"),
    (None, (ValueError, RuntimeError), "no gradient|gradient of None"),
]


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"store": "host"}, {"vectorize": True}], ids=str)
def test_a_gradient_that_does_not_fit_changes_nothing(options):
    """It is refused before anything is taken off, and the right one is taken then."""
    wanted, pipe = outside("pb", **options), outside("pb", **options)
    for n, (x, y) in enumerate(data(12)):
        output = pipe.forward(x)
        mse_loss(output, y).backward()
        gradient, error, says = WRONG[n % len(WRONG)]
        with pytest.raises(error, match=says):
            pipe.backward(gradient)
        pipe.backward(output.grad)
        pipe.step()
        train(wanted, [(x, y)])
    assert torch.equal(everything(pipe), everything(wanted))


@pytest.mark.parametrize("options", [{}, {"vectorize": True}], ids=str)
def test_a_gradient_of_another_type_is_converted_as_by_torch(options):
    wanted, pipe = outside("pb", **options), outside("pb", **options)
    for x, y in data(12):
        output = pipe.forward(x)
        mse_loss(output, y).backward()
        pipe.backward([output.grad.double()])
        pipe.step()
        train(wanted, [(x, y)])
    assert torch.equal(everything(pipe), everything(wanted))


def test_after_a_gradient_of_none_zeros_are_taken_where_stages_run_as_one():
    wanted, pipe = outside("pb"), outside("pb", vectorize=True)
    for x, _ in data(8):
        output = pipe.forward(x)
        with pytest.raises(RuntimeError, match="a gradient of None.*give backward a gradient of zeros"):
            pipe.backward(None)
        for each in (wanted, pipe):
            each.backward(torch.zeros_like(output if each is pipe else each.forward(x)))
            each.step()
    pipe.drain(), wanted.drain()
    torch.testing.assert_close(everything(pipe), everything(wanted), rtol=0, atol=1e-6)


# -- several micro-batches at once -----------------------------------------------------------------------------------


def train_together(pipe, batches, count, expected):
    losses = []
    for begin in range(0, len(batches), count):
        some = batches[begin : begin + count]
        outputs = pipe.forward_many([x for x, _ in some], expected=expected)
        for output, (_, y) in zip(outputs, some, strict=True):
            losses.append(mse_loss(output, y))
            losses[-1].backward()
        pipe.backward_many([output.grad for output in outputs])
        pipe.step()
    return torch.stack(losses).detach()


@pytest.mark.parametrize("store", [None, "host"])
@pytest.mark.parametrize(
    ("case", "count"),
    [("gpipe", 4), ("one_f_one_b", 4), ("gpipe-4", 4), ("one_f_one_b-3", 3), ("zb_h1-4", 4), ("zb_h2", 4)],
)
def test_many_at_once_are_one_after_the_other(case, count, store):
    batches = data(24)
    one, many = outside(case), outside(case, store=store)
    expected = torch.stack(train_flushes(one, batches, count))
    assert torch.equal(train_together(many, batches, count, count), expected)
    assert torch.equal(everything(one), everything(many))
    if store:
        one_pass = sum(p.numel() * p.element_size() for p in many.model.parameters())
        assert many.traffic().fetches <= 2 * STAGES * 24 // count
        assert many.traffic().gradients_out == one_pass * 24 // count


def train_flushes(pipe, batches, count):
    losses = []
    for begin in range(0, len(batches), count):
        losses += train(pipe, batches[begin : begin + count], expected=count, step=False)
        pipe.step()
    return losses


def test_some_of_many_are_forgotten():
    batches = data(12)
    one, many = outside("gpipe"), outside("gpipe", store="host")
    for begin in range(0, 12, 4):
        some = batches[begin : begin + 4]
        outputs = many.forward_many([x for x, _ in some], expected=4)
        for output, (_, y) in zip(outputs, some, strict=True):
            mse_loss(output, y).backward()
        many.backward_many([None if n in (1, 3) else output.grad for n, output in enumerate(outputs)])
        many.step()
        train(one, [some[0], some[2]], expected=2, step=False)
        one.step()
    assert torch.equal(everything(one), everything(many))


@pytest.mark.parametrize(("case", "count"), [("pb", 2), ("sgd", 2), ("gpipe-4", 5), ("gpipe", 3), ("pipedream_2bw", 2)])
def test_no_flush_of_so_many(case, count):
    pipe = outside(case)
    assert pipe.together(1) and not pipe.together(count, expected=2)
    with pytest.raises(ValueError, match=f"{count} micro-batches do not lie in one flush"):
        pipe.forward_many([x for x, _ in data(count)], expected=2)
    train(pipe, data(3))  # and nothing has happened


@pytest.mark.parametrize("case", ["gpipe", "one_f_one_b", "gpipe-4", "zb_h2"])
def test_a_state_taken_within_a_flush(case):
    """As Lightning takes one between the batches that an update accumulates."""
    whole, first, second = outside(case), outside(case), outside(case)
    batches = data(4)
    for pipe, some in ((whole, batches), (first, batches[:2])):
        train(pipe, some, expected=4, step=False)
    second.load_state_dict(first.state_dict())
    assert second.together(2, expected=4) and not second.together(3, expected=4)
    train(second, batches[2:], expected=4, step=False)
    whole.step()
    second.step()
    assert torch.equal(everything(whole), everything(second))
