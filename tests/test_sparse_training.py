"""Sparse training: streamed survivors equal dense training with masks, and only survivors travel."""

import pytest
import torch
from torch import nn

from pipeback import disk, sparsities
from pipeback.sparsity import At
from tests.laws.cases import CASES, OPTIMIZERS, STAGES, data, everything, network, pipeline

POLICIES = {
    "magnitude": lambda: sparsities.create("magnitude", density=0.3),
    "gradual": lambda: sparsities.create("gradual", density=0.2, start=2, every=3, steps=4),
    "set": lambda: sparsities.create("set", density=0.3, every=4),
    "rigl": lambda: sparsities.create("rigl", density=0.3, every=4, until=40),
}
WIDTH = 24


def run(case, policy, optimizer="momentum", **options):
    pipe = pipeline(
        network(width=WIDTH), CASES[case](STAGES), optimizer, sparsity=POLICIES[policy](), micro_batch_size=3, **options
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


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "case", ["sgd", "gpipe", "pb", "cerebras", "lwp-weight", "pipedream", "pipemare", "spectrain-v2"]
)
def test_streamed_equals_resident(case, policy, tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "SMALL", 1)
    expected = run(case, policy)
    for options in ({"store": "host"}, {"store": f"disk:{tmp_path}"}, {"store": "host", "workers": 2}):
        for found, wanted in zip(run(case, policy, **options), expected, strict=True):
            assert torch.equal(found, wanted), f"{options} differs from the resident run"


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


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_equals_dense_training_with_masks(policy, optimizer):
    batches = data(21, width=WIDTH)
    torch.manual_seed(0)  # as `network` does, and of what the pipeline takes its streams
    wanted = masked(POLICIES[policy](), optimizer, batches, torch.initial_seed())
    pipe = pipeline(network(width=WIDTH), "sgd", optimizer, sparsity=POLICIES[policy](), store="host")
    for x, y in batches:
        pipe.push(x, y)
    for name, value in pipe.model.state_dict().items():
        assert torch.equal(value, wanted.state_dict()[name]), name
        if name.endswith("weight"):
            assert 0 < int((value != 0).sum()) < value.numel()
