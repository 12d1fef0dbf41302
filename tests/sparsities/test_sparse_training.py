"""Sparse training: streamed survivors equal dense training with masks, and only survivors travel."""

from itertools import cycle, product

import pytest
import torch
from torch import nn

import pipeback
from pipeback import sparsities
from pipeback.sparsities.base import At
from pipeback.streaming import disk_store, sparse_weights
from tests.helpers.choice import mostly_rare
from tests.laws.cases import CASES, OPTIMIZERS, STAGES, data, everything, network, pipeline

POLICIES = {
    "magnitude": lambda: sparsities.create("magnitude", density=0.3),
    "gradual": lambda: sparsities.create("gradual", density=0.2, start=2, every=3, steps=4),
    "set": lambda: sparsities.create("set", density=0.3, every=4),
    "rigl": lambda: sparsities.create("rigl", density=0.3, every=4, until=40),
}
WIDTH = 24


def run(case, policy, optimizer="momentum", store=None, **options):
    streaming = pipeback.Streaming(store, sparsity=POLICIES[policy]())
    pipe = pipeline(
        network(width=WIDTH), CASES[case](STAGES), optimizer, store=streaming, micro_batch_size=3, **options
    )
    batches = data(21, width=WIDTH)
    losses = []
    for begin in range(0, 21, 3):
        x, y = (torch.cat(part) for part in zip(*batches[begin : begin + 3], strict=True))
        losses.append(pipe.push(x, y).clone())
    flying = everything(pipe)
    pipe.drain()
    result = torch.stack(losses), flying, everything(pipe)
    pipe.close()
    return result


STREAMED = ["sgd", "gpipe", "pb", "cerebras", "lwp-weight", "pipedream", "pipemare", "spectrain-v2"]


def in_turn(cases, every=1):
    """Each with one policy, or every second or third of these; the others in the soak."""
    return mostly_rare(product(cases, POLICIES), *list(zip(cases, cycle(POLICIES), strict=False))[::every])


@pytest.mark.parametrize(("case", "policy"), in_turn(STREAMED, every=3))
def test_streamed_equals_resident(case, policy, tmp_path, monkeypatch):
    monkeypatch.setattr(disk_store, "SMALL", 1)
    expected = run(case, policy)
    for options in ({"store": "host"}, {"store": f"disk:{tmp_path}"}, {"store": "host", "workers": 2}):
        for found, wanted in zip(run(case, policy, **options), expected, strict=True):
            assert torch.equal(found, wanted), f"{options} differs from the resident run"


@pytest.mark.parametrize(("case", "policy"), in_turn(["gpipe", "pb", "cerebras", "pipedream", "pipemare"]))
def test_zeros_that_are_not_computed(case, policy):
    """Sums are made in another order: equal to rounding."""

    def run(*store, **options):
        streaming = pipeback.Streaming(*store, sparsity=POLICIES[policy](), **options)
        pipe = pipeline(
            network(width=WIDTH, dtype=torch.float64), CASES[case](STAGES), store=streaming, micro_batch_size=3
        )
        for x, y in data(21, width=WIDTH, dtype=torch.float64):
            pipe.push(x, y)
        return pipe

    wanted, found = run(), run("host", skip_zeros=True)
    assert (everything(found) - everything(wanted)).abs().max() < 1e-12
    assert sum(len(stage.home.slot.skipping) for stage in found._engine.stages) == STAGES
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    assert (found.evaluate(x) - wanted.model.eval()(x)).abs().max() < 1e-12
    assert (found.model(x) - wanted.model(x)).abs().max() < 1e-12


def test_auto_skips_where_it_was_measured_to_pay(monkeypatch):
    asked = []

    def gain(shape, density, dtype, device):
        asked.append((tuple(shape), density))
        return 2.0 if len(asked) % 2 else 1.0

    monkeypatch.setattr(sparse_weights, "gain", gain)
    pipe = pipeline(
        network(width=WIDTH), "pb", store=pipeback.Streaming(sparsity=POLICIES["magnitude"](), skip_zeros="auto")
    )
    assert [len(stage.home.slot.skipping) for stage in pipe._engine.stages] == [1, 0, 1, 0, 1]
    assert asked == [((WIDTH, WIDTH), 0.3)] * STAGES


def test_only_survivors_travel():
    """90 % of zeros: values and index are at most 0.16 of the dense bytes, gradients 0.1 and the biases."""
    x, y = torch.randn(2, 8, 256)
    sent = {}
    for name, policy in (("dense", None), ("sparse", sparsities.create("set", density=0.1))):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)])
        pipe = pipeline(model, "gpipe", store=pipeback.Streaming("host", sparsity=policy))
        for _ in range(4):
            pipe.push(x, y)
        sent[name] = pipe.traffic()
    assert sent["sparse"].fetches == sent["dense"].fetches
    assert sent["sparse"].weights_in <= 0.16 * sent["dense"].weights_in
    assert sent["sparse"].gradients_out <= 0.105 * sent["dense"].gradients_out


@pytest.mark.parametrize("store", ["host", "disk"])
def test_a_state_goes_on_in_any_store(store, tmp_path, monkeypatch):
    monkeypatch.setattr(disk_store, "SMALL", 1)

    def build(store=None):
        streaming = pipeback.Streaming(store, sparsity=POLICIES["rigl"]())
        return pipeline(network(width=WIDTH), "pipedream", "adam", store=streaming)

    batches = data(30, width=WIDTH)
    whole, first = build(), build(store="host")
    for n, (x, y) in enumerate(batches):
        whole.push(x, y)
        if n < 17:
            first.push(x, y)
    again = build(store="host" if store == "host" else f"disk:{tmp_path}")
    again.load_state_dict(first.state_dict())
    for x, y in batches[17:]:
        again.push(x, y)
    assert torch.equal(everything(again), everything(whole))


def test_what_cannot_be_sparse():
    with pytest.raises(ValueError, match="Muon of stage 0 .* may look at whole matrices.*SGD or AdamW"):
        pipeback.Pipeline(
            nn.Sequential(nn.Linear(4, 4, bias=False)), loss=nn.functional.mse_loss,
            optimizer=lambda p: torch.optim.Muon(p, lr=0.1), method="pb",
            store=pipeback.Streaming(sparsity="magnitude"),
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"exclude='head.\*' names no parameter; there are 0.0.weight, 0.0.bias"):
        pipeline(network(), "pb", store=pipeback.Streaming(sparsity=sparsities.create("set", exclude="head.*")))
    with pytest.raises(ValueError, match="no parameter is sparsified"):
        pipeline(nn.Sequential(nn.LayerNorm(4)), "pb", store=pipeback.Streaming(sparsity="set"))
    with pytest.raises(ValueError, match="unknown sparsity 'sett'; did you mean 'set'"):
        pipeline(network(), "pb", store=pipeback.Streaming(sparsity="sett"))
    pipe = pipeline(network(), "pb", store=pipeback.Streaming(sparsity="set"))
    with pytest.raises(ValueError, match="trained with sparsity=SparseEvolution.*, the pipeline has None"):
        pipeline(network(), "pb").load_state_dict(pipe.state_dict())


@pytest.fixture(autouse=True)
def adagrad(monkeypatch):
    """An optimizer that has state from the beginning."""
    monkeypatch.setitem(OPTIMIZERS, "adagrad", lambda p: torch.optim.Adagrad(p, lr=0.02, initial_accumulator_value=0.1))


def masked(policy, optimizer, batches, seed):
    """Plain dense training with masks: gradients are masked, and what is dropped loses its value and its state."""
    model = network(width=WIDTH)
    weights = [layer[0].weight for layer in model]
    densities = policy.densities([w.shape for w in weights])
    stages = [OPTIMIZERS[optimizer](list(layer.parameters())) for layer in model]
    with torch.no_grad():
        masks = [policy.masks([w], [d], At(seed, s))[0].view_as(w) for s, (w, d) in enumerate(zip(weights, densities))]
        for w, mask in zip(weights, masks, strict=True):
            w.mul_(mask)
    for n, (x, y) in enumerate(batches, 1):
        nn.functional.mse_loss(model(x), y).backward()
        for s, (w, mask, own) in enumerate(zip(weights, masks, stages, strict=True)):
            dense = w.grad.clone()
            w.grad *= mask
            own.step()
            own.zero_grad()
            if policy.due(n):
                at = At(seed, s, n)
                new = policy.change([w.detach()], [mask], [dense], [densities[s]], at)[0].view_as(w)
                with torch.no_grad():
                    for value in (w, *(v for v in own.state[w].values() if v.shape == w.shape)):
                        value.mul_(mask & new)
                mask.copy_(new)
    return model


@pytest.mark.parametrize(("optimizer", "policy"), in_turn([*OPTIMIZERS, "adagrad"]))
def test_it_equals_dense_training_with_masks(policy, optimizer):
    batches = data(21, width=WIDTH)
    torch.manual_seed(0)  # as `network` does, and of what the pipeline takes its streams
    wanted = masked(POLICIES[policy](), optimizer, batches, torch.initial_seed())
    pipe = pipeline(
        network(width=WIDTH), "sgd", optimizer, store=pipeback.Streaming("host", sparsity=POLICIES[policy]())
    )
    for x, y in batches:
        pipe.push(x, y)
    for name, value in pipe.model.state_dict().items():
        assert torch.equal(value, wanted.state_dict()[name]), name
        if name.endswith("weight"):
            assert 0 < int((value != 0).sum()) < value.numel()
