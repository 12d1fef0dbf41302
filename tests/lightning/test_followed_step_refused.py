"""What a training_step that is followed must not do, and the cures."""

import random

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.lightning.cases import strategy, weights
from tests.lightning.several_modules import Heads, fitted, same


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


def test_numbers_of_python_between_calls_are_refused():
    def loss(self, x, y):
        return cross_entropy(self.first(self.encoder(x) * random.random()), y)

    assert refused(loss, "computes by random numbers of Python or numpy")
