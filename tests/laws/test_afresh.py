"""Law: B of plain PB makes functions of the weights anew, of the weights in force at B.

The reference is written out by hand in float64: micro-batch j goes forward at stage s of S on version
max(0, j − 2·(S − 1 − s)) of its weights, and backward on version j, functions of the weights included.
"""

import pytest
import torch
from torch import nn

import pipeback
from pipeback import methods
from tests.laws.cases import everything

WIDTH, RATE = 4, 0.05


class Norm(nn.Module):
    """y = x / rms(x) · (1 + w), as Gemma has it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH) * 0.3)

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) * (1 + self.weight)

    @staticmethod
    def back(w, x, g):
        root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True))
        h = g * (1 + w[0])
        return [(g * x * root).sum(0)], root * (h - x * root**2 * (h * x).mean(-1, keepdim=True))


class Decay(nn.Module):
    """y = x · −exp(a), as Mamba has it."""

    def __init__(self):
        super().__init__()
        self.log = nn.Parameter(torch.randn(WIDTH) * 0.3)

    def forward(self, x):
        return x * -torch.exp(self.log)

    @staticmethod
    def back(w, x, g):
        return [(g * x).sum(0) * -w[0].exp()], g * -w[0].exp()


class Normed(nn.Module):
    """y = x Wᵀ + b with W = g · v / ‖v‖, row by row."""

    def __init__(self):
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return self.linear(x)

    @staticmethod
    def back(w, x, g):
        _, size, v = w  # bias, g, v
        length = v.norm(dim=1, keepdim=True)
        unit, outer = v / length, g.T @ x
        along = (outer * unit).sum(1, keepdim=True)
        return [g.sum(0), along, size / length * (outer - along * unit)], g @ (size * unit)


class Cast(nn.Linear):
    """The weights go through another type and a mask."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("mask", torch.rand(WIDTH, WIDTH).gt(0.3).double())

    def forward(self, x):
        return nn.functional.linear(x, self.weight * self.mask, self.bias)

    def back(self, w, x, g):
        return [(g.T @ x) * self.mask, g.sum(0)], g @ (w[0] * self.mask)


class Instance(nn.Module):
    """y = (x - mean) / std · w + b over the rows, by an instance norm, which repeats w and b for every sample."""

    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm1d(WIDTH, affine=True)
        nn.init.normal_(self.norm.weight, 1.0, 0.3)

    def forward(self, x):
        return self.norm(x.T.unsqueeze(0))[0].T

    @staticmethod
    def back(w, x, g):
        root = torch.rsqrt(x.var(0, unbiased=False) + 1e-5)
        y = (x - x.mean(0)) * root
        return [(g * y).sum(0), g.sum(0)], w[0] * root * (g - g.mean(0) - y * (g * y).mean(0))


class Relative(nn.Module):
    """y = x · (M T)[r], the rows r of an interpolated table T, as MViT has it for relative positions."""

    rows = ((3, 2, 5, 4), (4, 3, 2, 1), (0, 0, 1, 6), (6, 5, 4, 3))  # r: (WIDTH, WIDTH), of 7 rows

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(5) * 0.5)

    @staticmethod
    def stretched(table):
        return nn.functional.interpolate(table.reshape(1, 1, -1), size=7, mode="linear").flatten()

    def forward(self, x):
        return x @ self.stretched(self.table)[torch.tensor(self.rows)]

    @classmethod
    def back(cls, w, x, g):
        rows = torch.tensor(cls.rows)
        long = torch.zeros(7, dtype=x.dtype).index_add(0, rows.flatten(), (x.T @ g).flatten())
        m = torch.stack([cls.stretched(row) for row in torch.eye(5, dtype=x.dtype)])  # Mᵀ
        return [m @ long], g @ cls.stretched(w[0])[rows].T


class Long(nn.Module):
    """y_j = Σ x_i · w_(j − i) over i ≤ j, a long convolution by Fourier transforms, as S4 has it."""

    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(WIDTH) * 0.5)

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x, 2 * WIDTH) * torch.fft.rfft(self.kernel, 2 * WIDTH))[:, :WIDTH]

    @staticmethod
    def back(w, x, g):
        shifts = torch.stack([torch.eye(WIDTH, dtype=x.dtype).roll(k, 1).triu(k) for k in range(WIDTH)])
        return [(shifts * (x.T @ g)).sum((1, 2))], g @ torch.einsum("k,kij->ij", w[0], shifts).T


class Both(nn.Sequential):
    def __init__(self):
        super().__init__(Norm(), nn.Linear(WIDTH, WIDTH))


def stages(*kinds):
    torch.manual_seed(0)
    return [kind().double() for kind in kinds]


KINDS = [
    (Norm, Decay, Normed, Normed), (Normed, Cast, Norm, Decay), (Decay, Normed, Cast, Norm),
    (Instance, Normed, Instance, Cast), (Relative, Relative, Norm, Relative),
    (Long, Norm, Long, Cast),
]  # fmt: skip


def pairs(count):
    generator = torch.Generator().manual_seed(1)
    draw = lambda: torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)  # noqa: E731
    return [(draw(), draw()) for _ in range(count)]


def pipeline(model, method="pb", **options):
    momentum = 0.9 if method == "cerebras" else 0
    sgd = lambda p: torch.optim.SGD(p, lr=RATE, momentum=momentum)  # noqa: E731
    return pipeback.Pipeline(model, loss=nn.functional.mse_loss, optimizer=sgd, method=method, **options)


def flat(model):
    return torch.cat([p.detach().flatten() for stage in model for p in stage.parameters()])


def reference(kinds, batches):
    """The weights when all has been drained."""
    model = stages(*kinds)
    history = [[[p.detach().clone() for p in stage.parameters()]] for stage in model]
    for j, (x, y) in enumerate(batches):
        inputs = []
        for s, stage in enumerate(model):
            used = history[s][max(0, j - 2 * (len(model) - 1 - s))]
            with torch.no_grad():
                for p, w in zip(stage.parameters(), used, strict=True):
                    p.copy_(w)
                inputs.append(x)
                x = stage(x)
        g = 2 * (x - y) / y.numel()
        for s in reversed(range(len(model))):
            now = history[s][j]
            grads, g = model[s].back(now, inputs[s], g)
            history[s].append([w - RATE * d for w, d in zip(now, grads, strict=True)])
    return torch.cat([w.flatten() for versions in history for w in versions[-1]])


@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: "-".join(kind.__name__ for kind in kinds))
def test_plain_pb_is_its_equations(kinds):
    model, batches = stages(*kinds), pairs(20)
    pipe = pipeline(model)
    for x, y in batches:
        pipe.push(x, y)
    pipe.drain()
    torch.testing.assert_close(flat(model), reference(kinds, batches), rtol=0, atol=1e-12)


RUNTIMES = [{}, {"workers": 2}, {"store": "host"}, {"activations": "host"}, {"store": "host", "activations": "host"}]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("method", ["pb", methods.create("pipemare", anneal=8)], ids=["pb", "pipemare"])
def test_runtimes_and_states_in_flight(method, autocast):
    """With workers, streamed, offloaded, and from a state saved in flight the same bits."""
    dtype = torch.float32 if autocast else torch.float64
    batches, found = [(x.to(dtype), y.to(dtype)) for x, y in pairs(12)], []
    for options in RUNTIMES:
        pipe, again = (pipeline([stage.to(dtype) for stage in stages(*KINDS[0])], method, **options) for _ in range(2))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            for x, y in batches[:6]:
                pipe.push(x, y)
            again.load_state_dict(pipe.state_dict())
            for some in (pipe, again):
                for x, y in batches[6:]:
                    some.push(x, y)
                some.drain()
                found.append(everything(some))
                some.close()
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("method", ["pb", "cerebras"])
def test_stages_that_run_as_one(method):
    """They make what B needs of the weights alone of those in force at B, in their own way: the same to rounding."""
    found = []
    for option in ({}, {"vectorize": True}):
        pipe = pipeline(stages(*[Both] * 4), method, **option)
        for x, y in pairs(14):
            pipe.push(x, y)
        pipe.drain()
        found.append(flat(pipe.model))
        pipe.close()
    torch.testing.assert_close(*found, rtol=0, atol=1e-10)


def counting():
    """Its forward changes a buffer, so that it cannot run as one, and its weight is a function of others."""
    torch.manual_seed(0)
    layer = lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))  # noqa: E731
    return nn.Sequential(*[nn.Sequential(layer(), nn.BatchNorm1d(WIDTH)) for _ in range(4)]).double()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_what_cannot_run_as_one_still_makes_them_anew(autocast, again):
    """With the bits of the event loop. again: of micro-batches of two forms."""
    found = []
    for vectorize in (False, "auto"):
        model = counting().float() if autocast else counting()
        pipe = pipeline(model, vectorize=vectorize)
        for n, (x, y) in enumerate(pairs(14)):
            x, y = (v.to(model[0][0].bias.dtype)[: 2 if again and n % 4 == 3 else 3] for v in (x, y))
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                pipe.push(x, y)
        pipe.drain()
        found.append(everything(pipe))
    assert any("changes a buffer" in told for told in pipe.vectorized.values())
    assert torch.equal(*found)
