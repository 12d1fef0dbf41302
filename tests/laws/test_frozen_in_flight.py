"""Law: a state may be saved after weights were frozen or thawed, while micro-batches are in flight."""

import pytest
import torch

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
