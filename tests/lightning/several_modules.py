"""LightningModules that know nothing of stages and hold their weights in several modules."""

import lightning.pytorch as pl
import torch
import torchmetrics
from torch import nn
from torch.nn.functional import cross_entropy, linear, max_pool2d, mse_loss, relu, relu_
from torch.utils.data import DataLoader, TensorDataset

from tests.lightning.cases import trainer, weights


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
