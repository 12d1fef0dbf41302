"""A forward that writes into its weights trains as in a plain loop, or is refused where this would be lost."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipeback
from tests.laws.cases import OPTIMIZERS, pipeline


class Bounded(nn.Linear):
    """Clips its weight before it uses it, of which autograd is not told."""

    def forward(self, x):
        self.weight.data.clamp_(-0.2, 0.2)
        return super().forward(x)


def model(kind):
    torch.manual_seed(0)
    first = nn.Embedding(9, 6, max_norm=0.5) if kind == "embedding" else Bounded(6, 6)
    return nn.Sequential(first, nn.Sequential(nn.Tanh(), nn.Linear(6, 6)), nn.Linear(6, 6))


def batches(kind, count=8):
    torch.manual_seed(1)
    return [
        (torch.randint(9, (3,)) if kind == "embedding" else torch.randn(3, 6), torch.randn(3, 6)) for _ in range(count)
    ]


@pytest.mark.parametrize("kind", ["embedding", "bounded"])
@pytest.mark.parametrize("options", [{}, {"workers": 2}], ids=str)
def test_what_a_forward_writes_stays(kind, options):
    made, plain = model(kind), model(kind)
    opt = OPTIMIZERS["momentum"](plain.parameters())
    pipe = pipeline(made, "sgd", "momentum", **options)
    for x, y in batches(kind):
        loss = mse_loss(plain(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        assert torch.equal(pipe.push(x, y), loss)
    pipe.drain()
    assert all(map(torch.equal, made.parameters(), plain.parameters()))


@pytest.mark.parametrize("kind", ["embedding", "bounded"])
@pytest.mark.parametrize(
    ("method", "options", "why"),
    [
        ("sgd", {"store": "host"}, "copies of those in the store, so that this would be lost.*store=None"),
        ("pb", {"store": "host"}, "copies of those in the store"),
        ("cerebras", {}, 'on shifted copies of them, so that this would be lost; use method="pb" or "pipedream"'),
    ],
)
def test_what_would_be_lost_is_refused(kind, method, options, why):
    """And the cures work."""
    x, y = batches(kind, 1)[0]
    with pytest.raises(ValueError, match=rf"stage 0 \(0\): its forward writes into its weights \(weight\).*{why}"):
        pipeline(model(kind), method, **options).push(x, y)
    for cured in ("pb", "pipedream"):
        pipeline(model(kind), cured).push(x, y)


class Counted(nn.Linear):
    """As `Bounded`, in a way that autograd notices."""

    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


@pytest.mark.parametrize("options", [{}, {"workers": 2}], ids=str)
def test_a_write_that_autograd_counts_is_told_with_its_cure(options):
    """Without a delay it trains; with one, `Bounded` shows that the cure works."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 6), Counted(6, 6)), nn.Linear(6, 6), nn.Linear(6, 6)]
    pipe = pipeline(nn.Sequential(*layers), "pb", **options)
    with pytest.raises(pipeback.StageError, match=r"stage 0 \(0\).*inplace operation.*self\.weight\.data\.clamp_\(\)"):
        for x, y in batches("bounded"):
            float(pipe.push(x, y))
    pipe.close()
    pipe = pipeline(nn.Sequential(*layers), "sgd", **options)
    assert all(torch.isfinite(pipe.push(x, y)) for x, y in batches("bounded"))


class Teacher(nn.Module):
    """A layer that follows another one, which it teaches."""

    def __init__(self):
        super().__init__()
        self.own, self.teacher = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            self.teacher.weight.mul_(0.9).add_(self.own.weight, alpha=0.1)
        return self.own(x) - self.teacher(x)


@pytest.mark.parametrize("options", [{"activations": "recompute"}, {"store": "host"}], ids=str)
def test_a_teacher_follows_once_or_is_refused(options):
    made = lambda: nn.Sequential(nn.Linear(6, 6), Teacher())  # noqa: E731
    x, y = batches("bounded", 1)[0]
    with pytest.raises(ValueError, match=r"stage 1 \(1\): its forward writes into its weights \(teacher.weight\), but"):
        pipeline(made(), "sgd", **options).push(x, y)
    pipeline(made(), "sgd").push(x, y)


def test_what_is_written_alike_twice_may_be_recomputed():
    found = []
    for activations in ("device", "recompute"):
        made = model("embedding")
        pipe = pipeline(made, "gpipe", activations=activations)
        for x, y in batches("embedding"):
            pipe.push(x, y)
        found.append(list(made.parameters()))
    assert all(map(torch.equal, *found))


def test_bounds_between_pushes():
    """As the message says, where weights live in a store."""
    made = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    pipe = pipeline(made, "pb", store="host")
    for x, y in batches("bounded", 4):
        pipe.push(x, y)
        with pipe.shown(changes=True), torch.no_grad():
            made[0].weight.clamp_(-0.1, 0.1)
    assert pipe.model[0].weight.abs().max() == torch.tensor(0.1)


def rows_that_grow(count=3):
    """An embedding whose rows are in norm until the first update."""
    torch.manual_seed(0)
    first = nn.Embedding(9, 6, max_norm=1.0)
    with torch.no_grad():
        first.weight.mul_(0.1)
    return nn.Sequential(first, *[nn.Linear(6, 6) for _ in range(count)])


@pytest.mark.parametrize(("method", "options"), [("sgd", {"store": "host"}), ("cerebras", {})])
def test_an_embedding_that_will_write_is_refused_at_the_first_push(method, options):
    x, y = batches("embedding", 1)[0]
    with pytest.raises(ValueError, match=r"stage 0 \(0\): its forward writes into its weights \(weight\)"):
        pipeline(rows_that_grow(), method, **options).push(x, y)


def test_replicas_would_bound_other_rows():
    """And so drift apart; where all write the same, as `Bounded`, they may."""
    x, y = batches("embedding", 1)[0]
    with pytest.raises(ValueError, match=r"stage 0 \(0\): weight has max_norm, by which each replica.*use replicas=1"):
        pipeline(rows_that_grow(), "pb", replicas=2, micro_batch_size=1).push(torch.cat([x, x]), torch.cat([y, y]))
    x, y = batches("bounded", 1)[0]
    pipeline(model("bounded"), "pb", replicas=2, micro_batch_size=1).push(torch.cat([x, x]), torch.cat([y, y]))
