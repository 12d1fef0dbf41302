"""What goes from stage to stage: tuples, integers, complex values, what is changed in place, custom functions."""

import pytest
import torch
from torch import nn

import pipeback
from tests.laws.cases import OPTIMIZERS, data, pipeline, weights


class Fork(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.linear(x)), x, torch.arange(len(x))


class Merge(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, parts):
        y, x, order = parts
        return self.linear(y)[order] + x


def test_tuples_across_stages_and_integers_in_them():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 6), Fork(), Merge(), nn.Linear(6, 6))
    import copy

    plain = copy.deepcopy(model)
    opt = OPTIMIZERS["momentum"](plain.parameters())
    pipe = pipeline(model, "sgd")
    for x, y in data(10):
        pipe.push(x, y)
        nn.functional.mse_loss(plain(x), y).backward()
        opt.step()
        opt.zero_grad()
    assert torch.equal(weights(pipe), torch.cat([p.detach().flatten().double() for p in plain.parameters()]))


def test_tuples_as_input_and_as_target():
    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, pair):
            return self.linear(pair[0]) * pair[1]

    def loss(out, target):
        return nn.functional.mse_loss(out * target[1], target[0])

    pipe = pipeback.Pipeline(
        [First(), nn.Linear(6, 6)], loss=loss, optimizer=OPTIMIZERS["momentum"], method="pb", micro_batch_size=2
    )
    value = pipe.push((torch.randn(5, 6), torch.rand(5, 1)), (torch.randn(5, 6), torch.ones(5, 1)))
    assert torch.isfinite(value)


def test_modules_that_change_their_input_in_place():
    torch.manual_seed(0)
    parts = lambda inplace: nn.Sequential(  # noqa: E731
        nn.Linear(6, 6), nn.ReLU(inplace=inplace), nn.Linear(6, 6), nn.ReLU(inplace=inplace), nn.Linear(6, 6)
    )
    careful, hasty = parts(False), parts(True)
    hasty.load_state_dict(careful.state_dict())
    for method in ("pb", "cerebras"):
        a, b = pipeline(careful, method), pipeline(hasty, method)
        for x, y in data(15):
            assert torch.equal(a.push(x, y), b.push(x, y))
        assert torch.equal(weights(a), weights(b))


@pytest.mark.parametrize("method", ["pb", "cerebras"])
def test_a_gradient_sent_upstream_is_not_changed_by_clipping(method):
    """y = x + b: the gradients of b and of x are one tensor; clipping b must leave x's alone."""

    class Bias(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(3, 6))

        def forward(self, x):
            return x + self.bias

    clipped, free = (
        pipeline([nn.Linear(6, 6), Bias(), nn.Linear(6, 6)], method, "momentum", clip_norm=c) for c in (1e-6, None)
    )
    clipped._engine.stages[0].module.load_state_dict(free._engine.stages[0].module.state_dict())
    clipped._engine.stages[2].module.load_state_dict(free._engine.stages[2].module.state_dict())
    x, y = data(1)[0]
    for pipe in (clipped, free):
        pipe.push(x, y)
    messages = [pipe._engine.runtime.loop.waiting()["B", 1, 0] for pipe in (clipped, free)]
    assert torch.equal(*messages)


class Squared(torch.autograd.Function):
    """Keeps a tensor and a number on ctx, not through save_for_backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.x, ctx.times, ctx.name = x.detach() * 1, float(x.detach().mean()), "squared"
        return x * x

    @staticmethod
    def backward(ctx, g):
        return 2 * ctx.x * g * (1 + ctx.times)


def test_what_custom_functions_keep_is_saved_in_flight():
    class Square(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.linear, self.function = nn.Linear(6, 6), function

        def forward(self, x):
            return self.function(self.linear(x))

    def built(function, seed):
        torch.manual_seed(seed)
        return pipeline([nn.Linear(6, 6), Square(function), nn.Linear(6, 6), nn.Linear(6, 6)], "pb")

    whole, half, other = (built(Squared.apply, seed) for seed in (0, 0, 1))
    batches = data(16)
    for x, y in batches[:9]:
        whole.push(x, y)
        half.push(x, y)
    other.load_state_dict(half.state_dict())
    for x, y in batches[9:]:
        whole.push(x, y)
        other.push(x, y)
    assert torch.equal(weights(whole), weights(other))

    class Opaque(Squared):
        @staticmethod
        def forward(ctx, x):
            ctx.x, ctx.times, ctx.what = x.detach(), 0.0, object()
            return x * x

    pipe = built(Opaque.apply, 0)
    pipe.push(*batches[0])
    with pytest.raises(TypeError, match=r"stage 1 \(1\), micro-batch 0: .*ctx.what, a object.*save_for_backward"):
        pipe.state_dict()

    threshold = built(lambda x: torch.clamp(x, max=x.detach().mean().item()), 0)
    for x, y in batches[:9]:
        threshold.push(x, y)
    with pytest.raises(ValueError, match="builds a different graph.*numbers taken from it"):
        threshold.load_state_dict(threshold.state_dict())
    with pytest.raises(RuntimeError, match="the pipeline is closed"):
        threshold.push(*batches[0])


def test_complex_values_cross_boundaries():
    class Spectrum(nn.Module):
        def forward(self, x):
            return torch.fft.rfft(x)

    class Magnitude(nn.Module):
        def forward(self, x):
            return x.abs()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Spectrum(), Magnitude(), nn.Linear(4, 6))
    before = model[0].weight.clone()
    pipe = pipeline(model, "pb")
    for x, y in data(12):
        pipe.push(x, y)
    assert not torch.equal(before, model[0].weight)
