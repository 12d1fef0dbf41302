"""Optimizers that people write or listen to: their steps are made, once each, whatever the method and the runtime."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import pipeback
from tests.helpers.wrapping import Wrapping
from tests.laws import test_equations as equations
from tests.laws.cases import data, network, weights
from tests.laws.reference import Moved, Recurrence

MSE = nn.functional.mse_loss


def built(optimizer, method="pb", model=None, **options):
    return pipeback.Pipeline(model or network(4), loss=MSE, optimizer=optimizer, method=method, **options)


def pushed(pipe, count):
    for x, y in data(count):
        pipe.push(x, y)
    pipe.wait()
    return pipe


@pytest.mark.parametrize("method", ["sgd", "pb", "pipedream"])
@pytest.mark.parametrize("store", [None, "host"])
def test_an_optimizer_around_another(method, store):
    sgd = lambda ps: torch.optim.SGD(ps, 0.05, momentum=0.9)  # noqa: E731
    found = pushed(built(lambda ps: Wrapping(sgd(ps)), method, store=store), 9)
    wanted = pushed(built(sgd, method, store=store), 9)
    for pipe in (found, wanted):
        pipe.drain()
    assert torch.equal(weights(found), weights(wanted))


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


# -- who counts elsewhere than in the state of its weights ------------------------------------------------------------


class Counting(torch.optim.Optimizer):
    """w ← w − η/(1 + k)·g, k the steps before, counted in one place of several."""

    def __init__(self, params, lr, place):
        self.place, self.k, self.list = place, 0, [0]
        super().__init__(params, {"lr": lr, "k": 0, "tensor": torch.zeros(())})

    def counted(self):
        group = self.param_groups[0]
        return {
            "option": lambda: group["k"],
            "new option": lambda: group.get("steps", 0),
            "tensor": lambda: group["tensor"].item(),
            "attribute": lambda: self.k,
            "list": lambda: self.list[0],
            "state": lambda: self.state.get("k", 0),
        }[self.place]()

    @torch.no_grad()
    def step(self, closure=None):
        k = self.counted()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / (1 + k))
            group["k"] += self.place == "option"
            if self.place == "new option":
                group["steps"] = k + 1
            if self.place == "tensor":
                group["tensor"] += 1
        self.k += self.place == "attribute"
        self.list[0] += self.place == "list"
        if self.place == "state":
            self.state["k"] = k + 1


class Decreasing(Recurrence):
    """The same in float64 numpy."""

    def step(self, s, u, i, p, g, options):
        now = self.history[s][u]
        return Moved(now.w[p] - options["lr"] / (1 + u) * g, now.v[p], now.q[p])


PLACES = ("option", "new option", "tensor", "attribute", "list", "state")


@pytest.mark.parametrize("place", PLACES)
def test_what_is_counted_follows_the_steps_of_each_stage(place):
    """Whatever waves its updates are in, when rates change, and in a state taken in flight."""
    initial = equations.initial(4)
    pipe = built(lambda p: Counting(p, 0.5, place), model=equations.network(initial))
    reference = Decreasing(initial, "sgd", slack=2)
    xs, ys = equations.samples(4, 30)
    for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
        rate = 0.5 * (0.7 + 0.3 * math.cos(i // 4))
        for opt in pipe.optimizers:
            opt.param_groups[0]["lr"] = rate
        if i == 17:
            pipe.drain()
            reference.drain()
        loss = pipe.push(torch.tensor(x[None]), torch.tensor(y[None]))
        wanted = reference.push(x[None], y[None], [[{"lr": rate}] * 2] * 4)
        assert float(loss) == pytest.approx(wanted, rel=1e-12)
        if i in (11, 20):
            state = pickle.loads(pickle.dumps(pipe.state_dict()))
            pipe = built(lambda p: Counting(p, 0.5, place), model=equations.network(initial))
            pipe.load_state_dict(state)
    equations.close_weights(pipe.model, reference.weights(), "in flight")
    pipe.memory(), pipe.plan()  # which look into the optimizers
    done = [opt.counted() for opt in pipe.optimizers]
    assert done == [17 + 13 - d for d in pipe.delays]


@pytest.mark.parametrize("place", PLACES)
def test_a_state_from_before_all_steps_counts_from_there(place):
    """It has no counts; those of the steps since are taken back."""
    pipe = built(lambda p: Counting(p, 0.5, place))
    state, found = pickle.loads(pickle.dumps(pipe.state_dict())), []
    for _ in range(2):
        pushed(pipe, 9)
        found.append((weights(pipe).tolist(), [opt.counted() for opt in pipe.optimizers]))
        pipe.load_state_dict(state)
    assert found[0] == found[1]


@pytest.mark.parametrize("options", [{"workers": 2}, {"store": "host"}, {"replicas": 2}])
def test_what_is_counted_is_the_same_in_every_runtime(options, tmp_path):
    def run(**options):
        pipe = built(lambda p: Counting(p, 0.5, "option"), **options)
        for n, (x, y) in enumerate(data(14, samples=4)):
            pipe.push(x, y)
            if n == 8:
                pipeback.checkpoint.save(pipe, tmp_path / "state")
                pipe.close()
                pipe = built(lambda p: Counting(p, 0.5, "option"), **options)
                pipeback.checkpoint.load(pipe, tmp_path / "state")
        pipe.wait()
        found = weights(pipe)
        pipe.close()
        return found

    plain = run() if "replicas" not in options else run(replicas=2, workers=2)
    assert torch.equal(run(**options), plain)


def test_what_cannot_be_saved_of_an_optimizer_is_said():
    class Odd(Counting):
        def step(self, closure=None):
            self.past = {p: p.grad for group in self.param_groups for p in group["params"]}
            return super().step(closure)

    pipe = pushed(built(lambda p: Odd(p, 0.1, "option")), 8)
    with pytest.raises(TypeError, match=r"stage 0.*Odd counts in its attribute 'past', in a dict.*lists of these, or"):
        pipe.state_dict()


@pytest.mark.parametrize("store", [None, "host", "disk"])
def test_an_optimizer_that_begins_with_state(store, tmp_path):
    """Adagrad makes its state when it is built, which for a model from the meta device has no values yet."""

    def trained(model, **streaming):
        pipe = built(lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.3), model=model, **streaming)
        return weights(pushed(pipe, 9))

    model = network(4)
    values = iter([stage.state_dict() for stage in copy.deepcopy(model)])
    absent, init = copy.deepcopy(model).to("meta"), lambda module: module.load_state_dict(next(values))
    home = pipeback.Streaming(f"disk:{tmp_path}" if store == "disk" else store, init=init)
    assert torch.equal(trained(absent, store=home), trained(model))
