"""Law: gradients that are known without autograd, and inputs that come as one tensor, change no number."""

import pytest
import torch
from torch.nn.functional import mse_loss

from pipeback.pipeline import outside_loss
from pipeback.pipeline.slices import joined
from pipeback.runtime.runners import Judge
from tests.helpers.choice import mostly_rare
from tests.laws.as_one import same
from tests.laws.test_outside_ticks import build, cut

KINDS = [(case, way, n) for case in ("pb", "cerebras", "gpipe-4") for way in (True, False) for n in (None, 2)]
FEW = [("pb", True, None), ("cerebras", False, None), ("gpipe-4", True, 2)]


def gradient(output, y):
    return 2 * (output - y) / y.numel()


def trained(pipe, some, judge):
    """Train on micro-batches that go forward together; return the weights as they are there."""
    xs, ys = zip(*some, strict=True)
    (output,) = pipe.forward_many(xs, expected=len(xs), judge=judge(ys))
    pipe.backward(gradient(output.detach(), ys[-1]))
    pipe.step()
    return torch.cat([p.detach().flatten().clone() for stage in pipe.split.parts for p in stage.module.parameters()])


def by_autograd(ys):
    def judge(n, output):
        mse_loss(output, ys[n]).backward()
        return output.grad

    return judge


@pytest.mark.parametrize(("case", "vectorize", "workers"), mostly_rare(KINDS, *FEW))
def test_known_gradients(case, vectorize, workers):
    """Those of every other micro-batch."""
    asked = []

    def every_other(ys):
        def known(n, output):
            return None if n % 2 else gradient(output.detach(), ys[n])

        def judge(n, output):
            assert output.requires_grad
            asked.append(n)
            return by_autograd(ys)(n, output)

        return Judge(known, judge)

    found = []
    for judge in (every_other, by_autograd):
        pipe = build(case, vectorize, workers=workers)
        after = [trained(pipe, some, judge) for some in cut((8, 3, 1, 8))]
        pipe.drain()
        found.append((*after, *pipe.model.parameters()))
        pipe.close()
    same(*found)
    assert asked == [1, 3, 5, 1, 1, 3, 5]


@pytest.mark.parametrize("vectorize", [True, False])
def test_inputs_as_one_tensor(vectorize, monkeypatch):
    """To the bit; whoever gave them may fill them anew as soon as the call has returned."""
    found, whole = [], []

    def watched(xs):
        whole.append(joined(xs))
        return whole[-1]

    for join in (watched, lambda xs: None):
        monkeypatch.setattr(outside_loss, "joined", join)
        pipe = build("cerebras", vectorize)
        for some in cut((8, 3, 8)):
            batch = torch.cat([x for x, _ in some])
            trained(pipe, list(zip(batch.split(len(some[0][0])), [y for _, y in some], strict=True)), by_autograd)
            batch.fill_(1e9)
        pipe.drain()
        found.append([p.detach().clone() for p in pipe.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert any(x is not None for x in whole)


def test_which_inputs_come_as_one():
    xs = [torch.randn(2, 8, dtype=torch.float64) for _ in range(3)]
    assert torch.equal(joined(xs), torch.cat(xs))
    assert torch.equal(joined(torch.cat(xs).split(2)), torch.cat(xs))
    shifted = torch.randn(7, 8, dtype=torch.float64).flatten()[1:49].view(6, 8)
    odd = {
        "one": xs[:1],
        "other shapes": [*xs, torch.randn(1, 8, dtype=torch.float64)],
        "other types": [*xs, torch.randn(2, 8)],
        "other strides": [x.mT.contiguous().mT for x in xs],
        "no tensors": [*xs, (xs[0],)],
        "with gradients": [*xs, xs[0].clone().requires_grad_()],
        "without samples": [torch.randn(0, 8)] * 2,
        "of no dimension": [torch.zeros(())] * 2,
        "elsewhere within a cache line": shifted.split(2),
    }
    assert {name for name, each in odd.items() if joined(each) is not None} == set()
