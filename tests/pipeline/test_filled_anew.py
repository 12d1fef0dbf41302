"""Law: when a call returns, its tensors are the caller's again: they may be filled with the next batch, as buffers of a
simulation or a loader are, while what was pushed is in flight.
"""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipeback
from pipeback.pipeline.option_checks import micro_batches
from pipeback.pipeline.slices import Slices, apart
from tests.helpers.choice import diagonal
from tests.laws.cases import CASES, OPTIMIZERS, network, pipeline

RUNTIMES = {
    "event loop": {},
    "workers": {"workers": 2},
    "replicas": {"replicas": 2},
    "host": {"store": "host"},
    "as one": {"vectorize": "auto"},
}
METHODS = [
    "sgd", "gpipe-4", "one_f_one_b-3", "zb_h2-7", "interleaved-4", "looped_bfs", "zb_v", "pb", "pipedream",
    "pipedream_2bw", "pipemare", "spectrain", "cerebras",
]  # fmt: skip
CUTS = {"whole": (None, 4), "short": (1, 6), "long": (2, 50)}  # the size of micro-batches, the samples of a push


class Named(nn.Module):
    """A model whose inputs have names."""

    def __init__(self):
        super().__init__()
        self.layers = network()

    def forward(self, batch):
        return self.layers(batch["x"][0] * batch["scale"])


def trained(case, size, samples, anew, traced=False, **options):
    """Losses and weights. anew: every push is of the same tensors, which are filled with the next batch behind it."""
    torch.manual_seed(0)
    model = Named() if traced else network()
    data = [(torch.randn(samples, 6), torch.randn(samples, 6)) for _ in range(6)]
    x, y = torch.empty(samples, 6), torch.empty(samples, 6)

    def given(x):
        return {"x": [x], "scale": 1.5} if traced else x

    more = {"example": given(data[0][0]), "stages": "layer"} if traced else {}
    pipe, losses = pipeline(model, CASES[case](5), micro_batch_size=size, **options, **more), []
    for a, b in data:
        if anew:
            x.copy_(a)
            y.copy_(b)
        losses.append(pipe.push(given(x if anew else a), y if anew else b))
    x.fill_(torch.nan)
    y.fill_(torch.nan)
    pipe.drain()
    found = [*map(float, losses), *(p.detach().clone() for p in model.parameters())]
    pipe.close()
    return found


@pytest.mark.parametrize(("case", "runtime", "cut", "traced"), diagonal(METHODS, RUNTIMES, CUTS, [False, True]))
def test_what_was_pushed_may_be_overwritten(case, runtime, cut, traced):
    found, wanted = (trained(case, *CUTS[cut], anew, traced, **RUNTIMES[runtime]) for anew in (True, False))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"vectorize": True}, {"workers": 2}, {"store": "host"}], ids=str)
def test_so_may_be_what_has_gone_forward_and_its_gradient(options):
    """Where the loss is computed outside."""

    def trained(anew):
        torch.manual_seed(0)
        model, x, y = network(), torch.empty(4, 6), torch.empty(4, 6)
        pipe = pipeback.Pipeline(model, loss=None, optimizer=OPTIMIZERS["sgd"], method="pb", **options)
        for a, b in [(torch.randn(4, 6), torch.randn(4, 6)) for _ in range(12)]:
            a, b = (x.copy_(a), y.copy_(b)) if anew else (a, b)
            output = pipe.forward(a)
            mse_loss(output, b).backward()
            x.fill_(torch.nan)
            gradient = output.grad.clone()
            pipe.backward(gradient)
            gradient.fill_(torch.nan)
            pipe.step()
        pipe.drain()
        return [p.detach().clone() for p in model.parameters()]

    for one, other in zip(trained(True), trained(False), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("last", [0, 1, 3, 7, 9, None])
def test_slices_lie_apart_as_they_are_taken(last):
    x, y = torch.arange(1.0, 41).view(20, 2), (torch.arange(1, 21), 5)
    cut = micro_batches(x, y, 3)
    assert isinstance(cut, Slices)
    found, wanted = apart(cut, last), [(a.clone(), b[0].clone(), n) for a, b, n in cut]
    x.zero_()
    y[0].zero_()
    kept = 7 if last is None else min(last, 7)
    for n in range(7):
        c, d, samples = wanted[n]
        for a, b, size in (found[n], list(found)[n], found[n:][0]):
            assert size == samples and b[1] == 5
            assert torch.equal(a, c) == torch.equal(b[0], d) == (n >= 7 - kept)


def masked(output, target):
    """A loss that writes into its target, as one that leaves out labels does."""
    target[target > 1] = 0
    return mse_loss(output, target)


def rooted(output, target):
    """A loss whose backward needs its value."""
    return mse_loss(output, target).sqrt()


@pytest.mark.parametrize("loss", [masked, rooted])
@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"vectorize": True}, {"store": "host"}], ids=str)
@pytest.mark.parametrize(("method", "size"), [("gpipe", 1), ("gpipe", None), ("pb", 1), ("pb", None)])
def test_a_loss_may_write_into_its_target_and_its_value_be_added_to(loss, options, method, size):
    as_one = "vectorize" in options
    dtype, within = (torch.float64, 1e-10) if as_one else (torch.float32, 0.0)

    def trained(adds, **options):
        model = network(dtype=dtype)
        torch.manual_seed(0)
        pipe = pipeback.Pipeline(
            model, loss=loss, optimizer=OPTIMIZERS["sgd"], method=method, micro_batch_size=size, **options
        )
        for _ in range(6):
            value = pipe.push(torch.randn(4, 6).to(dtype), torch.randn(4, 6).to(dtype))
            if adds:
                value += 1  # as what sums up losses does with the first of them
        pipe.drain()
        pipe.close()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    torch.testing.assert_close(trained(True, **options), trained(False), rtol=within, atol=within)
