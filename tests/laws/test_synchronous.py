"""Law: synchronous means synchronous: GPipe and 1F1B are plain training on the sum divided once."""

import pytest
import torch
from torch import nn

import pipeback
from tests.laws.cases import OPTIMIZERS, data, network, pipeline, weights

FLUSHING = ["gpipe", "one_f_one_b", "zb_h1", "zb_h2", "interleaved", "looped_bfs", "zb_v"]


def summed(batches, sizes, optimizer, *, by_samples=False):
    """The reference: gradients of a flush summed in micro-batch order, divided once by the count."""
    model = network()
    opt = OPTIMIZERS[optimizer](model.parameters())
    at = 0
    for size in sizes:
        some = batches[at : at + size]
        at += size
        for x, y in some:
            loss = nn.functional.mse_loss(model(x), y)
            (loss * len(x) if by_samples else loss).backward()
        count = sum(len(x) for x, _ in some) if by_samples else len(some)
        for p in model.parameters():
            p.grad /= count
        opt.step()
        opt.zero_grad()
    return torch.cat([p.detach().flatten().double() for p in model.parameters()])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", FLUSHING)
@pytest.mark.parametrize("flush", [1, 3, 5, 8])
def test_flushes_across_pushes_with_a_ragged_end(name, flush, optimizer):
    batches = data(13)
    pipe = pipeline(network(), pipeback.methods.create(name, micro_batches=flush), optimizer)
    for x, y in batches:
        pipe.push(x, y)
    pipe.drain()
    sizes = [flush] * (13 // flush) + ([13 % flush] if 13 % flush else [])
    assert torch.equal(weights(pipe), summed(batches, sizes, optimizer))


@pytest.mark.parametrize("name", FLUSHING)
def test_none_is_one_flush_a_push_whatever_its_length(name):
    batches = data(9)
    pipe = pipeline(network(), name, micro_batch_size=3)
    for first, size in ((0, 4), (4, 1), (5, 3), (8, 1)):
        some = batches[first : first + size]
        pipe.push(torch.cat([x for x, _ in some]), torch.cat([y for _, y in some]))
    assert torch.equal(weights(pipe), summed(batches, [4, 1, 3, 1], "momentum"))


@pytest.mark.parametrize("name", FLUSHING)
def test_whole_batch_in_float64(name):
    """Against plain training on the whole batch, which sums in another order: 1e-12."""
    model, pipe = network(dtype=torch.float64), pipeline(network(dtype=torch.float64), name, micro_batch_size=2)
    opt = OPTIMIZERS["momentum"](model.parameters())
    for x, y in data(10, samples=8, dtype=torch.float64):
        loss = pipe.push(x, y)
        plain = nn.functional.mse_loss(model(x), y)
        plain.backward()
        opt.step()
        opt.zero_grad()
        torch.testing.assert_close(loss, plain.detach(), rtol=1e-12, atol=1e-12)
    wanted = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(weights(pipe), wanted, rtol=1e-12, atol=1e-12)


def test_short_last_micro_batch_weighs_equally_or_by_samples():
    x, y = (torch.cat(parts) for parts in zip(*data(3), strict=True))
    x, y = x[:7], y[:7]  # micro-batches of 3, 3 and 1
    pieces = [(x[:3], y[:3]), (x[3:6], y[3:6]), (x[6:], y[6:])]
    equal, samples = (
        pipeline(network(), "gpipe", micro_batch_size=pipeback.MicroBatches(3, weights=how))
        for how in ("equal", "samples")
    )
    losses = [nn.functional.mse_loss(network()(a), b) for a, b in pieces]
    assert torch.equal(equal.push(x, y), torch.stack(losses).mean())
    torch.testing.assert_close(samples.push(x, y), nn.functional.mse_loss(network()(x), y))
    assert torch.equal(weights(equal), summed(pieces, [3], "momentum"))
    torch.testing.assert_close(weights(samples), summed(pieces, [3], "momentum", by_samples=True), rtol=1e-6, atol=1e-7)
    assert not torch.equal(weights(equal), weights(samples))


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"debug": pipeback.Debug(order="skewed")}], ids=str)
def test_an_update_of_one_micro_batch_needs_no_weights(options):
    """Whatever its size, it has the bits of plain training, which neither multiplies by samples nor divides by them."""
    batches = [data(1, samples=size, seed=size)[0] for size in (3, 5, 4, 7, 1, 6)]
    pipe = pipeline(network(), "sgd", micro_batch_size=pipeback.MicroBatches(weights="samples"), **options)
    for x, y in batches:
        pipe.push(x, y)
    pipe.drain()
    assert torch.equal(weights(pipe), summed(batches, [1] * 6, "momentum"))
