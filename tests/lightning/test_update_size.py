"""Rates under Lightning: scaled to the samples of an update, a word where they are far, and NaN losses."""

import math
import warnings

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import pipeback
from tests.lightning.cases import Regression, loader, strategy, trainer, weights


class Rated(Regression):
    def __init__(self, rate=0.1, momentum=0.9, kind=torch.optim.SGD, decay=True):
        super().__init__()
        self.rate, self.momentum, self.kind, self.decay = rate, momentum, kind, decay

    def configure_optimizers(self):
        more = {"momentum": self.momentum} if self.kind is torch.optim.SGD else {}
        optimizer = self.kind(self.parameters(), lr=self.rate, **more)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}] if self.decay else []


def fitted(module, where, samples=8, **options):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer(where, max_epochs=1, **options).fit(module, loader(6, samples))
    return module, [str(w.message) for w in told if "sample" in str(w.message) or "NaN" in str(w.message)]


@pytest.mark.parametrize(("options", "samples", "accumulate"), [
    ({"method": "cerebras", "micro_batch_size": 2}, 2, 1),
    ({"method": "pb", "micro_batch_size": 3, "workers": 2}, 3, 1),
    ({"method": "gpipe", "micro_batch_size": 2}, 16, 2),
    ({"method": "pb"}, 8, 1),
])  # fmt: skip
def test_stages_step_with_scaled_rates(options, samples, accumulate):
    """A scheduler turns the rate for the reference, and every rate is scaled; momentum is, too."""
    where, more = strategy(reference_batch=32, **options), {"accumulate_grad_batches": accumulate}
    found, told = fitted(Rated(), where, **more)
    by_hand = Rated(*pipeback.scale_hyperparameters(0.1, 0.9, 32, samples))
    wanted, _ = fitted(by_hand, strategy(**options), **more)
    torch.testing.assert_close(weights(found), weights(wanted), rtol=1e-6, atol=1e-7)
    assert not told
    assert found.trainer.optimizers[0].param_groups[0]["momentum"] == 0.9


def test_a_checkpoint_has_the_users_rates(tmp_path):
    options = {"method": "cerebras", "micro_batch_size": 2, "reference_batch": 32}
    whole = Rated()
    trainer(strategy(**options), max_epochs=2).fit(whole, loader(6, 8))
    first, second = Rated(), Rated()
    saving = ModelCheckpoint(tmp_path, filename="one")
    trainer(strategy(**options), max_epochs=1, enable_checkpointing=True, callbacks=[saving]).fit(first, loader(6, 8))
    saved = torch.load(tmp_path / "one.ckpt", weights_only=False)["optimizer_states"][0]["param_groups"][0]
    assert saved["momentum"] == 0.9 and saved["initial_lr"] == 0.1
    trainer(strategy(**options), max_epochs=2).fit(second, loader(6, 8), ckpt_path=tmp_path / "one.ckpt")
    assert torch.equal(torch.stack(whole.losses[24:]), torch.stack(second.losses))


def test_a_word_where_updates_are_far_smaller_than_batches():
    _, told = fitted(Rated(), strategy("pb", micro_batch_size=1))
    assert len(told) == 1 and told[0].startswith("an update is of 1 sample here, and of 8 under a plain Trainer")
    for cure in (8, 1):
        assert f"PipelineStrategy(reference_batch={cure}, ...)" in told[0]
        assert not fitted(Rated(), strategy("pb", micro_batch_size=1, reference_batch=cure))[1]
    _, told = fitted(Rated(kind=torch.optim.AdamW), strategy("pb", micro_batch_size=2))
    assert "an update is of 2 samples here" in told[0] and "Lower it, or update less often" in told[0]
    assert not fitted(Rated(kind=torch.optim.AdamW), strategy("pb", micro_batch_size=2, reference_batch=2))[1]


@pytest.mark.parametrize(
    "options", [{"method": "pb", "micro_batch_size": 4}, {"method": "gpipe", "micro_batch_size": 1}, {}]
)
def test_no_word_elsewhere(options):
    assert not fitted(Rated(), strategy(**options))[1]


def test_refused():
    module = Rated(kind=torch.optim.AdamW)
    before = weights(module)
    with pytest.raises(ValueError, match="reference_batch=32 .*rule for SGD, but the optimizer is AdamW; leave"):
        fitted(module, strategy("pipedream", reference_batch=32))
    assert torch.equal(before, weights(module))
    with pytest.raises(ValueError, match="reference_batch must be a whole number of at least 1"):
        strategy("pb", reference_batch=0)


def test_losses_that_are_nan():
    class Breaks(Rated):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (math.nan if batch_idx in self.bad else 1)

        bad = (2, 3, 4)

    with pytest.raises(FloatingPointError, match="the losses of batch 2, 3 and 4 are NaN"):
        fitted(Breaks(), strategy("pb"))
    _, told = fitted(Breaks(), strategy("pb", debug=pipeback.Debug(stop_at_nan=False)))
    assert len(told) == 1 and told[0].startswith("the loss of batch 2 is NaN: lower the learning rate")
