"""Law: a state may be saved after weights were frozen or thawed, while micro-batches are in flight."""

import pytest
import torch

from pipeback.vectorized.making.graph_maker import GraphMaker
from tests.laws.cases import data, everything, network, pipeline

STAGES, AT = 5, 9
METHODS = ["pb", "gpipe", "pipedream", "one_f_one_b", "cerebras"]
OPTIONS = [{}, {"workers": 2}, {"activations": "host"}, {"activations": "recompute"}, {"replicas": 2}]
WHICH = {"the first stage": ["0.0.weight", "0.0.bias"], "a bias": ["2.0.bias"], "the last stage": ["4.0.weight"]}


def freeze(pipe, which, needs):
    for name in WHICH[which]:
        pipe.model.get_parameter(name).requires_grad_(needs)


@pytest.mark.parametrize(
    ("method", "options", "which", "thaws", "after"),
    [
        *((method, {}, which, thaws, 1) for method in METHODS for which in WHICH for thaws in (False, True)),
        *(("pb", options, which, thaws, 0) for options in OPTIONS for which in WHICH for thaws in (False, True)),
    ],
    ids=str,
)
def test_a_state_of_both(method, options, which, thaws, after):
    """thaws: whether the weights are trained again at the change, or frozen. after: pushes since it."""
    batches = data(18, samples=4, dtype=torch.float64)

    def built(seed):
        return pipeline(network(STAGES, seed=seed, dtype=torch.float64), method, "momentum", **options)

    pipe = built(0)
    freeze(pipe, which, not thaws)
    for n, batch in enumerate(batches[: AT + after]):
        if n == AT:
            pipe.wait()
            freeze(pipe, which, thaws)
        pipe.push(*batch)
    pipe.wait()
    freeze(pipe, which, thaws)
    state = pipe.state_dict()

    def end(pipe):
        losses = [pipe.push(*batch).detach().clone() for batch in batches[AT + after :]]
        pipe.drain()
        found = torch.stack(losses), everything(pipe)
        pipe.close()
        return found

    wanted = end(pipe)
    for before in (False, True):
        other, last = built(99), built(98)
        if before:
            freeze(other, which, thaws)
        other.load_state_dict(state)
        freeze(other, which, thaws)
        once_more = other.state_dict()
        last.load_state_dict(once_more)
        freeze(last, which, thaws)
        for loaded in (other, last):
            found = end(loaded)
            assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("which", ["the first stage", "a bias"])
@pytest.mark.parametrize("thaws", [False, True])
def test_stages_as_one(which, thaws):
    """Those of the state go on as one or one by one, so that last digits may differ."""
    batches, found = data(18, samples=4, dtype=torch.float64), []
    for resumed in (False, True):
        pipe = pipeline(network(STAGES, dtype=torch.float64), "pb", "momentum", vectorize="auto")
        for n, batch in enumerate(batches):
            if n in (AT - 4, AT) and (thaws or n == AT):
                pipe.wait()
                freeze(pipe, which, thaws and n == AT)
            if n == AT and resumed:
                state = pipe.state_dict()
                pipe = pipeline(network(STAGES, seed=99, dtype=torch.float64), "pb", "momentum", vectorize="auto")
                pipe.load_state_dict(state)
                freeze(pipe, which, thaws)
            pipe.push(*batch)
        pipe.drain()
        found.append(everything(pipe))
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


def test_a_weight_that_is_frozen_while_a_worker_makes_graphs_for_fewer_rows(monkeypatch):
    """As where nobody waits for the workers before; what was pushed until then still trains it."""
    makes, asked = GraphMaker.sizes, []

    def sizes(maker, rings):
        for needs in (False, True):
            for stage in maker.stages:
                stage.module[0].weight.requires_grad_(needs)
            if not needs:
                asked.append(makes(maker, rings))
        return asked[-1]

    monkeypatch.setattr(GraphMaker, "sizes", sizes)
    batches, found = data(4, samples=4, dtype=torch.float64), []
    for options in ({}, {"vectorize": True}):
        pipe = pipeline(network(STAGES, dtype=torch.float64), "pb", "momentum", micro_batch_size=1, **options)
        for batch in batches:
            pipe.push(*batch)
        pipe.drain()
        found.append(everything(pipe))
    assert asked and not any(asked)
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)
