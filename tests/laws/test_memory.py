"""Law: weight copies and method state, counted while running, are what the method declares; nothing grows."""

import pytest
import torch
from torch import nn

from tests.helpers.live_tensors import tensors_alive
from tests.laws.cases import CASES, STAGES, data, network, pipeline, usual


@pytest.mark.parametrize("case", CASES)
def test_copies_and_state_are_as_declared(case):
    method = CASES[case](STAGES)
    pipe = pipeline(network(), method)
    for x, y in data(40):
        pipe.push(x, y)
        for stage in pipe._engine.stages:
            assert stage.copies() <= method.held(stage.index, STAGES)
    found = pipe.memory()
    one = [stage.bytes() for stage in pipe._engine.stages]
    declared = sum(method.held(s, STAGES) * one[s] for s in range(STAGES)) / sum(one)
    assert found.weights == sum(one)
    assert found.copies == declared
    numbers = [(method.state_numbers(w.shape), w.numel()) for stage in pipe._engine.stages for w in stage.weights]
    assert found.state == sum(kept for kept, _ in numbers) / sum(own for _, own in numbers)


@pytest.mark.parametrize(
    "case",
    ["pb", "pipedream", "cerebras", "pipedream_2bw", "spectrain-v2", "gpipe-4", "ef", "pipeoptim", "pipeoptim-xpipe",
     "msnag", "msnag-stash", "gap_aware", "dc_asgd", "dc_asgd-adaptive", "braking", "staleness_lr",
     "dc_asgd+pipeoptim", "eigendelay", "eigendelay-one-side"],
)  # fmt: skip
def test_the_collector_agrees_with_the_declaration(case):
    """Bytes of tensors of a quiet pipeline: weights × copies + states of method and optimizer + activations, sums of
    gradients of updates that are not due yet, as plain training has them, and no more.
    """
    torch.manual_seed(0)
    width = 48  # weights dominate activations
    method = CASES[case](3)
    before = tensors_alive()
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(3)])
    pipe = pipeline(model, method)
    for x, y in data(24, samples=1, width=width):
        pipe.push(x, y)
    del x, y
    memory = pipe.memory()
    copies = sum(stage.copies() * stage.bytes() for stage in pipe._engine.stages)
    moments = memory.weights * (2 if usual(method) == "adamw" else 1)
    state = int(memory.state * memory.weights)
    sums = sum(g.nbytes for stage in pipe._engine.stages for g in stage.grads() if g is not None)
    found = tensors_alive() - before
    slack = memory.activations + 64 * 1024 // 8
    declared = copies + state + moments + memory.beside + sums
    assert declared <= found <= declared + slack


@pytest.mark.parametrize("case", ["pb", "cerebras", "pipedream", "spectrain-v2"])
def test_memory_is_constant_over_training(case):
    pipe = pipeline(network(3), CASES[case](3))
    batches = data(50)

    def train(n):
        for i in range(n):
            pipe.push(*batches[i % 50])
        return tensors_alive(), len(pipe._engine.stages[0].flights), len(pipe._engine.runtime.loop.worker.options)

    train(100)
    early = train(0)
    assert train(900) == early


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES)
def test_memory_is_constant_over_10000_micro_batches(case):
    pipe = pipeline(network(3), CASES[case](3))
    batches = data(60)
    for i in range(120):
        pipe.push(*batches[i % 60])
    early = tensors_alive()
    for i in range(120, 10_020):
        pipe.push(*batches[i % 60])
    assert tensors_alive() == early
    assert sum(record.kind == "F" for record in pipe.ledger) == 3 * 10_020  # every one, and all within the limit
