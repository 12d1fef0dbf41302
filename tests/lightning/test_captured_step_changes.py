"""Law: graphs stand for a training_step as long as what it reads and calls is as it was."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.helpers.choice import rare
from tests.lightning.plain_steps import SAMPLES, Plain, alike, data, seen


@pytest.fixture(autouse=True)
def nothing_seen():
    seen.clear()


class Twice(Plain):
    """What is read changes: once between batches, in place, to another module, and by another hook at every epoch."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 4:
            self.change(self)

    def training_step(self, batch, batch_idx):
        x, y = batch
        output = self.model(x)
        loss = self.criterion(output * self.each, y) * self.hparams.share
        self.log("train/loss", loss)
        return loss


class Kept(Twice):
    """Reads items, what tensors have, and functions that hold numbers."""

    def __init__(self, change):
        super().__init__(change)
        self.each = torch.stack([self.each, self.each + 1])
        self.shares, self.names = [0.5, 0.25], {"loss": ("train", {"deep": 2.0})}
        self.smooth = partial(F.smooth_l1_loss, beta=0.1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        output = self.model(x) * self.each[0] * self.each.T[:, 1]
        loss = self.smooth(output, y) * self.hparams["share"] * self.names["loss"][1]["deep"]
        loss = loss + sum(share * output.abs().mean() for share in self.shares) * self.hparams.get("more", 1)
        self.log(f"{self.names['loss'][0]}/loss", loss)
        return loss


class Branching(Twice):
    """Which code it is depends on a flag, and a global has the name of a variable of a comprehension."""

    late, early_share, late_share, column = False, 0.5, 0.3, True

    def training_step(self, batch, batch_idx):
        x, y = batch
        output = self.model(x)
        loss = F.mse_loss(output, y) + sum([SHARE * output.square().mean() for SHARE in (0.01, 0.02)])
        loss = loss * SHARE + output[:, self.column].sum() * torch.tensor([0.1, self.hparams.share])[0]
        if self.late:
            return loss + self.late_share * output.abs().mean()
        return loss + self.early_share * output.abs().mean()


SHARE = 1.0


def late(module):
    module.late = True
    module.late_share = 0.5 if module.trainer.fit_loop.batch_idx > 7 else 0.3


def rebind(module):
    globals()["SHARE"] = 2.0


def other_type(module):
    module.column = 1


@pytest.mark.parametrize("change", [late, rebind, other_type])
def test_what_code_it_is_may_change_between_batches(monkeypatch, change):
    class Often(Branching):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx >= 4:
                self.change(self)

    monkeypatch.setitem(globals(), "SHARE", 1.0)
    alike(monkeypatch, lambda: (globals().update(SHARE=1.0), Often(change))[1], loader=data(12))


def halve(module):
    module.hparams.share = 0.25


def write(module):
    module.each[0] = 5.0


def replace(module):
    module.each = module.each * 2


def other(module):
    module.criterion = nn.L1Loss()


def summed(module):
    module.criterion.reduction = "sum"


def noted(module):
    module.criterion = Noting()


def listened(module):
    module.criterion.register_forward_hook(lambda *_: seen.append(1))


class Noting(nn.MSELoss):
    def forward(self, output, y):
        seen.append(1)
        return super().forward(output, y)


@pytest.mark.parametrize("change", [halve, write, replace, other, summed])
def test_what_is_read_may_change_between_batches(monkeypatch, change):
    alike(monkeypatch, lambda: Twice(change), loader=data(9))


def widen(module):
    module.smooth = partial(F.smooth_l1_loss, beta=0.2)


def widen_in_place(module):
    module.smooth.keywords["beta"] = 0.2


def share(module):
    module.shares[1] = 0.75


def share_more(module):
    module.shares.append(0.75)


def deepen(module):
    module.names["loss"][1]["deep"] = 3.0


def more(module):
    module.hparams["more"] = 2


@pytest.mark.parametrize(
    "change", [halve, rare(write), replace, widen, rare(widen_in_place), share, rare(share_more), deepen, more]
)
def test_what_is_kept_may_change_between_batches(monkeypatch, change):
    alike(monkeypatch, lambda: Kept(change), loader=data(9))


@pytest.mark.parametrize(("change", "told"), [(noted, "calls `seen.append`"), (listened, "hooks")])
def test_what_is_called_may_change_between_batches(monkeypatch, change, told):
    for run in alike(monkeypatch, lambda: Twice(change), told=told, loader=data(9)):
        assert run is not None
    assert len(seen) == 2 * 5 * SAMPLES


class Numbered(Plain):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self.model(x), y) / (batch_idx + 1)


def test_what_differs_at_every_batch_is_not_captured(monkeypatch):
    def of_time(module):
        module.hparams.share = float(module.trainer.global_step)

    alike(monkeypatch, Numbered, told="reads what differs from batch to batch")
    module = lambda: Twice(of_time)  # noqa: E731
    monkeypatch.setattr(Twice, "on_train_batch_start", lambda self, batch, batch_idx: self.change(self))
    alike(monkeypatch, module, told="reads what differs from batch to batch")
