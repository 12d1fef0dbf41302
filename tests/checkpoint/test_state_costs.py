"""What a state costs: as many operations per micro-batch in flight for a long pipeline as for a short one."""

import gc
import sys

import pytest
import torch
from torch import nn

import pipeback
from pipeback.splitting import module_restore
from pipeback.stages import saved_graph


def filled(stages):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(stages)))
    pipe = pipeback.Pipeline(
        model, loss=nn.MSELoss(), optimizer=lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
        method="pb", micro_batch_size=1,
    )  # fmt: skip
    pipe.push(torch.randn(2 * stages, 2), torch.randn(2 * stages, 2))
    return pipe


def in_flight(state):
    return sum(len(stage["flights"]) for stage in state["plain"]["stages"])


def calls(of):
    """How many functions were called meanwhile, of Python's and of C's."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        result = of()
    finally:
        sys.setprofile(before)
    return result, count


def test_a_state_costs_as_much_per_micro_batch_in_flight_of_few_stages_as_of_many():
    costs = []
    for stages in (12, 24):
        pipe = filled(stages)
        pipe.state_dict()  # what is looked up once, is known
        state, saving = calls(pipe.state_dict)
        _, loading = calls(lambda pipe=pipe, state=state: pipe.load_state_dict(state))
        assert in_flight(state) == stages * (stages - 1)
        costs.append((saving / in_flight(state), loading / in_flight(state)))
    (few_saving, few_loading), (many_saving, many_loading) = costs
    assert many_saving <= few_saving and many_loading <= few_loading, costs


def test_a_module_is_looked_over_once_per_stage_when_a_state_is_loaded(monkeypatch):
    """And not once per micro-batch in flight."""
    pipe = filled(6)
    state, looked, walked = pipe.state_dict(), [], module_restore.generators
    monkeypatch.setattr(module_restore, "generators", lambda modules: looked.append(0) or walked(modules))
    pipe.load_state_dict(state)
    assert in_flight(state) == 30 and len(looked) == 6


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_not_collected_while_a_state_is_taken_or_loaded(collects, monkeypatch):
    """Afterwards it is, unless the user has switched that off."""
    pipe, on = filled(3), []
    for name in ("keep", "put_back"):
        do = getattr(saved_graph, name)
        monkeypatch.setattr(saved_graph, name, lambda *args, do=do: on.append(gc.isenabled()) or do(*args))
    if not collects:
        gc.disable()
    try:
        pipe.load_state_dict(pipe.state_dict())
        assert gc.isenabled() is collects
    finally:
        gc.enable()
    assert on == [False] * 12


def test_a_graph_in_flight_is_gone_through_once_when_it_is_saved(monkeypatch):
    pipe, seen, nodes = filled(6), [], saved_graph.nodes
    monkeypatch.setattr(saved_graph, "nodes", lambda roots: seen.append(0) or nodes(roots))
    state = pipe.state_dict()
    assert len(seen) == in_flight(state) == 30
    seen.clear()
    pipe.load_state_dict(state)  # each once to find out what it hides, and once to put back what it kept
    assert len(seen) == 2 * in_flight(state)
