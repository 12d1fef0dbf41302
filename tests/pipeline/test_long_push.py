"""A long push holds no more than a short one beyond its data, and a loss of 4 bytes per micro-batch."""

import gc

import pytest
import torch

import pipeback
from pipeback.pipeline.option_checks import micro_batches
from pipeback.pipeline.slices import AT_ONCE, Slices
from pipeback.runtime.link import LocalLink
from tests.laws.cases import CASES, network, pipeline


@pytest.mark.parametrize("case", ["sgd", "pb", "cerebras", "pipedream", "gpipe-4", "pipedream_2bw"])
def test_objects_in_the_middle_of_a_push_do_not_grow_with_it(case, monkeypatch):
    pipe = pipeline(network(), CASES[case](5), micro_batch_size=1)
    x, y = torch.randn(900, 6), torch.randn(900, 6)
    counted, enter = [], LocalLink.enter

    def entering(link, mb, *rest):
        if mb in asked:
            gc.collect()
            counted.append(len(gc.get_objects()))
        return enter(link, mb, *rest)

    monkeypatch.setattr(LocalLink, "enter", entering)
    asked = (60, 60 + 3 * AT_ONCE)  # at one place of what is cut at once, and of a group
    pipe.push(x, y)
    assert len(counted) == 2 and counted[1] - counted[0] < 50


def test_slices_are_what_a_list_would_be():
    x, y = (torch.arange(40).view(20, 2), torch.randn(20)), (torch.arange(20), 3)
    found = micro_batches(x, y, 3)
    assert isinstance(found, Slices) and len(found) == 7
    wanted = [((x[0][n : n + 3], x[1][n : n + 3]), (y[0][n : n + 3], 3), min(3, 20 - n)) for n in range(0, 20, 3)]
    for some, others in (
        (list(found), wanted), ([found[n] for n in range(7)], wanted), (list(found[2:5]), wanted[2:5]),
        (list(found[::-2]), wanted[::-2]), ([found[-1]], wanted[-1:]), (found.unlike, [wanted[0], wanted[-1]]),
    ):  # fmt: skip
        assert len(some) == len(others)
        for (a, b, size), (c, d, samples) in zip(some, others, strict=True):
            assert size == samples and b[1] == d[1] and torch.equal(b[0], d[0])
            assert all(torch.equal(p, q) for p, q in zip(a, c, strict=True))
    with pytest.raises(IndexError):
        found[7]


def test_many_slices_are_cut_a_block_at_a_time():
    x, y = torch.arange(1000.0).view(1000, 1), torch.arange(1000)
    found = micro_batches(x, y, 1)
    assert [(float(a), int(b), n) for a, b, n in found] == [(n, n, 1) for n in range(1000)]


@pytest.mark.parametrize("weights", ["equal", "samples"])
def test_its_loss_is_the_mean(weights):
    x, y = torch.randn(10, 6), torch.randn(10, 6)
    whole, parts = (
        pipeline(network(), "sgd", micro_batch_size=pipeback.MicroBatches(4, weights=weights)) for _ in range(2)
    )
    losses = torch.stack([parts.push(x[n : n + 4], y[n : n + 4]) for n in (0, 4, 8)])
    samples = torch.tensor([4.0, 4.0, 2.0])
    wanted = losses.mean() if weights == "equal" else (losses * samples).sum() / samples.sum()
    assert torch.equal(whole.push(x, y), wanted)
