"""Gradient sums: what the user clears, adds or looks at between pushes changes none of them."""

import threading

import pytest
import torch
from torch import nn

import pipeback
from pipeback.stages.gradients import Gradients, differentiate
from tests.laws.cases import data, network, pipeline, weights

GROUPS = {
    "1F1B": lambda: pipeback.methods.create("one_f_one_b", micro_batches=3),
    "2BW": lambda: pipeback.methods.create("pipedream_2bw", micro_batches=5),
    "PipeMare": lambda: pipeback.methods.create("pipemare", anneal=8, micro_batches=3),
}


def drained(pipe, batches):
    """The weights after these and a drain."""
    for x, y in batches:
        pipe.push(x, y)
    pipe.drain()
    found = weights(pipe)
    pipe.close()
    return found


def trained(method, between=lambda model, pipe, x: None, **options):
    model = network(4)
    pipe = pipeline(model, GROUPS[method](), **options)
    for x, y in data(14):
        between(model, pipe, x)
        pipe.push(x, y)
    pipe.wait()
    sums = [g for stage in pipe.state_dict()["stages"] for name, g in stage.items() if name.startswith("grad/")]
    found = torch.cat([weights(pipe), *(g.flatten().double() for g in sums)])
    pipe.close()
    return found


def habit(model, pipe, x):
    model.zero_grad()
    for optimizer in pipe.optimizers:
        optimizer.zero_grad()


def in_place(model, pipe, x):
    model.zero_grad(set_to_none=False)


def own_backward(model, pipe, x):
    model(x).square().sum().backward()


@pytest.mark.parametrize("between", [habit, in_place, own_backward])
@pytest.mark.parametrize("method", GROUPS)
def test_sums_are_kept_across_pushes(method, between):
    assert torch.equal(trained(method, between), trained(method))


@pytest.mark.parametrize("options", [{"store": "host"}, {"activations": "recompute"}, {"masters": True}])
def test_they_are_kept_however_stages_compute(options):
    assert torch.equal(trained("1F1B", habit, **options), trained("1F1B", **options))


class Slow(torch.autograd.Function):
    """A backward that lets the user's thread have its say."""

    turn = staticmethod(lambda: None)

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        Slow.turn()
        return g


class Slowly(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.other(Slow.apply(self.linear(x))))


def test_workers_lose_nothing_to_who_clears_gradients_while_they_compute(monkeypatch):
    """A gradient is there, and the backward not over, when the user clears it; likewise in the middle of a step."""

    class Stops(torch.optim.SGD):
        def step(self, closure=None):
            clear()
            return super().step(closure)

    def run(clear_too):
        torch.manual_seed(0)
        model = nn.Sequential(Slowly(), Slowly(), nn.Linear(6, 6))
        monkeypatch.setattr(Slow, "turn", staticmethod(clear if clear_too else lambda: None))
        now["model"], now["on"] = model, clear_too
        pipe = now["pipe"] = pipeback.Pipeline(
            model, loss=nn.functional.mse_loss, optimizer=lambda p: Stops(p, lr=0.1), method=GROUPS["1F1B"](), workers=2
        )
        return drained(pipe, data(10))

    now = {}

    def clear():
        if now["on"]:
            other = threading.Thread(target=habit, args=(now["model"], now["pipe"], None))
            other.start()
            other.join()

    assert torch.equal(run(True), run(False))


def test_gradients_of_workers_are_those_of_the_event_loop():
    """One tensor may be the gradient of several weights, of a strange layout, sparse, or none."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 6, sparse=True)
            self.a, self.b, self.unused = (nn.Parameter(torch.randn(3, 6)) for _ in range(3))
            self.turned = nn.Parameter(torch.randn(6, 6).t())

        def forward(self, x):
            numbers = torch.arange(len(x)) % 5
            return (x + self.a[: len(x)] * 1 + (self.a + self.b)[: len(x)]) @ self.turned.t() + self.table(numbers)

    def run(**options):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), Odd(), nn.Linear(6, 6))
        pipe = pipeback.Pipeline(
            model, loss=nn.functional.mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
            method=GROUPS["1F1B"](), **options,
        )  # fmt: skip
        return drained(pipe, data(7))

    assert torch.equal(run(workers=2), run())


def test_a_hook_on_gathered_gradients_is_called_in_every_runtime():
    def run(**options):
        model, seen = network(3), []
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.sum())))
        pipe = pipeline(model, GROUPS["1F1B"](), **options)
        drained(pipe, data(3))
        return sorted(seen)

    assert run(workers=2) == run() != []


def test_who_computes_the_loss_outside_sees_them_and_may_change_them():
    """From the backward to the next forward or step; clearing them, as before each batch, changes nothing."""

    def run(clear=False, zero=False, halve=False, step=True):
        model = network(3)
        pipe = pipeback.Pipeline(
            model, loss=None, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), method=GROUPS["1F1B"]()
        )
        for x, y in data(6):
            if clear:
                model.zero_grad()
            output = pipe.forward(x)
            if zero:
                model.zero_grad(set_to_none=False)
            nn.functional.mse_loss(output, y).backward()
            pipe.backward(output.grad)
            assert model[-1][0].weight.grad is not None
            for p in model.parameters():
                if halve and p.grad is not None:
                    p.grad = p.grad * 0.5
            if step:  # else the updates come with the next forward
                pipe.step()
                assert all(p.grad is None for p in model.parameters())
        pipe.drain()
        return weights(pipe)

    assert torch.equal(run(clear=True), run())
    assert torch.equal(run(zero=True, step=False), run())
    assert not torch.equal(run(halve=True), run())


@pytest.mark.parametrize("options", [{}, {"workers": 2}])
@pytest.mark.parametrize("change", [lambda g: None, lambda g: g * 0.5])
def test_what_lies_in_grad_when_a_step_begins_counts(change, options):
    """As in a plain loop: a weight without gradient is not stepped, and has no momentum or decay."""

    def train(model, step, forward, backward):
        for n, (x, y) in enumerate(data(4)):
            output = forward(x)
            nn.functional.mse_loss(output, y).backward()
            backward(output)
            for p in model.parameters() if n % 2 else model[1].parameters():
                p.grad = change(p.grad)
            step()

    def made(params):
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1)

    plain, model = network(3), network(3)
    optimizer = made(plain.parameters())
    train(plain, lambda: (optimizer.step(), optimizer.zero_grad()), plain, lambda output: None)
    pipe = pipeback.Pipeline(model, loss=None, optimizer=made, method="gpipe", **options)
    train(model, pipe.step, pipe.forward, lambda output: pipe.backward(output.grad))
    pipe.drain()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    pipe.close()


def test_who_clears_them_while_a_thread_of_ours_goes_back_loses_none():
    """As Lightning's zero_grad does in the user's thread, at any time; the loss is computed outside."""
    layer = nn.Linear(3, 3)
    sums = Gradients(list(layer.parameters()))
    sums.shows = sums.threaded = True
    wanted = torch.zeros(3, 3)
    for n in range(3):
        x = torch.full((1, 3), n + 1.0, requires_grad=True)
        y = layer(x)
        y.register_hook(lambda g: layer.zero_grad())
        differentiate([y], [torch.ones(1, 3)], [x], [sums])
        wanted += torch.ones(3, 1) @ x.detach()
        assert torch.equal(sums.values[0], wanted) and layer.weight.grad is sums.values[0]
        layer.weight.grad = torch.zeros(3, 3)  # put back late, by somebody who had put it aside


def test_sums_are_added_to_in_place_once_they_are_our_own():
    found = [torch.full((3,), float(n)) for n in range(4)]
    gradients = Gradients([torch.zeros(3)])
    for g in found[:2]:
        gradients.add([g])
    ours = gradients.values[0]
    for g in found[2:]:
        gradients.add([g])
    assert gradients.values[0] is ours and ours.tolist() == [6.0] * 3
    assert [g.tolist() for g in found] == [[float(n)] * 3 for n in range(4)]  # which may be somebody else's
    taken = gradients.take()
    gradients.add([found[1]])
    gradients.add([found[1]])
    assert taken[0] is ours and ours.tolist() == [6.0] * 3
    gradients.put([ours])
    gradients.add([found[1]])
    assert ours.tolist() == [6.0] * 3  # nor what somebody has put there
