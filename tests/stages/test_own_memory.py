"""Law: what a stage sends on is what its forward saw, also where it lies in a weight or in a buffer that changes.

By the time that a later stage reads it, an update may have written there, or a store taken the memory away.
"""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipeback
from tests.helpers.choice import diagonal

WIDTH = 6
SENT = {
    "the weight": lambda w: w,
    "a view": lambda w: w.view(1, WIDTH, WIDTH),
    "transposed": lambda w: w.t(),
    "slice": lambda w: w[1:],
    "expanded": lambda w: w[None].expand(2, WIDTH, WIDTH),
    "detached": lambda w: w.detach(),
}
RUNTIMES = {
    "workers": {"workers": 2},
    "host": {"store": "host"},
    "host, workers": {"store": "host", "workers": 2},
    "recompute": {"activations": "recompute"},
    "as one": {"vectorize": True},
}


class Gives(nn.Module):
    """Gives an activation, and its weight in some form; copies: as a copy."""

    def __init__(self, sent, copies):
        super().__init__()
        self.weight, self.layer = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.sent, self.copies = sent, copies

    def forward(self, x):
        weight = SENT[self.sent](self.weight)
        return self.layer(x), weight.clone() if self.copies else weight


class Takes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, given):
        x, weight = given
        return self.layer(x) @ weight.reshape(-1, WIDTH).T


class Traced(nn.Module):
    """The same stages, which a trace finds."""

    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x


def sgd(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def trained(sent, copies, traced=False, dtype=torch.float32, **options):
    """The losses, weights and outputs of a pipeline."""
    torch.manual_seed(0)
    rows = SENT[sent](torch.zeros(WIDTH, WIDTH)).numel() // WIDTH
    model = (Traced if traced else nn.Sequential)(Gives(sent, copies), Takes(), nn.Linear(rows, 3))
    xs, ys = torch.randn(6, 4, WIDTH).to(dtype), torch.randn(6, 4, 3).to(dtype)
    pipe = pipeback.Pipeline(
        model.to(dtype), loss=mse_loss, optimizer=sgd, example=xs[0], stages="layer" if traced else "auto", **options
    )
    losses = [pipe.push(x, y) for x, y in zip(xs, ys, strict=True)]
    pipe.drain()
    values = [p.clone() for p in pipe.model.state_dict().values()]
    found = [torch.stack([loss.detach() for loss in losses]), *values, pipe.evaluate(xs[0]).detach(), pipe.run(xs[0])]
    pipe.close()
    return found


# a whole weight of a traced model belongs to the stage that computes with it
CASES = [(sent, traced) for sent in SENT for traced in (False, True) if not traced or sent != "the weight"]


@pytest.mark.parametrize(("sent", "traced"), CASES)
def test_a_weight_that_is_sent_on_is_what_the_forward_saw(sent, traced):
    found, wanted = (trained(sent, copies, traced, method="pb") for copies in (False, True))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize(("sent", "runtime", "traced"), diagonal(SENT, RUNTIMES, [False, True]))
def test_runtimes_agree(sent, runtime, traced):
    method = "pipedream" if runtime == "recompute" else "pb"
    as_one = runtime == "as one"
    dtype = torch.float64 if as_one else torch.float32
    found = trained(sent, False, traced, dtype, method=method, **RUNTIMES[runtime])
    for one, other in zip(found, trained(sent, False, traced, dtype, method=method), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10 if as_one else 0, atol=1e-10 if as_one else 0)


class Counts(nn.Module):
    """Gives its input, and how many it has had, in a buffer."""

    def __init__(self, copies):
        super().__init__()
        self.layer, self.copies = nn.Linear(WIDTH, WIDTH), copies
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count.add_(1)
        return self.layer(x), self.count.clone() if self.copies else self.count


class Divides(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, given):
        x, count = given
        return self.layer(x) / count


@pytest.mark.parametrize("workers", [None, 2])
def test_a_buffer_that_changes_is_what_the_forward_saw(workers):
    def losses(copies):
        torch.manual_seed(0)
        model = nn.Sequential(Counts(copies), Divides(), nn.Linear(WIDTH, 3))
        pipe = pipeback.Pipeline(model, loss=mse_loss, optimizer=sgd, method="pb", workers=workers)
        found = [float(pipe.push(torch.randn(4, WIDTH), torch.randn(4, 3))) for _ in range(6)]
        pipe.close()
        return found

    assert losses(False) == losses(True)
