"""What `training_step` logs on the slices of a batch is logged as it would be on the whole batch."""

import pytest
import torch
from torch.nn.functional import mse_loss

from tests.lightning.cases import Regression, loader, strategy, trainer


class Logging(Regression):
    def training_step(self, batch, batch_idx):
        x, y = batch
        found = self.model(x)
        errors = (found - y).abs()
        for name in ("sum", "MAX", "min"):
            reduced = getattr(errors, name.lower())()
            self.log(f"text {name}", reduced, on_epoch=True, reduce_fx=name)
            self.log(f"function {name}", reduced, on_epoch=True, reduce_fx=getattr(torch, name.lower()))
        self.log("avg", errors.mean(), on_epoch=True, reduce_fx="avg")
        self.log("a number", len(x), on_epoch=True, reduce_fx="sum")
        self.log("whole numbers", (errors > 1).sum(), on_epoch=True, reduce_fx=sum)
        self.log("positional", len(x), False, False, True, True, "sum")
        return mse_loss(found, y)


class Captured(Regression):
    """Plain code, for which a graph stands."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        found = self.model(x)
        self.log("largest", (found - y).abs().max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.log("positional", len(x), False, False, False, True, "sum")
        return mse_loss(found, y)


def logged(module, where, samples):
    run = trainer(where, max_epochs=1, precision="64-true")
    run.fit(module, loader(48 // samples, samples))
    return run.callback_metrics


@pytest.mark.parametrize(
    ("made", "samples", "options"),
    [
        (Logging, 4, {"micro_batch_size": 2}),
        (Logging, 4, {"micro_batch_size": 1, "store": "host"}),
        (Captured, 8, {"micro_batch_size": 1, "vectorize": True}),
    ],
)
def test_values_are_joined_as_reduce_fx_says(made, samples, options):
    where = strategy("gpipe", **options)
    found, plain = logged(made(), where, samples), logged(made(), None, samples)
    if made is Captured:
        assert where.vectorized["training_step"] == "a graph stands for it"
    assert {*found} == {*plain}
    for name, value in plain.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, check_dtype=False)
