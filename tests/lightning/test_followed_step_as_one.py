"""Law: stages of a `training_step` that is followed run as one, and train what the event loop trains, to rounding."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, relu

from tests.helpers.choice import mostly_rare, rare
from tests.laws.as_one import same
from tests.lightning.cases import strategy, weights
from tests.lightning.several_modules import Autoencoder, Convolutions, Heads, Images, Nominated, Weighted, fitted

pytestmark = pytest.mark.filterwarnings("ignore:an update is of", "ignore:.*takes its statistics")
METHODS = ["pb", "cerebras", "pipedream", "spectrain", "pipemare", "gpipe", "one_f_one_b"]
CURE = r"use PipelineStrategy\(vectorize=False\)"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(36), nn.Linear(36, 36)

    def forward(self, x):
        return x + relu(self.linear(self.norm(x)))


class Blocks(Images):
    """A forward of its own over blocks that are alike, as most LightningModules have it."""

    def build(self):
        self.blocks, self.head = nn.ModuleList([Block() for _ in range(6)]), nn.Linear(36, 5)

    def forward(self, x):
        x = x.flatten(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, x, y):
        return cross_entropy(self(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=2e-3, momentum=0.9)


KINDS = [Blocks, Convolutions, Heads, Autoencoder]


def both(kind, method="pb", size=1, where=None, vectorize=True, **options):
    """Fit in the event loop and as one, and compare what was seen and what was logged; returns what runs as one."""
    found = []
    for way in (False, vectorize):
        how = strategy(method, micro_batch_size=size, vectorize=way, **{"stages": "layer", **(where or {})})
        found.append(fitted(kind if isinstance(kind, type) else kind(), how, precision="64-true", **options))
    wanted, ours = found
    same(ours.seen, wanted.seen)
    same([weights(ours)], [weights(wanted)])
    assert ours.logged == pytest.approx(wanted.logged, rel=1e-10)
    return how.vectorized


@pytest.mark.parametrize(("kind", "method", "size"), mostly_rare(
    [(kind, method, size) for kind in KINDS for method in METHODS for size in (1, 3)],
    (Blocks, "cerebras", 3), (Heads, "gpipe", 1), (Heads, "pb", 1), (Autoencoder, "pipedream", 3),
    (Convolutions, "spectrain", 1),
))  # fmt: skip
def test_every_method_is_the_event_loop(kind, method, size):
    """Batches of four, of which the last is short."""
    told = " ".join(both(kind, method, size).values())
    assert "as one" in told or "as a graph" in told


def test_blocks_are_one_stack():
    told = both(Blocks, where={"stages": "block"})
    assert any(why.startswith("as one") and "…" in name for name, why in told.items())


@pytest.mark.parametrize("options", mostly_rare(
    [{"where": {"workers": 2}}, {"where": {"activations": "recompute"}}, {"gradient_clip_val": 0.1}, {"validate": True},
     {"method": "gpipe", "accumulate_grad_batches": 2}],
    {"where": {"workers": 2}}, {"validate": True},
), ids=str)  # fmt: skip
def test_options(options):
    both(Convolutions, **{"size": 2, **options})


def test_a_checkpoint_in_flight(tmp_path):
    how = lambda: strategy("cerebras", micro_batch_size=1, vectorize=True)  # noqa: E731
    whole = fitted(Blocks, how(), precision="64-true")
    saving = pl.callbacks.ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
    fitted(Blocks, how(), enable_checkpointing=True, callbacks=[saving], precision="64-true")
    rest = fitted(Blocks, how(), ckpt=tmp_path / "epoch=0.ckpt", precision="64-true")
    within = 1e-6  # what Lightning loads, it loads in float32
    same(rest.seen, whole.seen[len(whole.seen) - len(rest.seen) :], within)
    same([weights(rest)], [weights(whole)], within)


@pytest.mark.parametrize("kind", [Heads, Autoencoder])
def test_it_is_that_of_one_module(kind):
    """Some of its outputs have no gradient, and some were made by earlier stages."""
    both(lambda: Nominated(kind))


def test_stages_with_other_outputs_are_not_alike():
    """Each call of `training_step` gives one output more, which later stages hand on."""

    class Called(Blocks):
        def loss(self, x, y):
            x = x.flatten(1)
            for block in self.blocks:
                x = block(x)
            return cross_entropy(self.head(x), y)

    told = both(Called, where={"stages": "block"})
    assert not any("torch cannot" in why for why in told.values())


def test_what_cannot_run_as_one():
    told = both(Weighted, vectorize="auto")
    assert any("computes with tensors that are no weights" in why for why in told.values())


# -- what training_step sets, and what it looks at ---------------------------------------------------------------------


class Warm(Blocks):
    """Sets a number that its forward reads, once per batch."""

    share = 1.0

    def forward(self, x):
        return super().forward(x * self.share)

    def loss(self, x, y):
        self.share = self.new()
        return super().loss(x, y)

    def new(self):
        return 1.0 + self.global_step % 3


class Hasty(Warm):
    """Once per micro-batch."""

    calls = 0

    def new(self):
        self.calls += 1
        return 1.0 + self.calls % 3


class Watching(Blocks):
    """Looks at the model without gradients."""

    def loss(self, x, y):
        loss = super().loss(x, y)
        with torch.no_grad():
            self.log("after", cross_entropy(self(x), y))
        return loss


class Before(Blocks):
    """Looks at it before it calls it."""

    def loss(self, x, y):
        with torch.no_grad():
            self.log("before", cross_entropy(self(x), y))
        return super().loss(x, y)


@pytest.mark.parametrize("kind", [Warm, Hasty])
def test_what_training_step_sets_is_followed_by_the_event_loop(kind):
    plain, ours = fitted(kind, precision="64-true"), fitted(kind, strategy("sgd"), precision="64-true")
    assert torch.equal(torch.stack(plain.seen), torch.stack(ours.seen)) and torch.equal(weights(plain), weights(ours))


def test_what_it_sets_for_a_whole_batch_goes_with_stages_as_one():
    both(Warm)


def test_what_it_sets_per_micro_batch_does_not():
    for vectorize in (True, "auto"):
        with pytest.raises(ValueError, match=rf"sets what the forward of self reads .*; {CURE}"):
            fitted(Hasty, strategy("pb", micro_batch_size=2, vectorize=vectorize))
    fitted(Hasty, strategy("pb", micro_batch_size=2, vectorize=False))


@pytest.mark.parametrize("size", [2, rare(4)])
def test_what_it_looks_at_after_its_call(size):
    """Its first run shows it to "auto"; else it is an error with a cure, before or while weights have moved on."""
    told = both(Watching, vectorize="auto", size=size)
    assert told == {"all stages": "stage by stage: training_step calls self without gradients"}
    with pytest.raises(ValueError, match=f"calls self without gradients, .*; {CURE}"):
        fitted(Watching, strategy("pb", micro_batch_size=size, vectorize=True))


def test_what_it_looks_at_before_its_call():
    """In batches that are one micro-batch, nothing has moved by then."""
    both(Before, size=4)
    with pytest.raises(ValueError, match=f"calls self without gradients, .*; {CURE}"):
        fitted(Before, strategy("pb", micro_batch_size=2, vectorize=True))


@pytest.mark.soak
def test_methods_that_do_not_move_weights_within_a_batch_may_be_looked_at():
    assert "all stages" not in both(Watching, "gpipe", size=2, vectorize="auto")


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("vectorize", [True, "auto"])
def test_a_nominated_module_is_looked_at_likewise(vectorize, size, monkeypatch):
    monkeypatch.setattr("pipeback.vectorized.stacks.whole_cost.gain", lambda stack, under, whole: 100.0)

    class Nominating(Blocks):
        def build(self):
            self.model = nn.Sequential(nn.Flatten(), *[Block() for _ in range(4)])

        def loss(self, x, y):
            loss = mse_loss(self.model(x), x.flatten(1))
            with torch.no_grad():
                self.log("after", self.model(x).sum())
            return loss

    with pytest.raises(ValueError, match=f"calls self.model without gradients, .*; {CURE}"):
        fitted(Nominating, strategy("pb", micro_batch_size=size, vectorize=vectorize))
