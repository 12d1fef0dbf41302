"""What training_step calls is what is trained: plain Lightning without delay, and one module with any method."""

import copy
import random

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn.functional import cross_entropy, linear, max_pool2d, mse_loss, relu, relu_
from torch.utils.data import DataLoader, TensorDataset

from pipeback.lightning.find_stages import find
from tests.helpers.choice import mostly_rare
from tests.lightning.cases import strategy, trainer, weights
from tests.lightning.models import CASES, gpt2


class Images(pl.LightningModule):
    """Says nothing of stages."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.seen = []
        self.build()

    def training_step(self, batch, batch_idx):
        loss = self.loss(*batch)
        self.seen.append(loss.detach())
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Convolutions(Images):
    """Layers of its own, a forward, and a metric."""

    def build(self):
        self.conv1, self.bn1, self.conv2 = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3)
        self.fc1, self.fc2 = nn.Linear(16, 12), nn.Linear(12, 5)
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=5)

    def forward(self, x):
        x = max_pool2d(relu(self.bn1(self.conv1(x))), 1)
        x = relu(self.conv2(x)).mean(dim=(2, 3)).repeat(1, 4)
        return self.fc2(relu(self.fc1(x)))

    def loss(self, x, y):
        out = self(x)
        self.log("accuracy", self.accuracy(out, y), on_epoch=True)
        return cross_entropy(out, y)

    def validation_step(self, batch, batch_idx):
        self.log("val", cross_entropy(self(batch[0]), batch[1]))


class Heads(Images):
    """An encoder with two heads, a weight of its own, and a metric between them."""

    def build(self):
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.Tanh(), nn.Linear(12, 8))
        self.first, self.second, self.scale = nn.Linear(8, 5), nn.Linear(8, 5), nn.Parameter(torch.ones(()))
        self.metrics = torchmetrics.MetricCollection({"top": torchmetrics.Accuracy("multiclass", num_classes=5)})

    def outputs(self, x):
        h = relu_(self.encoder(x).clone())
        return self.first(h), self.second(h) * self.scale

    def loss(self, x, y):
        h = relu_(self.encoder(x))
        a = self.first(h)
        loss = cross_entropy(a, y)
        self.log_dict(self.metrics(a, y), on_epoch=True)
        return loss + 0.5 * cross_entropy(self.second(h) * self.scale, 4 - y)


class Autoencoder(Images):
    """A variational one: it draws between encoder and decoder, and its loss has what it drew."""

    def build(self):
        self.encoder, self.mean, self.spread = nn.Linear(36, 12), nn.Linear(12, 3), nn.Linear(12, 3)
        self.decoder = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 36))

    def loss(self, x, y):
        h = relu(self.encoder(x.flatten(1)))
        mean, spread = self.mean(h), self.spread(h)
        eps = torch.randn_like(mean)
        z = mean + eps * torch.exp(0.5 * spread)
        out = self.decoder(z)
        return mse_loss(out, x.flatten(1)) + 0.1 * (mean.pow(2) + z.sin() - spread).mean() + 0 * eps.sum()


class Weighted(Images):
    """Computes with weights of modules that it does not call, and pulls all of them to 0."""

    def build(self):
        self.table, self.body = nn.Linear(36, 6), nn.Linear(6, 6)

    def loss(self, x, y):
        h = self.body(linear(x.flatten(1), self.table.weight))
        pull = sum(p.pow(2).sum() for p in self.parameters())
        return mse_loss(linear(h, self.table.weight.T), x.flatten(1)) + 1e-3 * pull


KINDS = [Convolutions, Heads, Autoencoder, Weighted]


def batches(count=9, size=4):
    generator = torch.Generator().manual_seed(1)
    n = count * size - 1  # the last one is short
    x, y = torch.randn(n, 1, 6, 6, generator=generator), torch.randint(0, 5, (n,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=size)


def fitted(kind, where=None, validate=False, ckpt=None, **options):
    module = kind() if isinstance(kind, type) else kind
    made = trainer(where, **{"max_epochs": 2, **options})
    made.fit(module, batches(), batches(2) if validate else None, ckpt_path=ckpt)
    module.logged = {key: value.item() for key, value in made.callback_metrics.items()}
    return module


def same(a, b):
    assert torch.equal(torch.stack(a.seen), torch.stack(b.seen))
    assert torch.equal(weights(a), weights(b))
    assert a.logged == b.logged


@pytest.mark.parametrize(
    "options", [{}, {"accumulate_grad_batches": 2, "limit_train_batches": 8}, {"precision": "64-true"}]
)
@pytest.mark.parametrize("kind", [Convolutions, Heads, Weighted])
def test_no_delay_is_plain_lightning(kind, options):
    plain = fitted(kind, validate=kind is Convolutions, **options)
    method = "gpipe" if "accumulate_grad_batches" in options else "sgd"
    same(plain, fitted(kind, strategy(method), validate=kind is Convolutions, **options))


class Whole(nn.Module):
    """What the step of an `Images` computes with weights, as one module."""

    def __init__(self, kind):
        super().__init__()
        self.held, self.kind = nn.ModuleList([]), kind
        for name, child in kind().named_children():
            setattr(self, name, child)
        for name, p in kind().named_parameters(recurse=False):
            setattr(self, name, nn.Parameter(p.detach().clone()))

    def forward(self, x):
        if self.kind is not Autoencoder:
            return self.kind.forward(self, x) if self.kind is Convolutions else self.kind.outputs(self, x)
        h = relu(self.encoder(x.flatten(1)))
        mean, spread = self.mean(h), self.spread(h)
        eps = torch.randn_like(mean)
        return mean, spread, eps, self.decoder(mean + eps * torch.exp(0.5 * spread))


class Nominated(Images):
    """The same as one of the others, with all weights in one module."""

    def __init__(self, kind):
        super().__init__()
        self.model, self.kind = Whole(kind), kind

    def build(self):
        """Wait for the kind."""

    def loss(self, x, y):
        out = self.model(x)
        if self.kind is Convolutions:
            return cross_entropy(out, y)
        if self.kind is Heads:
            return cross_entropy(out[0], y) + 0.5 * cross_entropy(out[1], 4 - y)
        mean, spread, eps, out = out
        z = mean + eps * torch.exp(0.5 * spread)
        return mse_loss(out, x.flatten(1)) + 0.1 * (mean.pow(2) + z.sin() - spread).mean() + 0 * eps.sum()


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


def refused(loss, message, where=None, **members):
    module = type("Odd", (Heads,), {"loss": loss, **members})()
    before = weights(module)
    with pytest.raises(ValueError, match=message):
        fitted(module, where or strategy("sgd"))
    return torch.equal(before, weights(module))


def test_what_cannot_be_followed():
    def none(self, x, y):
        with torch.no_grad():
            return self.first(self.encoder(x)).sum().requires_grad_()

    def counts(self, x):
        return self.first(self.encoder(x)) * (1 + self.global_step)

    assert refused(none, "training_step of Odd uses no trained weight.*not in torch.no_grad")
    message = "self.global_step is read in a forward of Odd.*self.seen = self.global_step in on_train_batch_start"
    assert refused(lambda self, x, y: cross_entropy(self(x), y), message, forward=counts)

    def cured(self, x):
        return self.first(self.encoder(x)) * (1 + self.seen_steps)

    def seen(self, batch, batch_idx):
        self.seen_steps = self.global_step

    members = {"loss": lambda self, x, y: cross_entropy(self(x), y), "forward": cured, "on_train_batch_start": seen}
    cure = type("Cured", (Heads,), members)
    same(fitted(cure, max_epochs=1), fitted(cure, strategy("sgd"), max_epochs=1))


def test_a_forward_that_sets_attributes():
    def sets(self, x):
        self.code = self.encoder(x)
        return self.first(self.code)

    def loss(self, x, y):
        return cross_entropy(self(x), y) + self.code.pow(2).mean()

    def returns(self, x):
        code = self.encoder(x)
        return self.first(code), code

    def cured(self, x, y):
        out, self.code = self(x)
        return cross_entropy(out, y) + self.code.pow(2).mean()

    message = "Odd.forward sets self.code, .*write in training_step: out, self.code = self\\(x\\)"
    assert refused(loss, message, forward=sets)
    kind = type("Cured", (Heads,), {"loss": cured, "forward": returns})
    same(fitted(kind), fitted(kind, strategy("sgd")))


def test_a_step_that_goes_another_way():
    def other(self, x, y):
        head = self.first if self.global_step < 2 else self.second
        return cross_entropy(head(self.encoder(x)), y)

    def more(self, x, y):
        loss = cross_entropy(self.first(self.encoder(x)), y)
        return loss if self.global_step < 2 else loss + self.second(self.encoder(x)).sum()

    def scaled(self, x, y):
        return cross_entropy(self.first(self.encoder(x) * (1 + self.current_epoch)), y)

    refused(
        other,
        "goes on with linear of self.second.weight, where in its first run came self.first; .*forward of one module",
    )
    refused(more, "goes on with self.encoder, where in its first run it used no more weights")
    refused(scaled, "gives self.first something else than when it was traced.*attribute of the LightningModule")


@pytest.mark.parametrize(("options", "found"), [({"store": "host"}, "store='host'"), ({"devices": 2}, "2 devices")])
def test_one_module_where_one_is_needed(options, found):
    where = {key: options[key] for key in options if key == "store"}
    devices = {key: options[key] for key in options if key == "devices"}
    module = Heads()
    with pytest.raises(ValueError, match=f"with {found}.*in self.encoder, self.first, self.second.*as self.model"):
        trainer(strategy("pb", **where), **devices).fit(module, batches())
    cure = fitted(Nominated(Heads), strategy("pb", **where), **devices)
    assert cure.seen or devices


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


def test_numbers_of_python_between_calls_are_refused():
    def loss(self, x, y):
        return cross_entropy(self.first(self.encoder(x) * random.random()), y)

    assert refused(loss, "computes by random numbers of Python or numpy")


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
