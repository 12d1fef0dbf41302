"""A `training_step` that is suspended where it calls the model, while a batch goes through the stages twice."""

import lightning.pytorch as pl
import pytest
import torch
from torch.nn.functional import mse_loss

from tests.lightning.cases import Regression, loader
from tests.lightning.streamed import fitted, same

pytestmark = pytest.mark.usefixtures("small")


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda m, x, y: x.sum().requires_grad_(), "did not call self.model"),
        (lambda m, x, y: m.model(x).sum() + m.model(x).sum(), "called self.model twice"),
        (lambda m, x, y: [m.model(x), None][1], "returned no loss"),
        (lambda m, x, y: m.model(x, x).sum(), "2 positional"),
        (lambda m, x, y: m.model(x.clone().requires_grad_()).sum(), "requires a gradient"),
    ],
)
def test_a_training_step_that_is_not_one(step, message):
    class Odd(Regression):
        def training_step(self, batch, batch_idx):
            return step(self, *batch)

    with pytest.raises((ValueError, TypeError), match=message):
        fitted("host", size=1, module=Odd)


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_error_in_training_step(when):
    """It comes to the caller with its traceback; the other slices clean up."""
    cleaned = []

    class Failing(Regression):
        def training_step(self, batch, batch_idx):
            x, y = batch
            try:
                if when == "before" and len(self.losses) == 0 and float(x[0, 0]) == second:
                    raise KeyError("mine")
                output = self.model(x)
                if float(x[0, 0]) == second:
                    raise KeyError("mine")
                return mse_loss(output, y)
            finally:
                cleaned.append(1)

    second = float(next(iter(loader()))[0][1, 0])
    with pytest.raises(KeyError, match="mine") as caught:
        fitted("host", size=1, module=Failing)
    assert "training_step" in [entry.name for entry in caught.traceback]
    assert len(cleaned) == (2 if when == "before" else 3)


def test_a_call_without_gradients_within_training_step():
    class Looking(Regression):
        def training_step(self, batch, batch_idx):
            with torch.no_grad():
                before = mse_loss(self.model(batch[0]), batch[1])
            loss = super().training_step(batch, batch_idx)
            assert torch.equal(before, loss)
            return loss

    for method, size in (("gpipe", 1), ("gpipe", None), ("sgd", None)):
        same(fitted("host", method, size, Looking)[1], fitted(None, method, size, Looking)[1])


def test_gradients_outside_of_training_step():
    class Odd(pl.Callback):
        def on_train_batch_end(self, trainer, module, *rest):
            module.model(torch.ones(1, 6))

    with pytest.raises(RuntimeError, match="outside of training_step; its stages live in a store"):
        fitted("host", callbacks=[Odd()])


def test_a_backward_that_is_skipped():
    """As without a store: the last slice falls, those before it count."""

    class Sometimes(Regression):
        def backward(self, loss, *args, **kwargs):
            if len(self.losses) % 2:
                super().backward(loss, *args, **kwargs)

    for size in (1, None):
        same(fitted("host", size=size, module=Sometimes)[1], fitted(None, size=size, module=Sometimes)[1])
