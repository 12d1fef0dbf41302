"""Laws of torch's fused steps: every method that allows the optimizer has its numbers with fused=True, too."""

from functools import partial

import pytest
import torch
from torch import nn

import pipeback
from pipeback.methods.momentum import fused_sgd, fused_step
from tests.laws.cases import CASES, FEW, STEADY, allowed, data, everything, network, weights
from tests.laws.test_no_delay import FREE, GROUPS

BUILDS = {
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=1e-3),
    "adam": partial(torch.optim.Adam, lr=0.01, weight_decay=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05, lr_decay=0.01),
}
VARIANTS = {
    "nesterov": partial(torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True),
    "dampening": partial(torch.optim.SGD, lr=0.02, momentum=0.9, dampening=0.3, maximize=True),
    "amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "groups": lambda p, **how: torch.optim.SGD([{"params": p[:1]}, {"params": p[1:], "lr": 0.1}], 0.02, 0.9, **how),
}


def pairs(cases, soon):
    """Methods with the optimizers that their equations allow. soon: which of them not every run can leave out."""
    every = [(case, name) for case in cases for name in BUILDS if allowed(case.partition(" on ")[0], name)]
    return [pytest.param(*pair, marks=[] if soon(*pair) else pytest.mark.soak) for pair in every]


def pipeline(build, method, modules, **options):
    return pipeback.Pipeline(modules, loss=nn.functional.mse_loss, optimizer=build, method=method, **options)


def trained(build, case, *, resumed=None, dtype=torch.float64, **options):
    """Weights after some micro-batches over four stages. resumed: when the state goes to another pipeline."""
    pipe = pipeline(build, CASES[case](4), network(4, dtype=dtype), **options)
    for i, (x, y) in enumerate(data(14, dtype=dtype)):
        if i == resumed:
            state = pipe.state_dict()
            pipe = pipeline(build, CASES[case](4), network(4, dtype=dtype, seed=5), **options)
            pipe.load_state_dict(state)
        pipe.push(x, y)
    pipe.drain()
    found = weights(pipe)
    pipe.close()
    return found


@pytest.mark.parametrize(
    "case, name", pairs(CASES, lambda case, name: case == "pb" or (case in FEW and name == "momentum"))
)
def test_a_fused_step_is_the_step(case, name):
    """In a loop, by foreach or fused: the same numbers in float64. Fused ones go on from a state with equal bits."""
    hows = {"foreach": False}, {"foreach": True}, {"fused": True}
    looped, joint, fused = (partial(BUILDS[name], **how) for how in hows)
    wanted, found = trained(looped, case), trained(fused, case)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(trained(joint, case), wanted, rtol=0, atol=1e-12)
    assert torch.equal(trained(fused, case, resumed=5), found)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("options", [{}, pytest.param({"workers": 2}, marks=pytest.mark.soak)], ids=str)
def test_variants(name, options):
    """Stages whose weights have a momentum buffer step together with those that have none."""
    wanted = trained(partial(VARIANTS[name], foreach=False), "pb")
    found = trained(partial(VARIANTS[name], fused=True), "pb", **options)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case, name", pairs(STEADY, lambda *pair: pair in (("pb", "adam"), ("cerebras", "momentum"))))
def test_stages_that_run_as_one(case, name):
    fused = partial(BUILDS[name], fused=True)
    found = trained(fused, case, vectorize=True, resumed=6)
    torch.testing.assert_close(found, trained(fused, case), rtol=0, atol=1e-10)


def plain(build, model, batches, group):
    """Torch alone: gradients summed in order, divided once, one fused step."""
    optimizer = build(list(model.parameters()))
    for first in range(0, len(batches), group):
        some = batches[first : first + group]
        for x, y in some:
            nn.functional.mse_loss(model(x), y).backward()
        for p in model.parameters():
            p.grad /= len(some)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten().double() for p in model.parameters()])


SEVERAL = [f"{case} on three stages" for case in ("sgd", "gpipe-4", "one_f_one_b-3")]
SOON = "momentum", "adam", "adagrad"


@pytest.mark.parametrize(
    "case, name", pairs([*FREE, *SEVERAL], lambda case, name: case in (*FEW, SEVERAL[2]) and name in SOON)
)
def test_without_a_delay_it_is_the_fused_loop(case, name):
    case, _, several = case.partition(" on ")
    # wide enough that kernels go by vectors and have a rest
    model, batches, fused = network(3, width=11), data(24, width=11), partial(BUILDS[name], fused=True)
    pipe = pipeline(fused, CASES[case](3 if several else 1), model if several else [model])
    for x, y in batches:
        pipe.push(x, y)
    pipe.drain()
    assert torch.equal(weights(pipe), plain(fused, network(3, width=11), batches, GROUPS.get(case, 1)))


# -- how things lie in memory, which fused kernels do not look at ------------------------------------------------------


def laid(layout, width=48):
    """Convolutions whose weights lie in this layout, and are too large to be laid side by side."""
    torch.manual_seed(0)
    some = [nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(*some).double().to(memory_format=layout)


def images(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 48, 3, 3, generator=generator, dtype=torch.float64) for _ in range(count)]


@pytest.mark.parametrize("name", ["momentum", "adam", "adagrad"])
def test_gradients_summed_over_replicas_lie_as_the_weights(name):
    found = []
    for how in ({"fused": True}, {"foreach": False}):
        build = partial(BUILDS[name], **how)
        pipe = pipeline(build, "pb", laid(torch.channels_last), replicas=2, micro_batch_size=2)
        for x in images(4):
            pipe.push(x, x.tanh())
        pipe.drain()
        found.append(weights(pipe))
        pipe.close()
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["momentum", "adam", "adagrad"])
def test_a_state_that_lies_otherwise_is_laid_as_the_weights(name):
    found = []
    for how in ({"fused": True}, {"foreach": False}):
        build, some = partial(BUILDS[name], **how), images(8)
        pipe = pipeline(build, "pb", laid(torch.contiguous_format))
        for x in some[:4]:
            pipe.push(x, x.tanh())
        other = pipeline(build, "pb", laid(torch.channels_last))
        other.load_state_dict(pipe.state_dict())
        for x in some[4:]:
            other.push(x, x.tanh())
        found.append(everything(other))
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_by_the_kernel_alone_has_the_bits_of_torchs_own(dtype):
    """Odd sizes: kernels go by vectors and have a rest. The first step, and weights without a gradient, are torch's."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda: [torch.randn(n, generator=generator, dtype=dtype) for n in (1, 7, 33, 1000)]  # noqa: E731
    values = draw()
    mine, theirs = ([v.clone().requires_grad_() for v in values] for _ in range(2))
    build = partial(torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=1e-3, maximize=True, fused=True)
    found, wanted = build(mine), build(theirs)
    assert fused_sgd(found.param_groups[0])
    for n in range(4):
        for w, other, g in zip(mine, theirs, draw(), strict=True):
            w.grad, other.grad = g, g.clone()
        with torch.no_grad():
            assert fused_step(found) == (n > 0)
        if not n:
            found.step()
        wanted.step()
        assert all(map(torch.equal, mine, theirs))
        for w, other in zip(mine, theirs, strict=True):
            assert torch.equal(found.state[w]["momentum_buffer"], wanted.state[other]["momentum_buffer"])
    mine[1].grad = None
    assert not fused_step(found)
    mine[1].grad = torch.zeros(7, dtype=dtype).to_sparse()
    assert not fused_step(found)


@pytest.mark.parametrize("change", [{"nesterov": True}, {"dampening": 0.1}, {"momentum": 0.0}, {"fused": False}])
def test_what_the_kernel_alone_does_not_know(change):
    group = torch.optim.SGD([torch.zeros(2)], lr=0.1, momentum=0.9, fused=True).param_groups[0]
    assert fused_sgd(group) and not fused_sgd({**group, **change})
    assert not fused_sgd({**group, "params": [torch.zeros(2), torch.zeros(2, dtype=torch.float64)]})
    assert not fused_sgd({**group, "lr": torch.tensor(0.1)})


@pytest.mark.parametrize("change", ["cleared", "replaced"])
@pytest.mark.parametrize("case", ["pb", "sc", "cerebras"])
def test_the_state_of_an_optimizer_is_another_one(case, change):
    """The step goes on with the velocities that are there now."""
    found = []
    for how in ({}, {"fused": True}):
        build = partial(torch.optim.SGD, lr=0.02, momentum=0.9, **how)
        pipe = pipeline(build, CASES[case](4), network(4, dtype=torch.float64))
        for n, (x, y) in enumerate(data(30, dtype=torch.float64)):
            pipe.push(x, y)
            if n == 15:
                pipe.wait()
                for optimizer in pipe.optimizers:
                    if change == "cleared":
                        optimizer.state.clear()
                        continue
                    for entry in optimizer.state.values():
                        entry["momentum_buffer"] = entry["momentum_buffer"] / 2
        pipe.drain()
        found.append(weights(pipe))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
