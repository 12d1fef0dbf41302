"""What is said of kept activations: errors with their stage, changes of what was pushed, hooks, records."""

import pytest
import torch
from torch import nn

import pipeback
from pipeback import errors
from tests.laws.cases import CASES, STAGES, data, everything, network, pipeline, weights
from tests.stages.keeping import KINDS, equal


def test_an_unknown_kind():
    with pytest.raises(ValueError, match="activations must be one of device, recompute, host, but is 'disk'"):
        pipeline(network(), "pb", activations="disk")


class Fails(nn.Module):
    """In the backward's own forward."""

    def __init__(self, after):
        super().__init__()
        self.inner, self.calls, self.after = nn.Linear(6, 6), 0, after

    def forward(self, x):
        self.calls += torch.is_grad_enabled()
        if self.calls > self.after:
            raise ArithmeticError("once too often")
        return self.inner(x)


def test_a_repeat_that_fails_names_stage_and_micro_batch():
    module = Fails(10**9)
    pipe = pipeline(nn.Sequential(nn.Linear(6, 6), module, nn.Linear(6, 6)), "pb", activations="recompute")
    pipe.push(*data(1)[0])
    module.after = module.calls + 2
    with pytest.raises(errors.StageError, match=r"stage 1 \(1\), micro-batch \d+: the backward failed: once too often"):
        for x, y in data(9):
            pipe.push(x, y)
    assert pipe.closed


@pytest.mark.parametrize("activations", KINDS)
@pytest.mark.parametrize("what", [0, 1])
def test_what_was_pushed_may_be_changed_before_its_backward(activations, what):
    def trained(changes):
        pipe = pipeline(network(), CASES["gpipe-4"](STAGES), activations=activations)
        batches = data(4)
        for n in range(4):
            pipe.push(*batches[n])
            batches[0][what].add_(changes)
        return weights(pipe)

    assert torch.equal(trained(1), trained(0))


@pytest.mark.parametrize("activations", KINDS)
def test_a_loss_that_is_not_finite_names_the_stage(activations):
    pipe = pipeline(network(), "pb", activations=activations, debug=pipeback.Debug(check_finite=True))
    batches = data(4)
    pipe.push(*batches[0])
    with torch.no_grad():
        pipe.model[2][0].weight.fill_(float("nan"))
    with pytest.raises(errors.StageError, match="stage 2 .*the output is not finite"):
        pipe.push(*batches[1])


@pytest.mark.parametrize("activations", KINDS)
def test_hooks_run_as_often_as_the_forward(activations):
    seen = []
    model = network(3)
    pipe = pipeline(model, "sgd", activations=activations)
    x, y = data(1)[0]
    pipe.push(x, y)
    model[0].register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    for _ in range(3):
        pipe.push(x, y)
    assert seen == ([False, True] * 3 if activations == "recompute" else [True] * 3)


@pytest.mark.parametrize("activations", ["host", "recompute"])
def test_record_and_watch_change_no_bit(activations):
    def run(look):
        pipe = pipeline(network(), "cerebras", activations=activations)
        if look:
            pipe.record()
            watch = pipe.watch()
        for n, (x, y) in enumerate(data(16)):
            if look and n % 4 == 0:
                watch.follow()
            pipe.push(x, y)
        if look:
            assert all(gap >= 0 for gap in watch.gap)
            assert sum(1 for _ in pipe.recorded) == len(pipe.ledger) + sum(
                stage.version for stage in pipe._engine.stages
            )
        return [everything(pipe)]

    assert equal(run(True), run(False))
