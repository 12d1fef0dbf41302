"""What Python decides by numbers of the input: each micro-batch goes the way that the model itself would go for it."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipeback
from pipeback import meta
from pipeback.decisions import Decisions
from pipeback.follow import follow
from pipeback.program import Program


class Masked(nn.Module):
    """Leaves a mask out where it hides nothing, as transformers does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, mask):
        x = self.first(x)
        x = torch.tanh(self.second(x))
        if not mask.bool().all():
            x = x * mask
        if (mask.sum() > 7).item():
            x = x + 1
        return self.third(x)


def batches():
    generator = torch.Generator().manual_seed(1)
    for hidden in (0, 0, 4, 0, 10, 4, 0, 10):
        mask = torch.ones(3, 4)
        mask.view(-1)[:hidden] = 0
        yield torch.randn(3, 4, generator=generator), mask


def sgd(weights):
    return torch.optim.SGD(weights, lr=0.1)


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"micro_batch_size": 1}])
def test_every_way_is_the_models_own(options):
    plain, model = Masked(), Masked()
    x, mask = next(iter(batches()))
    mask = mask.clone()
    mask[0] = 0
    pipe = pipeback.Pipeline(
        model, loss=mse_loss, optimizer=sgd, method="gpipe", example=(x, mask), stages="layer", **options
    )
    optimizer, size = sgd(plain.parameters()), options.get("micro_batch_size", 3)
    for x, mask in batches():
        optimizer.zero_grad()
        losses = [mse_loss(plain(a, m), a) for a, m in zip(x.split(size), mask.split(size), strict=True)]
        (sum(losses) / len(losses)).backward()
        optimizer.step()
        pipe.push((x, mask), x)
        assert torch.equal(pipe.evaluate((x, mask)), plain(x, mask)) or "micro_batch_size" in options
    for a, b in zip(plain.parameters(), pipe.model.parameters(), strict=True):
        assert torch.allclose(a, b) if "micro_batch_size" in options else torch.equal(a, b)


def test_only_what_depends_on_the_input_alone_is_asked_in_advance():
    class Late(Masked):
        def forward(self, x, mask):
            x = self.first(x)
            return self.second(x) if x.sum() > 0 else self.third(x)

    x, mask = next(iter(batches()))
    for model, count in ((Masked(), 2), (Late(), 0)):
        record, _ = follow(model, (x, mask), {}, lambda path, module: bool(path))
        found = Decisions(record)
        assert sum(call.check is not None for call in found.calls) == count and found.hold((x, mask))


class Made(nn.Module):
    """Makes tensors where its input is."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x + torch.arange(4, device=x.device))
        return self.second(x + torch.ones(4, device=x.device))


def test_a_stage_computes_where_its_input_is():
    """In a store the weights are followed in host memory, and compute elsewhere; here on the meta device."""
    model = Made()
    program = Program(model, torch.randn(3, 4), "layer")
    value = torch.randn(3, 4, device="meta")
    meta.let_go(model)
    for segment in program.segments:
        value = segment(value)
    assert value.is_meta and len(program.segments) == 2
