"""What happens between pushes of stages that run as one: looking in, saving, resuming, memory."""

import gc

import pytest
import torch
from torch import nn

from pipeback.streaming.store import HostStore
from tests.helpers.choice import mostly_rare
from tests.laws.as_one import S, block, doubles, model, same, trained
from tests.laws.cases import CASES, STEADY, everything, pipeline, weights

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")


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
@pytest.mark.parametrize("case", mostly_rare(STEADY, "pipedream", "gpipe-4", "pipemare-t3", "pipeoptim-xpipe"))
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


@pytest.mark.parametrize("case", mostly_rare(STEADY, "cerebras", "gpipe-4", "pipedream-vertical"))
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


def two_forms():
    """Stages of the same layers, of which some are given (N, 6), and others (N, 1, 6)."""
    torch.manual_seed(0)
    odd, last = nn.Sequential(block(), nn.Unflatten(1, (1, 6))), nn.Sequential(nn.Flatten(), nn.Linear(6, 6))
    return nn.Sequential(nn.Linear(6, 6), block(), block(), odd, block(), block(), last).double()


@pytest.mark.parametrize("case", mostly_rare(STEADY, "cerebras", "pb", "pipedream", "pipemare-t3"))
@pytest.mark.parametrize("streamed", [False, True])
def test_a_state_goes_on_where_stages_are_divided_again(case, streamed):
    """Graphs in flight follow weights that move in memory, where only the next push tells which stages are alike."""
    method = CASES[case](S)
    if streamed and (not any(method.delays(S)) or method.fixed_groups):
        pytest.skip("with a store, no flushes or groups")
    some = doubles(30)
    plain = pipeline(two_forms(), CASES[case](S))
    for x, y in some[:11]:
        plain.push(x, y)
    pipe = pipeline(two_forms(), CASES[case](S), vectorize=True, store=HostStore(prefetch=S) if streamed else None)
    pipe.load_state_dict(plain.state_dict())
    for each in (plain, pipe):
        for x, y in some[11:]:
            each.push(x, y)
        each.drain()
    assert any(told.startswith("as ") for told in pipe.vectorized.values())
    same([everything(pipe)], [everything(plain)])


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
    with pytest.raises(ValueError, match="in flight in stage.*ran as one.*vectorize=True, or .* drained"):
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
    """The rings as they are, what a single stage holds, and what the others have in flight."""
    pipe = pipeline(model(), "pb", vectorize=True)
    for x, y in doubles():
        pipe.push(x, y)
    pipe.wait()
    stages = pipe._engine.stages
    first, stack = dict.fromkeys(stage.stack for stage in stages if stage.stack is not None)
    others = sum(s.learnt.activation_bytes * s.peak_flights for s in stages if s.stack is None)
    slots = 2 * (S - 1 - 1) + 2  # what is in flight at the first of its stages, and one to come
    saved = 6 * 4 + 2  # the input, what the norm is given and makes of it, what tanh gives; its mean and deviation
    each = slots * 3 * saved * 8  # three samples, in doubles
    alone = 2 * (S - 1) * 3 * 6 * 8  # of the first stage, the inputs in flight
    assert first.numbers == [0]
    assert pipe.memory().activations == others + len(stack.stages) * each + alone
    pipe.drain()
    assert pipe.memory().activations == others + len(stack.stages) * each
