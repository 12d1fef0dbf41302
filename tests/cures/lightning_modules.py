"""LightningModules that do what is refused, and what is said to do instead."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from tests.lightning.cases import Regression
from tests.lightning.several_modules import Heads


class Listed(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = batch[0]
        for layer in self.model if isinstance(self.model, nn.ModuleList) else [self.model]:
            h = layer(h)
        return mse_loss(h, batch[1])


class Ordered(nn.Module):
    """Declares its stages in the order in which they run, or not."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.names = nn.Linear(6, 6), nn.Linear(6, 6), names

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x))

    def pipeline_stages(self) -> list[nn.Module]:
        return [getattr(self, name) for name in self.names]


class Relu(nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.relu(x)


class Functions(nn.Module):
    """Has a function among its stages, or a module in its place."""

    def __init__(self, function: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.relu, self.second = nn.Linear(6, 6), Relu(), nn.Linear(6, 6)
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.second(torch.relu(self.first(x)))

    def pipeline_stages(self) -> list[Any]:
        return [self.first, torch.relu if self.function else self.relu, self.second]


class Penalized(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return mse_loss(self.model(batch[0]), batch[1]) + 0.1 * sum(p.abs().sum() for p in self.parameters())


class Stepless(Regression):
    """Leaves out every second batch: by no step, or as it is to be done."""

    def __init__(self, early: bool) -> None:
        super().__init__()
        self.early = early

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.early and batch_idx % 2 else None

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)


class Twice(Regression):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        if self.how == "joined":
            one, two = self.model(torch.cat([x, x])).chunk(2)
            return mse_loss(one, y) + mse_loss(two, y)
        loss = mse_loss(self.model(x), y)
        if self.how == "no_grad":
            with torch.no_grad():
                self.model(x)
            return loss
        return loss + mse_loss(self.model(x), y)


class Idle(Regression):
    def __init__(self, calls: bool) -> None:
        super().__init__()
        self.calls = calls

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return mse_loss(self.model(batch[0]) if self.calls else batch[0].clone().requires_grad_(), batch[1])


class Peeks(Regression):
    """Calls the model outside of training_step, with gradients or without."""

    def __init__(self, gradients: bool) -> None:
        super().__init__()
        self.gradients = gradients

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.set_grad_enabled(self.gradients):
            self.model(batch[0])


class Saves(Regression):
    """Saves a checkpoint in training_step, behind the call of the model, or at the end of the batch."""

    def __init__(self, amid: bool) -> None:
        super().__init__()
        self.amid = amid

    def save(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.trainer.save_checkpoint(f"{folder}/saved.ckpt")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.amid:
            self.save()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.save()


class Setting(Heads):
    """Its forward sets an attribute that training_step reads, or returns it."""

    returns = False

    def forward(self, x: Any) -> Any:
        code = self.encoder(x)
        if self.returns:
            return self.first(code), code
        self.code = code
        return self.first(code)

    def loss(self, x: Any, y: Any) -> Any:
        if self.returns:
            out, self.code = self(x)
        else:
            out = self(x)
        return nn.functional.cross_entropy(out, y) + self.code.pow(2).mean()


class Taking(Heads):
    def training_step(self, dataloader_iter: Any) -> Any:
        batch, *_ = next(dataloader_iter)
        return super().training_step(batch, 0)


class Returning(Setting):
    returns = True


class Counting(Heads):
    """Its forward reads a counter of the Trainer's, or what was noted before each batch."""

    notes = False

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.notes:
            self.seen_steps = self.global_step

    def forward(self, x: Any) -> Any:
        return self.first(self.encoder(x)) * (1 + (self.seen_steps if self.notes else self.global_step))

    def loss(self, x: Any, y: Any) -> Any:
        return nn.functional.cross_entropy(self(x), y)


class Noting(Counting):
    notes = True


class Resting(Heads):
    def loss(self, x: Any, y: Any) -> Any:
        with torch.no_grad():
            return self.first(self.encoder(x)).sum().requires_grad_()


class Working(Heads):
    def loss(self, x: Any, y: Any) -> Any:
        return self.first(self.encoder(x)).pow(2).mean()


def meta() -> Regression:
    with torch.device("meta"):
        return Regression(nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))))


def normal(module: nn.Module) -> None:
    for p in module.parameters():
        nn.init.normal_(p, std=0.1)


class Making(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return mse_loss(self.model(torch.ones(3, 6)), torch.zeros(3, 6))


def numbers() -> Any:
    return DataLoader([{"n": "a"}] * 12, batch_size=3)


class Trained(Regression):
    """With another optimizer, or steps of its own."""

    automatic = True

    def __init__(self, made: Any, automatic: bool = True) -> None:
        super().__init__()
        self.made, self.automatic_optimization = made, automatic

    def configure_optimizers(self) -> Any:
        return self.made(self)


def all_of(module: Any) -> Any:
    return torch.optim.SGD(module.parameters(), lr=0.05)


def some_of(module: Any) -> Any:
    return torch.optim.SGD(module.model[:2].parameters(), lr=0.05)


def some_frozen(module: Any) -> Any:
    module.model[2:].requires_grad_(False)
    return some_of(module)


class Turning(Heads):
    """Its training_step takes another way after some updates, or always calls one module that does."""

    def loss(self, x: Any, y: Any) -> Any:
        head = self.first if self.global_step < 2 else self.second
        return nn.functional.cross_entropy(head(self.encoder(x)), y)


class Switch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 5), nn.Linear(8, 5)

    def forward(self, x: Any) -> Any:
        return torch.where(x.sum(1, keepdim=True) > 0, self.one(x), self.two(x))


class Switching(Heads):
    def build(self) -> None:
        super().build()
        self.switch = Switch()

    def loss(self, x: Any, y: Any) -> Any:
        return nn.functional.cross_entropy(self.switch(self.encoder(x)), y)


class Regrouped(Regression):
    """Does one thing to its optimizer when the second epoch begins."""

    def __init__(self, do: Callable[[Any], object]) -> None:
        super().__init__()
        self.do = do

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.do(self)


def to_another_group(module: Any) -> None:
    (optimizer,) = module.trainer.optimizers
    optimizer.add_param_group({"params": [optimizer.param_groups[0]["params"].pop()], "lr": 0.01})


def taken_out(module: Any) -> None:
    del module.trainer.optimizers[0].param_groups[0]["params"][0]


def frozen(module: Any) -> None:
    next(module.parameters()).requires_grad_(False)


def another_optimizer(module: Any) -> None:
    module.trainer.optimizers = [torch.optim.SGD(module.parameters(), lr=0.01)]


def another_rate(module: Any) -> None:
    for group in module.trainer.optimizers[0].param_groups:
        group["lr"] = 0.01
