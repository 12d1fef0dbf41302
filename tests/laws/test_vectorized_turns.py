"""Law: stages of even and of odd number that take turns, and states between ticks, are the event loop to rounding."""

from itertools import product

import pytest
import torch
from torch import nn

from tests.helpers.choice import mostly_rare, rare
from tests.laws.as_one import block, doubles, pipelines, pushed, same
from tests.laws.cases import everything

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")
TURNS = ("pb-slack1", "spectrain", "pipedream")  # stages of even and of odd number do something in turn


@pytest.mark.parametrize(
    ("case", "ends", "blocks"),
    mostly_rare(
        product(TURNS, [False, True], [2, 3, 4, 5]),
        ("pipedream", False, 2), ("pipedream", True, 3), ("pipedream", True, 4), ("pipedream", False, 5),
    ),
)  # fmt: skip
def test_stages_that_take_turns_in_runs_of_any_length(case, ends, blocks, leapt):
    """With stages of their own around them, or a head alone."""

    def build():
        torch.manual_seed(0)
        first = [nn.Linear(6, 6)] if ends else []
        return nn.Sequential(*first, *[block() for _ in range(blocks)], nn.Linear(6, 6, bias=False)).double()

    one, other = pipelines(case, build=build)
    same(pushed(other), pushed(one))
    assert sum(leapt) > 60 and sum(s.stack is None for s in other._engine.stages) == 1


@pytest.mark.parametrize("case", mostly_rare([*TURNS, "pipemare"], "pipedream", "pipemare"))
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
    kept = sum((stage.versions.peak - 1) * stage.bytes() for stage in other._engine.stages[:-1])
    stacks = {id(stage.stack): stage.stack for stage in other._engine.stages[:-1]}.values()
    strips = {id(s.weights.strip): s.weights.strip.beside for s in other._engine.stages if s.weights.strip is not None}
    assert sum(stack.stash.nbytes for stack in stacks) == kept + other.memory().beside - sum(strips.values())


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
    assert list(other.vectorized) == ["stages 0, 1", "stage 2", "stages 3, 4, 5"] and sum(leapt) > 30


@pytest.mark.parametrize(("case", "optimizer"), [rare("cerebras", "momentum"), ("pb", "adamw")])
def test_resumed_between_such_ticks(case, optimizer, leapt):
    _, one = pipelines(case, optimizer)
    pushed_before = one.push(*map(torch.cat, zip(*doubles(30), strict=True)))
    assert pushed_before.isfinite()
    _, other = pipelines(case, optimizer)
    other.load_state_dict(one.state_dict())
    for found in (one, other):
        found.push(*map(torch.cat, zip(*doubles(30), strict=True)))
    assert torch.equal(everything(one), everything(other)) and sum(leapt) > 40
