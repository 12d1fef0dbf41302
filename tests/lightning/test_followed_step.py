"""What training_step calls is what is trained: plain Lightning without delay, and one module with any method."""

import copy
import random

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

from pipeback.lightning.find_stages import find
from tests.helpers.choice import diagonal, mostly_rare
from tests.lightning.cases import strategy, trainer, weights
from tests.lightning.models import CASES, gpt2
from tests.lightning.several_modules import KINDS, Convolutions, Heads, Nominated, Weighted, fitted, same


@pytest.mark.parametrize(
    ("kind", "options"),
    diagonal(
        [Convolutions, Heads, Weighted],
        [{}, {"accumulate_grad_batches": 2, "limit_train_batches": 8}, {"precision": "64-true"}],
    ),
)
def test_no_delay_is_plain_lightning(kind, options):
    plain = fitted(kind, validate=kind is Convolutions, **options)
    method = "gpipe" if "accumulate_grad_batches" in options else "sgd"
    same(plain, fitted(kind, strategy(method), validate=kind is Convolutions, **options))


@pytest.mark.parametrize(("kind", "options"), mostly_rare(
    [(kind, options) for kind in KINDS[:3] for options in (
        {"method": "pb"}, {"method": "cerebras"}, {"method": "pipedream"}, {"method": "spectrain"},
        {"method": "gpipe", "micro_batch_size": 2}, {"method": "pb", "micro_batch_size": 3},
        {"method": "pb", "workers": 2}, {"method": "pb", "activations": "recompute"},
    )],
    *((kind, {"method": "cerebras"}) for kind in KINDS[:3]),
    *((kind, {"method": "gpipe", "micro_batch_size": 2}) for kind in KINDS[:3]),
    (Heads, {"method": "pb", "workers": 2}),
))  # fmt: skip
def test_any_method_is_that_of_one_module(kind, options):
    ours, one = fitted(kind, strategy(**options)), fitted(Nominated(kind), strategy(**options))
    assert torch.equal(torch.stack(ours.seen), torch.stack(one.seen))
    named = dict(ours.named_parameters())
    assert all(torch.equal(p, named[name.removeprefix("model.")]) for name, p in one.named_parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_resume_in_flight(kind, tmp_path):
    whole = fitted(kind, strategy("cerebras"))
    saving = pl.callbacks.ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
    fitted(kind, strategy("cerebras"), enable_checkpointing=True, callbacks=[saving])
    rest = fitted(kind, strategy("cerebras"), ckpt=tmp_path / "epoch=0.ckpt")
    assert torch.equal(torch.stack(rest.seen), torch.stack(whole.seen[9:]))
    assert torch.equal(weights(whole), weights(rest))


def test_what_is_nominated_where_nothing_is():
    def module(**held):
        found = pl.LightningModule()
        for name, value in held.items():
            setattr(found, name, value)
        return find(found, None).shown

    layer = nn.Linear(2, 2)
    assert module(model=layer) == "self.model" == module(model=layer, metric=torchmetrics.MeanMetric())
    assert module(net=layer, loss=nn.MSELoss()) == "self.net"
    assert module(model=layer, head=layer) == "self.model"  # it has all weights
    assert module(model=layer, head=nn.Linear(2, 2)) == "self" == module(weight=nn.Parameter(torch.ones(1)))
    assert module(layers=nn.ModuleList([layer])) == "self"


def test_the_first_step_leaves_no_trace():
    """It runs beforehand to be followed: nothing is counted, logged or drawn twice."""

    class Counts(Heads):
        def __init__(self):
            super().__init__()
            self.steps, self.total, self.kept = 0, torch.zeros(()), {}

        def loss(self, x, y):
            self.steps += 1
            loss = super().loss(x, y)
            self.total += loss.detach()
            self.kept[len(self.kept)] = torch.rand(())
            return loss

    plain, ours = fitted(Counts), fitted(Counts, strategy("sgd", stages="layer"))
    same(plain, ours)
    assert plain.steps == ours.steps == 18 == len(ours.kept)
    assert torch.equal(plain.total, ours.total) and plain.kept == ours.kept


def test_an_attribute_is_followed():
    """A number in an attribute may change: the calls are traced again."""

    class Warm(Heads):
        share = 1.0

        def on_train_batch_start(self, batch, batch_idx):
            self.share = 0.5 if batch_idx % 4 < 2 else 0.25

        def loss(self, x, y):
            return cross_entropy(self.first(self.encoder(x) * self.share), y)

    same(fitted(Warm), fitted(Warm, strategy("sgd")))


def test_what_comes_before_the_only_call_is_the_steps_own():
    """Mixing samples by numbers that Python draws, before the module is called, is no matter of the stages."""

    class Mixed(Convolutions):
        def loss(self, x, y):
            share, order = random.betavariate(0.4, 0.4), torch.randperm(len(x))
            out = self(share * x + (1 - share) * x[order] * (1 + self.current_epoch))
            return share * cross_entropy(out, y) + (1 - share) * cross_entropy(out, y[order])

    found = []
    for where in (None, strategy("sgd")):
        random.seed(0)
        torch.manual_seed(0)
        found.append(fitted(Mixed, where))
    same(*found)


def test_calls_without_gradients_are_plain():
    class Target(Heads):
        def loss(self, x, y):
            with torch.no_grad():
                target = self.second(self.encoder(x))
            return mse_loss(self.first(self.encoder(x)), target.detach())

    same(fitted(Target), fitted(Target, strategy("sgd")))


def test_autocast():
    plain = fitted(Heads, precision="bf16-mixed")
    same(plain, fitted(Heads, strategy("sgd"), precision="bf16-mixed"))


def test_two_fits_of_one_module():
    plain, ours = Convolutions(), Convolutions()
    for module, where in ((plain, lambda: None), (ours, lambda: strategy("sgd"))):
        for _ in range(2):
            fitted(module, where())
        assert "forward" not in vars(module) and not any("forward" in vars(m) for m in module.modules())
        copy.deepcopy(module)
    same(plain, ours)


@pytest.mark.skipif("gpt2" not in CASES, reason="transformers is not installed")
@pytest.mark.filterwarnings("ignore:.*use_cache=True")
@pytest.mark.parametrize("method", ["sgd", "cerebras"])
def test_a_model_with_its_own_loss(method):
    """It is found by itself, whatever its name, and returns the loss."""

    class Net(pl.LightningModule):
        def __init__(self, name):
            super().__init__()
            self.name, self.seen = name, []
            torch.manual_seed(0)
            setattr(self, name, gpt2())

        def training_step(self, batch, batch_idx):
            out = getattr(self, self.name)(input_ids=batch[0], labels=batch[0])
            self.seen.append(out.loss.detach())
            return out.loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    found = []
    texts = DataLoader(
        TensorDataset(torch.randint(0, 10, (12, 5), generator=torch.Generator().manual_seed(0))), batch_size=3
    )
    for name, where in (("net", strategy(method)), ("model", None if method == "sgd" else strategy(method))):
        module = Net(name)
        trainer(where).fit(module, texts)
        found.append((torch.stack(module.seen), weights(module)))
    assert all(map(torch.equal, *found)) and len(found[0][0]) == 8
