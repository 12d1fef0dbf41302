"""Options of the optimizer that are set between the forward of a batch and its step count for its updates."""

import pytest
import torch

from tests.lightning.cases import Regression, loader, strategy, trainer, weights


class Set(Regression):
    """Sets another rate for every step, from 0.01 to 0.04."""

    def set(self, *_):
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = 0.01 * (1 + self.global_step % 4)


class InTrainingStep(Set):
    def training_step(self, batch, batch_idx):
        self.set()
        return super().training_step(batch, batch_idx)


class AfterBackward(Set):
    def on_after_backward(self):
        self.set()


class WhileClipping(Set):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.set()


class InClosure(Set):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        def closure():
            found = optimizer_closure()
            self.set()
            return found

        optimizer.step(closure=closure)


class BeforeStep(Set):
    def configure_optimizers(self):
        made = super().configure_optimizers()
        made.register_step_pre_hook(self.set)
        return made


class BeforeBatch(Set):
    def on_train_batch_start(self, batch, batch_idx):
        self.set()


def fitted(made, where, **options):
    module = made()
    trainer(where, max_epochs=1, precision="64-true", **options).fit(module, loader())
    return weights(module)


PLACES = InTrainingStep, AfterBackward, WhileClipping, InClosure, BeforeStep


@pytest.mark.parametrize("made", PLACES)
@pytest.mark.parametrize("options", [{"micro_batch_size": 1}, {"workers": 2}])
def test_they_count_as_in_a_plain_fit(made, options):
    plain = fitted(made, None, accumulate_grad_batches=2)
    found = fitted(made, strategy("gpipe", **options), accumulate_grad_batches=2)
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("made", PLACES)
@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"method": "pipedream"}])
def test_with_delays_each_micro_batch_has_those_of_its_batch(made, options):
    """So they are those that had been set before the batch."""
    found, before = (fitted(each, strategy(**options)) for each in (made, BeforeBatch))
    assert torch.equal(found, before)
