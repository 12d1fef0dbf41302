"""What a forward leaves behind: it is as if nobody had tried the model before its training."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pipeback

from .plain_training import Model, equals_plain_training, inputs

WHOLE = pipeback.Splitting(leaves=[""])


def remembers(m, x):
    """Goes on with the state of the micro-batch before, as truncated backpropagation through time does."""
    state = m.state if m.state is not None else (torch.zeros(4), [torch.ones(4)])
    x = x * 0.5 + state[0] * state[1][0]
    m.state = x.detach().mean(0), [x.detach().amax(0)]
    return x


def noisy(m, x):
    return x + torch.randn(x.shape, generator=m.generator)


@pytest.mark.parametrize(
    ("between", "key", "value"),
    [(remembers, "state", lambda: None), (noisy, "generator", lambda: torch.Generator().manual_seed(0))],
)
def test_a_model_that_is_one_stage_begins_as_it_was(between, key, value):
    models = [Model(between), Model(between)]
    for model in models:
        setattr(model, key, value())
    equals_plain_training(models[0], inputs(), models[1], stages=WHOLE)


class Observer(nn.Module):
    """Keeps the smallest value of every column, in a buffer that gets its size at the first forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("least", torch.tensor([]))

    def forward(self, x):
        now = x.detach().amin(0)
        before = self.least.clone() if self.least.numel() else now
        self.least.resize_(now.shape).copy_(torch.minimum(before, now))
        return x.maximum(self.least.clone())


@pytest.mark.parametrize("method", ["sgd", "pipedream"])
def test_a_buffer_that_gets_its_size_at_the_first_forward(method):
    model = Model(lambda m, x: x, nn.Sequential(nn.Linear(4, 4), Observer()))
    if method == "sgd":
        equals_plain_training(model, inputs())
        return
    pipe = pipeback.Pipeline(
        model, loss=nn.functional.mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), method=method,
        example=inputs()[0], stages="layer",
    )  # fmt: skip
    for x in inputs():
        pipe.push(x, torch.zeros(5, 4))
    pipe.drain()


class Teacher(nn.Module):
    """Gives its frozen weights other memory in each forward; it is a layer, into which nobody looks."""

    def __init__(self):
        super().__init__()
        self.weight, self.slow = nn.Parameter(torch.eye(4)), nn.Parameter(torch.eye(4), requires_grad=False)

    def forward(self, x):
        self.slow.data = self.slow.data * 0.9 + self.weight.data * 0.1
        return x @ self.weight + (x @ self.slow).detach()


@pytest.mark.parametrize("stages", ["layer", WHOLE])
def test_a_layer_may_give_frozen_weights_other_memory(stages):
    equals_plain_training(Model(lambda m, x: x, Teacher()), inputs(), stages=stages)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_that_reaches_no_weights_does_not_reach_them_in_stages(reentrant):
    recomputed = lambda m, x: checkpoint(m.inner, x.detach(), use_reentrant=reentrant) + x  # noqa: E731
    models = [Model(recomputed), Model(recomputed)]
    for model in models:
        torch.manual_seed(1)
        model.inner = nn.Linear(4, 4)
    pipe = equals_plain_training(*models[:1], inputs(), models[1])
    torch.manual_seed(1)
    assert torch.equal(pipe.model.inner.weight, nn.Linear(4, 4).weight) == reentrant
