"""Law: where small weights lie one after the other in memory, every bit is what it is where each lies on its own."""

import gc
from itertools import product

import pytest
import torch
from torch import nn

import pipeback
from pipeback.methods.pb import PipelinedBackpropagation
from pipeback.stages import contiguous
from tests.helpers.choice import mostly_rare
from tests.laws.cases import CASES, FEW, OPTIMIZERS, allowed, data, everything, pipeline


def odd():
    """Sizes that fill no line of memory, a stage without weights, a frozen weight, and two weights of one stage."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 7), nn.Sequential(nn.Tanh(), nn.Linear(7, 5)), nn.Tanh(), nn.Linear(5, 3),
        nn.Sequential(nn.Linear(3, 9, bias=False), nn.LayerNorm(9)), nn.Linear(9, 6),
    )  # fmt: skip
    model[3].bias.requires_grad_(False)
    return model


def apart(monkeypatch):
    monkeypatch.setattr(contiguous, "_pays", lambda weights: False)


def strips(pipe):
    return {id(stage.weights.strip) for stage in pipe._engine.stages if stage.weights.strip is not None}


def trained(method, optimizer=None, count=23, between=lambda pipe, n: None, **options):
    pipe = pipeline(odd(), method, optimizer, **options)
    losses = []
    for n, (x, y) in enumerate(data(count)):
        losses.append(pipe.push(x, y))
        between(pipe, n)
    found = torch.cat([torch.stack([loss.double() for loss in losses]), everything(pipe)])
    pipe.drain()
    return pipe, torch.cat([found, everything(pipe)])


PAIRS = [(case, optimizer) for case, optimizer in product(CASES, OPTIMIZERS) if allowed(case, optimizer)]
USUAL = [
    pair for pair in PAIRS if pair[0] in (*FEW, "sgd", "sc", "lwp", "pb-slack1") and pair[1] in ("momentum", "adamw")
]


@pytest.mark.parametrize(("case", "optimizer"), mostly_rare(PAIRS, *(pair for pair in USUAL if pair in PAIRS)))
def test_every_method_has_the_same_bits(case, optimizer, monkeypatch):
    pipe, found = trained(CASES[case](6), optimizer)
    assert len(strips(pipe)) == 1
    apart(monkeypatch)
    pipe, wanted = trained(CASES[case](6), optimizer)
    assert not strips(pipe)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    "options",
    [{"workers": 2}, {"replicas": 2, "micro_batch_size": None}, {"clip_norm": 0.1},
     {"debug": pipeback.Debug(order="random")}, {"debug": pipeback.Debug(order="skewed")}, {"vectorize": "auto"}],
    ids=str,
)  # fmt: skip
def test_every_runtime_has_the_same_bits(options, monkeypatch):
    def split(params):
        """Groups that take weights from a stage in another order, with rates of their own."""
        params = list(params)
        some = [{"params": params[1:], "lr": 0.001}] if len(params) > 1 else []
        return torch.optim.SGD([*some, {"params": params[:1]}], lr=0.003, momentum=0.9, maximize=True)

    def halved(pipe, n):
        if n == 9:
            for optimizer in pipe.optimizers:
                optimizer.param_groups[0]["lr"] *= 0.5

    monkeypatch.setitem(OPTIMIZERS, "split", split)
    if options.get("replicas"):
        options, size = {**options, "micro_batch_size": 1}, {"samples": 2}
    else:
        size = {}
    found = []
    for on in (True, False):
        if not on:
            apart(monkeypatch)
        for optimizer in ("momentum", "split"):
            pipe = pipeline(odd(), "cerebras", optimizer, **options)
            for n, (x, y) in enumerate(data(23, **size)):
                pipe.push(x, y)
                halved(pipe, n)
            pipe.wait()
            found.append(everything(pipe))
            pipe.close()
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


@pytest.mark.parametrize("case", ["pb", "cerebras", "pipedream", "pipemare", "pipemare-t3"])
def test_whatever_becomes_of_an_optimizers_state(case, monkeypatch):
    """Loaded, or gradients left behind by others: what lies beside the weights follows."""

    def between(pipe, n):
        if n == 7:
            pipe.wait()
            for optimizer in pipe.optimizers:
                optimizer.load_state_dict(optimizer.state_dict())
        if n == 9:
            for optimizer in pipe.optimizers:
                optimizer.zero_grad()
        if n == 11:
            for stage in pipe._engine.stages:
                for p in stage.params:
                    p.grad = torch.ones_like(p)
        if n == 13:
            pipe.load_state_dict(pipe.state_dict())

    pipe, found = trained(CASES[case](6), between=between)
    assert strips(pipe)
    apart(monkeypatch)
    assert torch.equal(found, trained(CASES[case](6), between=between)[1])


def test_a_method_is_given_gradients_that_stay_what_they_are(monkeypatch):
    class Looking(PipelinedBackpropagation):
        def update(self, weights, optimizer, state, when):
            before = [w.grad.clone() for w in weights]
            optimizer.step()
            seen.append(torch.cat([w.grad.flatten() for w in weights]))
            assert all(torch.equal(w.grad, g) for w, g in zip(weights, before, strict=True))
            return state

    found = []
    for on in (True, False):
        if not on:
            apart(monkeypatch)
        seen = []
        pipe, _ = trained(Looking())
        assert bool(strips(pipe)) == on
        found.append(torch.cat(seen))
    assert torch.equal(*found)


def test_a_weight_without_a_gradient_stays(monkeypatch):
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other, self.turn = nn.Linear(6, 6), nn.Linear(6, 6), 0

        def forward(self, x):
            self.turn += torch.is_grad_enabled()
            return self.one(x) if self.turn % 3 else self.other(x)

    def result():
        torch.manual_seed(0)
        pipe = pipeline(nn.Sequential(nn.Linear(6, 6), Sometimes(), nn.Linear(6, 6)), "pb")
        for x, y in data(20):
            pipe.push(x, y)
        assert bool(strips(pipe)) == on
        return everything(pipe)

    on = True
    found = result()
    apart(monkeypatch)
    on = False
    assert torch.equal(found, result())


def test_which_weights_lie_so():
    def laid(model, **options):
        pipe = pipeline(model, "pb", **options)
        dtype = next(model.parameters()).dtype
        pipe.push(torch.randn(1, 64, dtype=dtype), torch.zeros(1, 64, dtype=dtype))
        return bool(strips(pipe))

    small, large = (lambda: [nn.Linear(64, 64) for _ in range(3)]), (lambda: [nn.Linear(64, 1024), nn.Linear(1024, 64)])
    assert laid(nn.Sequential(*small()))
    assert not laid(nn.Sequential(*large()))
    assert not laid(nn.Sequential(*small()).bfloat16(), masters=True)
    assert not laid(nn.Sequential(*small()), store="host")
    assert not laid(nn.Sequential(*small()).share_memory()), "other processes look at them"


def test_nothing_is_left_of_a_pipeline_that_is_gone():
    pipe, _ = trained("cerebras")
    model, beside = pipe.model, pipe.memory().beside
    one = next(model.parameters()).untyped_storage()
    assert all(p.untyped_storage().data_ptr() == one.data_ptr() for p in model.parameters() if p.requires_grad)
    assert beside == 2 * one.nbytes()
    again = pipeback.Pipeline(model, loss=nn.functional.mse_loss, optimizer=OPTIMIZERS["momentum"], method="pb")
    before = [p.clone() for p in model.parameters()]
    del pipe
    gc.collect()
    again.push(*data(1)[0])
    again.wait()
    assert next(model.parameters()).untyped_storage().data_ptr() != one.data_ptr()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert not all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
