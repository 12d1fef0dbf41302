"""Optimizers that people write or listen to: their steps are made, once each, whatever the method and the runtime."""

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import pipeback
from tests.laws.cases import data, network, weights

MSE = nn.functional.mse_loss


def built(optimizer, method="pb", model=None, **options):
    return pipeback.Pipeline(model or network(4), loss=MSE, optimizer=optimizer, method=method, **options)


def pushed(pipe, count):
    for x, y in data(count):
        pipe.push(x, y)
    pipe.wait()
    return pipe


# -- who listens to steps, or overrides them ---------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["one", "all"])
@pytest.mark.parametrize("method", ["pb", "sc", "cerebras", "chained"])
def test_step_hooks_hear_of_every_step_of_every_method(method, where):
    """Also of methods that make the step of momentum SGD themselves."""
    chained = lambda: pipeback.chain(pipeback.methods.create("lwp"), pipeback.methods.create("sc"))  # noqa: E731
    heard, rates = [], []
    plain = pushed(built(lambda p: torch.optim.SGD(p, 0.1, 0.9), chained() if method == "chained" else method), 9)
    pipe = built(lambda p: torch.optim.SGD(p, 0.1, 0.9), chained() if method == "chained" else method)

    def before(optimizer, args, kwargs):
        heard.append(("before", id(optimizer.param_groups[0]["params"][0])))
        rates.append(optimizer.param_groups[0]["lr"])

    def after(optimizer, args, kwargs):
        heard.append(("after", id(optimizer.param_groups[0]["params"][0])))

    if where == "one":
        opt = pipe.optimizers[2]
        handles = [opt.register_step_pre_hook(before), opt.register_step_post_hook(after)]
    else:
        handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        pushed(pipe, 9)
    finally:
        for handle in handles:
            handle.remove()
    steps = [9 - pipe.delays[2]] if where == "one" else [9 - d for d in pipe.delays]
    assert [kind for kind, _ in heard] == ["before", "after"] * sum(steps)
    assert sorted(heard.count(("after", id(opt.param_groups[0]["params"][0]))) for opt in pipe.optimizers)[-1] == max(
        steps
    )
    assert set(rates) == {0.1} and torch.equal(weights(pipe), weights(plain))


class Halved(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)
        return super().step(closure)


class Preset(torch.optim.SGD):
    """Only other defaults: its step is torch's."""

    def __init__(self, params):
        super().__init__(params, lr=0.1, momentum=0.9)


def test_who_overrides_step_is_told_by_methods_that_never_call_it():
    chained = pipeback.chain(pipeback.methods.create("lwp"), pipeback.methods.create("sc"))
    for method in ("cerebras", "sc", chained):
        with pytest.raises(ValueError, match='stage 0.*never call the step of Halved.*method="pb" or .*form="weight"'):
            built(lambda p: Halved(p, 0.1, 0.9), method)
        preset, plain = built(Preset, method), built(lambda p: torch.optim.SGD(p, 0.1, 0.9), method)
        assert torch.equal(weights(pushed(preset, 7)), weights(pushed(plain, 7)))
    for cure in ("pb", pipeback.methods.create("lwp", form="weight")):
        halved = pushed(built(lambda p: Halved(p, 0.1), cure), 9)
        assert torch.equal(weights(halved), weights(pushed(built(lambda p: torch.optim.SGD(p, 0.05), cure), 9)))


def test_a_step_that_was_replaced_on_the_object_is_refused():
    def replaced(params):
        optimizer = torch.optim.SGD(params, 0.1)
        optimizer.step = lambda closure=None: None
        return optimizer

    def scheduled(params):
        optimizer = torch.optim.SGD(params, 0.1, 0.9)
        torch.optim.lr_scheduler.StepLR(optimizer, 5)
        return optimizer

    with pytest.raises(ValueError, match="stage 0.*was replaced on the object.*a subclass of SGD"):
        built(replaced)
    for method in ("pb", "cerebras"):
        pushed(built(scheduled, method), 2)
