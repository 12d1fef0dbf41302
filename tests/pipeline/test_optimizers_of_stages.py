"""Each stage has an optimizer of its own: rates, schedulers, groups, clipping, hooks, states."""

from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from torch import nn

import pipeback
from tests.laws.cases import data, network, pipeline, weights


def test_rates_are_those_of_the_moment_of_the_push():
    """With the rate set to 0 after push i, updates of later micro-batches stand still; those of earlier ones do not."""
    pipe, batches = pipeline(network(), "pb", "sgd"), data(30)
    for x, y in batches[:12]:
        pipe.push(x, y)
    for opt in pipe.optimizers:
        opt.param_groups[0]["lr"] = 0.0
    moving = [weights(pipe)]
    for x, y in batches[12:]:
        pipe.push(x, y)
        moving.append(weights(pipe))
    moved = [not torch.equal(a, b) for a, b in pairwise(moving)]
    assert moved == [True] * 8 + [False] * 10  # stage 0 is 8 updates late
    assert all(opt.param_groups[0]["lr"] == 0.0 for opt in pipe.optimizers)


def test_schedulers_attach_to_every_stage():
    import warnings

    model = nn.Sequential(nn.Linear(6, 6), nn.Flatten(), nn.Linear(6, 6))
    pipe = pipeline(model, "cerebras")
    assert len(pipe.optimizers) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plans = [
            torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=12, cycle_momentum=False)
            for opt in pipe.optimizers
        ]
        for x, y in data(11):
            pipe.push(x, y)
            for plan in plans:
                plan.step()


def test_parameter_groups():
    def build(params):
        decayed = [p for p in params if p.dim() > 1]
        plain = [p for p in params if p.dim() <= 1]
        return torch.optim.SGD([{"params": decayed, "weight_decay": 0.1}, {"params": plain}], lr=0.02, momentum=0.9)

    model = network()
    opt = torch.optim.SGD(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() == 1]},
        ],
        lr=0.02,
        momentum=0.9,
    )
    for method in ("sgd", "pb", "cerebras"):
        pipe = pipeback.Pipeline(network(), loss=nn.functional.mse_loss, optimizer=build, method=method)
        for x, y in data(15):
            pipe.push(x, y)
            if method == "sgd":
                nn.functional.mse_loss(model(x), y).backward()
                opt.step()
                opt.zero_grad()
        if method == "sgd":
            assert torch.equal(weights(pipe), torch.cat([p.detach().flatten().double() for p in model.parameters()]))


class Keeping(torch.optim.Optimizer):
    """SGD along g + (g − g of the update before)/2, which keeps the tensor g."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                before = self.state[p].get("before", p.grad)
                self.state[p]["before"] = p.grad
                p.sub_(group["lr"] * (p.grad + 0.5 * (p.grad - before)))


class Several(torch.optim.Optimizer):
    """SGD with two velocities, which are a dictionary under the name of torch's own."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                several = self.state[p].setdefault("momentum_buffer", {b: torch.zeros_like(p) for b in (0.0, 0.9)})
                for b, v in several.items():
                    v.mul_(b).add_(p.grad)
                    p.sub_(group["lr"] * v)


@pytest.mark.parametrize("optimizer", [Keeping, Several])
@pytest.mark.parametrize("method", ["sgd", "gpipe"])
@pytest.mark.parametrize("options", [{}, {"store": "host"}], ids=str)
def test_an_optimizer_may_keep_gradients_and_what_it_likes(optimizer, method, options):
    model = network().double()
    plain = deepcopy(model)
    opt = optimizer(plain.parameters())
    pipe = pipeback.Pipeline(
        model, loss=nn.functional.mse_loss, optimizer=optimizer, method=method, micro_batch_size=4, **options
    )
    for x, y in data(4):
        x, y = x.double(), y.double()
        pipe.push(x, y)
        opt.zero_grad()
        nn.functional.mse_loss(plain(x), y).backward()
        opt.step()
    with pipe.shown():
        assert all(map(torch.equal, pipe.model.parameters(), plain.parameters()))


def test_clipping_is_per_stage():
    pipe = pipeline(network(), "gpipe", "sgd", clip_norm=1e-3)
    before = [torch.cat([w.detach().flatten().clone() for w in stage.weights]) for stage in pipe._engine.stages]
    pipe.push(*data(1)[0])
    for stage, old in zip(pipe._engine.stages, before, strict=True):
        moved = torch.cat([w.detach().flatten() for w in stage.weights]) - old
        assert moved.norm() == pytest.approx(0.05 * 1e-3, rel=2e-2)  # rate 0.05, norm cut to 1e-3 in every stage


def test_a_state_loaded_into_one_of_the_optimizers_is_followed():
    for method in ("pb", "cerebras"):
        pipe, untouched = pipeline(network(), method), pipeline(network(), method)
        batches = data(24)
        for x, y in batches[:14]:
            pipe.push(x, y)
            untouched.push(x, y)
        zero = pipe.optimizers[2].state_dict()
        for entry in zero["state"].values():
            entry["momentum_buffer"] = torch.zeros_like(entry["momentum_buffer"])
        pipe.optimizers[2].load_state_dict(zero)
        pipe.optimizers[3].state.clear()
        pipe.push(*batches[14])
        moved = [
            torch.cat([b.flatten() for b in (s["momentum_buffer"] for s in opt.state.values())])
            for opt in pipe.optimizers
        ]
        untouched.push(*batches[14])
        for n, opt in enumerate(untouched.optimizers):
            kept = torch.cat([b.flatten() for b in (s["momentum_buffer"] for s in opt.state.values())])
            assert (moved[n].norm() < 0.8 * kept.norm()) == (n in (2, 3)), (method, n)


def test_step_hooks_are_called_and_subclasses_keep_their_own_state():
    class Counting(torch.optim.SGD):
        def __init__(self, params, lr):
            super().__init__(params, lr)
            self.steps = [0]

        def step(self, closure=None):
            self.steps[0] += 1
            return super().step(closure)

    pipe = pipeback.Pipeline(network(), loss=nn.functional.mse_loss, optimizer=lambda p: Counting(p, 0.1), method="pb")
    heard = []
    for x, y in data(10):
        pipe.push(x, y)
    assert [opt.steps[0] for opt in pipe.optimizers] == [10 - d for d in pipe.delays]
    plain = pipeline(network(), "pb")
    plain.push(*data(1)[0])
    plain.optimizers[4].register_step_post_hook(lambda *_: heard.append(1))
    for x, y in data(5):
        plain.push(x, y)
    assert len(heard) == 5


def test_gradients_that_others_left_do_not_count():
    clean, dirty = network(), network()
    dirty(torch.randn(2, 6)).sum().backward()
    a, b = pipeline(clean, "pb"), pipeline(dirty, "pb")
    for x, y in data(6):
        a.push(x, y)
        dirty(torch.randn(2, 6)).sum().backward()
        b.push(x, y)
    a.drain()
    b.drain()
    assert torch.equal(weights(a), weights(b))


def test_optimizers_of_every_kind_of_group():
    """An empty group on a stage without biases, and rates that are tensors."""

    def split(params):
        decayed, plain = [p for p in params if p.dim() > 1], [p for p in params if p.dim() <= 1]
        return torch.optim.AdamW([{"params": decayed}, {"params": plain, "weight_decay": 0.0}], lr=torch.tensor(0.01))

    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6), nn.Linear(6, 6, bias=False))
    pipe = pipeback.Pipeline(model, loss=nn.functional.mse_loss, optimizer=split, method="pb")
    before = weights(pipe)
    for x, y in data(8):
        pipe.push(x, y)
    assert torch.isfinite(weights(pipe)).all() and not torch.equal(weights(pipe), before)
