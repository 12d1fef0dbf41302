"""Hooks between the forward of a batch and its update: for every slice of a batch, as for the batch as a whole."""

import lightning.pytorch as pl
import pytest
import torch

from tests.lightning.cases import Regression, loader, strategy, trainer, weights


class Halved(Regression):
    def backward(self, loss, *args, **kwargs):
        (loss * 0.5).backward()


class Hooked(Regression):
    def on_before_backward(self, loss):
        loss.register_hook(lambda gradient: gradient * 0.5)
        self.log("loss of slices", loss, on_step=False, on_epoch=True)


class Weighted(Regression):
    """The slices weigh by their own losses, the last one, too."""

    def backward(self, loss, *args, **kwargs):
        (loss * loss.detach()).backward()


class Halves(pl.Callback):
    def on_before_backward(self, trainer, module, loss):
        loss.register_hook(lambda gradient: gradient * 0.5)


def fitted(module, where, *callbacks, samples=4, **options):
    run = trainer(where, max_epochs=1, precision="64-true", callbacks=[*callbacks], **options)
    run.fit(module, loader(48 // samples, samples))
    return weights(module), run.callback_metrics


@pytest.mark.parametrize("store", [None, "host"])
@pytest.mark.parametrize("size", [4, 2, 1])
@pytest.mark.parametrize("made", [Halved, Hooked, Regression])
def test_the_loss_of_every_slice_goes_through_the_hooks_of_backward(made, size, store):
    heard = [Halves()] if made is Regression else []
    plain, logged = fitted(made(), None, *heard)
    found, metrics = fitted(made(), strategy("gpipe", micro_batch_size=size, store=store), *heard)
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)
    for name, value in logged.items():
        torch.testing.assert_close(metrics[name], value, rtol=1e-12, atol=1e-12)


def test_the_hooks_see_the_loss_of_each_slice():
    """As if each slice were a batch, of which an update takes several."""
    found, _ = fitted(Weighted(), strategy("gpipe", micro_batch_size=2))
    each, _ = fitted(Weighted(), strategy("gpipe"), samples=2, accumulate_grad_batches=2)
    torch.testing.assert_close(found, each, rtol=1e-12, atol=1e-12)
