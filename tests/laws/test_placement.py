"""Law: threads that hold several parts of the stages equal the event loop, bit for bit, whatever goes with them."""

import pytest
import torch
from torch import nn

import pipeback
from pipeback import methods
from tests.laws.cases import OPTIMIZERS, data, everything, network, pipeline

METHODS = {
    "interleaved": lambda: methods.create("interleaved", chunks=2),
    "looped_bfs": lambda: methods.create("looped_bfs", chunks=2),
    "zb_v": lambda: methods.create("zb_v"),
    "pb-v": lambda: methods.create("pb", placement="v"),
    "chained": lambda: pipeback.chain(methods.create("pb", placement="v"), methods.create("ef")),
}


def trained(name, samples=12, **options):
    """Losses of pushes of four micro-batches each, and all that is held in flight."""
    pipe = pipeline(network(8), METHODS[name](), "adamw", micro_batch_size=3, **options)
    losses = torch.stack([pipe.push(x, y).clone() for x, y in data(4, samples=samples)])
    result = losses, everything(pipe)
    pipe.close()
    return result


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("store", ["host", "disk"])
def test_weights_that_are_streamed(name, store, tmp_path):
    """A flush runs as GPipe does there, on the same parts."""
    wanted = trained(name)
    for n, workers in enumerate((None, 2)):
        where = store if store == "host" else f"disk:{tmp_path / str(n)}"
        for found, one in zip(trained(name, store=where, workers=workers), wanted, strict=True):
            assert torch.equal(found, one), workers


@pytest.mark.parametrize("name", METHODS)
def test_sparse_weights_on_the_device(name):
    found, wanted = (trained(name, store=pipeback.Streaming(sparsity="set"), workers=n) for n in (2, None))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("activations", ["host", "recompute"])
def test_every_kind_of_activations(name, activations):
    found, wanted = (trained(name, activations=activations, workers=n) for n in (2, None))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_replicas_each_have_the_same_parts(name):
    """Two pipelines of two threads each; and the event loop with two replicas."""
    found, wanted = (trained(name, replicas=2, workers=n) for n in (2, None))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_a_loss_that_is_computed_outside(name):
    """Several micro-batches go forward at every part before any comes back."""

    def run(workers):
        pipe = pipeback.Pipeline(
            network(8), loss=None, optimizer=OPTIMIZERS["momentum"], method=METHODS[name](), workers=workers
        )
        for n in range(4):
            for x, y in data(3, seed=n):
                output = pipe.forward(x).requires_grad_()
                nn.functional.mse_loss(output, y).backward()
                pipe.backward(output.grad)
            pipe.step()
        found = everything(pipe)
        pipe.close()
        return found

    assert torch.equal(run(2), run(None))


class Fails(nn.Module):
    def forward(self, x):
        if x.isnan().any():
            raise ValueError("nan")
        return x


@pytest.mark.parametrize("name", METHODS)
def test_a_forward_that_fails_is_named(name):
    """In a thread it ends the pipeline, whichever part it is in; a state that was taken before goes on."""
    model = network(8)
    model[5] = nn.Sequential(model[5], Fails())
    pipe = pipeline(model, METHODS[name](), "adamw", micro_batch_size=3, workers=2)
    batches = data(4, samples=12)
    for x, y in batches[:2]:
        pipe.push(x, y)
    state = pipe.state_dict()
    x, y = batches[2]
    with pytest.raises(pipeback.StageError, match=r"stage 5 \(5\), micro-batch \d+: the forward failed: nan"):
        pipe.push(torch.where(torch.arange(12)[:, None] == 7, float("nan"), x), y)
        pipe.wait()
    pipe.load_state_dict(state)
    losses = torch.stack([pipe.push(x, y).clone() for x, y in batches[2:]])
    assert torch.equal(losses, trained(name)[0][2:])
    pipe.close()
