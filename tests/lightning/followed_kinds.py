"""LightningModules whose step is followed where the stages are elsewhere, and fits of them."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, relu

from tests.laws.as_one import same
from tests.lightning import ranks
from tests.lightning.cases import strategy, trainer
from tests.lightning.several_modules import Autoencoder, Convolutions, Heads, Images, Weighted, batches


class Validated(Images):
    """Validates by the calls that it trains with, and by modules that it calls otherwise there."""

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(*batch))
        self.log("odd", self.encoder(batch[0].flatten(1)).mean())


class ValidatedHeads(Heads, Validated):
    pass


class ValidatedAutoencoder(Autoencoder, Validated):
    pass


class Teacher(Images):
    """Knows a frozen network beside its own, uses buffers itself, and has a forward that depends on the mode."""

    def build(self):
        self.body, self.drop = nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.GroupNorm(1, 12)), nn.Dropout(0.2)
        self.head, self.teacher = nn.Linear(12, 5), nn.Sequential(nn.Flatten(), nn.Linear(36, 5)).requires_grad_(False)
        self.layers = [self.body, (self.drop, {"head": self.head})]
        self.register_buffer("middle", torch.full((), 0.25))
        self.share = 1.0

    def on_train_batch_start(self, batch, batch_idx):
        self.share = 1.0 - 0.1 * (batch_idx % 3)

    def forward(self, x):
        body, (drop, rest) = self.layers
        return rest["head"](drop(relu(body(x - self.middle)))) * self.share * (1.0 if self.training else 2.0)

    def loss(self, x, y):
        with torch.no_grad():
            known = self.teacher(x - self.middle)
        out = self(x)
        return cross_entropy(out, y) + mse_loss(out, known)

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(*batch))


class Owned(nn.Linear):
    """Uses a weight of the LightningModule that it belongs to; cured, it has it, too."""

    def __init__(self, owner, cured):
        super().__init__(8, 5)
        self.owner = [owner]
        self.scale = owner.scale if cured else None

    def forward(self, x):
        return super().forward(x) * (self.owner[0].scale if self.scale is None else self.scale)


def twice(layer, x):
    return 2 * nn.Linear.forward(layer, x)


class FrozenBetween(ValidatedHeads):
    """Runs a frozen module before and between its calls, changes the mode of a part, has a child that knows it, and a
    forward that was set.
    """

    def build(self):
        super().build()
        self.encoder.append(nn.Dropout(0.2))
        self.second = Owned(self, cured=True)
        self.first.forward = partial(twice, self.first)
        self.fixed = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).requires_grad_(False)
        self.known = nn.Sequential(nn.Flatten(), nn.Linear(36, 5)).requires_grad_(False)

    def on_train_batch_start(self, batch, batch_idx):
        self.fixed.eval()
        self.encoder[-1].train(batch_idx % 3 > 0)

    def loss(self, x, y):
        known = self.known(x)
        self.outputs_seen = [*getattr(self, "outputs_seen", []), known]
        h = self.fixed(self.encoder(x))
        return cross_entropy(self.first(h) + known, y) + 0.5 * cross_entropy(self.second(h), 4 - y)


class Owning(FrozenBetween):
    def build(self):
        super().build()
        self.second = Owned(self, cured=False)


class FrozenInside(Teacher):
    """Calls a frozen module of its forward itself, too."""

    def forward(self, x):
        return super().forward(x) + self.teacher(x)


class FrozenCured(FrozenInside):
    def build(self):
        super().build()
        self.own = copy.deepcopy(self.teacher)

    def loss(self, x, y):
        with torch.no_grad():
            known = self.own(x - self.middle)
        out = self(x)
        return cross_entropy(out, y) + mse_loss(out, known)


class FrozenInValidation(FrozenCured):
    """Calls a frozen module of its forward in validation alone."""

    def validation_step(self, batch, batch_idx):
        self.log("val", self.teacher(batch[0]).mean())


class Child(Heads):
    """Calls one module of several with weights, and trains that alone."""

    def build(self):
        super().build()
        self.second.requires_grad_(False)
        self.first.requires_grad_(False)
        self.scale.requires_grad_(False)

    def loss(self, x, y):
        return cross_entropy(self.first(self.encoder(x)) * self.scale, y)

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(*batch))


class Deep(Validated):
    """Blocks that are alike, in a forward of its own."""

    def build(self):
        self.encoder, self.head = nn.Linear(36, 36), nn.Linear(36, 5)
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(36), nn.Linear(36, 36)) for _ in range(8)])

    def forward(self, x):
        x = self.encoder(x.flatten(1))
        for block in self.blocks:
            x = x + relu(block(x))
        return self.head(x)

    def loss(self, x, y):
        return cross_entropy(self(x), y)

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(*batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=2e-3, momentum=0.9)


class Looking(ValidatedHeads):
    """Calls a module without gradients, where other ranks have its weights."""

    def loss(self, x, y):
        with torch.no_grad():
            self.log("seen", self.encoder(x).mean())
        return super().loss(x, y)


class LookingAside(Convolutions):
    def loss(self, x, y):
        with torch.no_grad():
            self.log("seen", self.conv1(x).mean())
        return super().loss(x, y)


class Between(ValidatedHeads):
    """Calls a module between batches."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            self.encoder(batch[0])


class Objects(Convolutions):
    """Holds modules in an object."""

    def build(self):
        super().build()
        self.held = SimpleNamespace(fc1=self.fc1)

    def forward(self, x):
        return self.fc2(self.held.fc1(x.flatten(1)[:, :16]))


class Late(Convolutions):
    """Sets what its forward reads after its call, which only the rank with the loss comes to."""

    share = 1.0

    def forward(self, x):
        return super().forward(x * self.share)

    def loss(self, x, y):
        loss = super().loss(x, y)
        self.share = 1.0 + 0.1 * (len(self.seen) % 3)
        return loss


class Early(Late):
    """Sets it in a hook."""

    def loss(self, x, y):
        return Convolutions.loss(self, x, y)

    def on_train_batch_start(self, batch, batch_idx):
        self.share = 1.0 + 0.1 * (batch_idx % 3)


class BetweenCured(ValidatedHeads):
    def on_validation_epoch_end(self):
        with torch.no_grad():
            self.encoder(torch.zeros(1, 36))


class Cured(ValidatedHeads):
    def loss(self, x, y):
        h = self.encoder(x)
        self.log("seen", h.detach().mean())
        return cross_entropy(self.first(h), y) + cross_entropy(self.second(h) * self.scale, y)


KINDS = [Convolutions, ValidatedHeads, ValidatedAutoencoder, Weighted, Teacher, Child, FrozenBetween]
SLICES = {"micro_batch_size": 2}


def fit(kind, devices, method="pb", given=None, ckpt=None, **options):
    ranks.quiet()
    torch.manual_seed(0)
    module = kind()
    given = {**(given or {}), **({"module": "self"} if kind is Child else {})}
    run = trainer(strategy(method, **given), devices=devices, **{"max_epochs": 2, **options})
    run.fit(module, batches(), batches(2), ckpt_path=ckpt)
    module.losses = module.seen
    return run, module


def result(*args, **options):
    """What there is to see after a fit of a kind."""
    return ranks.outcome(*fit(*args, **options))


def close(found, wanted):
    """Compare what two fits have come to, within rounding in float64."""
    same(*zip(*[(value, wanted["weights"][name]) for name, value in found["weights"].items()], strict=True), 1e-9)
    assert found["metrics"] == pytest.approx(wanted["metrics"], rel=1e-9)


def resumed(kind, devices, folder, stores=(None, None)):
    """Save in the middle of an epoch, and go on from there in another fit."""
    saving = ModelCheckpoint(dirpath=folder, filename="flying", every_n_train_steps=4)
    first, second = ({"store": store} for store in stores)
    fit(kind, devices, "cerebras", first, callbacks=[saving], enable_checkpointing=True, max_epochs=1)
    return result(kind, devices, "cerebras", second, ckpt=f"{folder}/flying.ckpt")
