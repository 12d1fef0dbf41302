"""Hooks between the forward of a batch and its update: for every slice of a batch, as for the batch as a whole."""

import warnings

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch.nn.functional import mse_loss

from tests.lightning import ranks
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


class Clipped(Regression):
    """Clips by hand, and logs the norm of the gradients."""

    def __init__(self):
        super().__init__()
        self.model.append(torch.nn.Linear(6, 6).requires_grad_(False))
        self.model[0].bias = None

    def on_before_optimizer_step(self, optimizer):
        self.log("norm", grad_norm(self, 2)["grad_2.0_norm_total"], on_step=False, on_epoch=True)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        torch.nn.utils.clip_grad_norm_([p for p in self.parameters() if p.grad is not None], 0.05)


class Sees(Regression):
    def on_after_backward(self):
        assert all(p.grad is None for p in self.parameters())


class Table(Clipped):
    """With a gradient that is sparse, and one that is None."""

    def __init__(self):
        super().__init__()
        self.model = Rows()

    def training_step(self, batch, batch_idx):
        return mse_loss(self.model((batch[0][:, :1] > 0).long()), batch[1])

    def on_before_optimizer_step(self, optimizer):
        self.log("norm", self.model.table.weight.grad.to_dense().norm(), on_step=False, on_epoch=True)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        for p in self.parameters():
            if p.grad is not None:
                p.grad = p.grad * 0.5 / p.grad.coalesce().values().norm() if p.grad.is_sparse else p.grad.sign() * 0.01

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Rows(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = torch.nn.EmbeddingBag(2, 6, sparse=True), torch.nn.Linear(6, 6)

    def forward(self, x):
        return self.head(self.table(x))


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


FLUSHES = [("gpipe", {}), ("one_f_one_b", {}), ("zb_h1", {}), ("gpipe", {"workers": 2})]


@pytest.mark.parametrize(("size", "accumulate"), [(2, 1), (1, 3), (None, 3)])
@pytest.mark.parametrize(("method", "options"), FLUSHES)
def test_hooks_before_a_step_see_means(method, options, size, accumulate):
    plain, logged = fitted(Clipped(), None, accumulate_grad_batches=accumulate)
    where = strategy(method, micro_batch_size=size, **options)
    found, metrics = fitted(Clipped(), where, accumulate_grad_batches=accumulate)
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(metrics["norm"], logged["norm"], rtol=1e-12, atol=1e-12)


def test_sparse_gradients_are_means_too():
    plain, logged = fitted(Table(), None)
    found, metrics = fitted(Table(), strategy("gpipe", micro_batch_size=2, stages=["table", "head"]))
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(metrics["norm"], logged["norm"], rtol=1e-12, atol=1e-12)


class Skips(Regression):
    """Leaves out batches whose gradients are not finite, as is the habit."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (float("inf") if batch_idx % 3 == 1 else 1)

    def on_before_optimizer_step(self, optimizer):
        if not all(p.grad.isfinite().all() for p in self.parameters()):
            self.zero_grad()


class Partly(Regression):
    def on_after_backward(self):
        self.model[0][0].weight.grad = None


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"micro_batch_size": 2}])
@pytest.mark.parametrize("made", [Skips, Partly])
def test_gradients_that_hooks_clear_are_none(made, options):
    plain, _ = fitted(made(), None)
    found, _ = fitted(made(), strategy("gpipe", **options))
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"workers": 2}])
def test_gradients_that_hooks_clear_are_none_with_delays(options):
    class Clears(Regression):
        def on_before_optimizer_step(self, optimizer):
            self.model[-1].zero_grad()

    module, before = Clears(), Regression().double()
    fitted(module, strategy("pb", **options))
    assert torch.equal(weights(module.model[-1]), weights(before.model[-1]))
    assert not torch.equal(weights(module.model[0]), weights(before.model[0]))


class Sometimes(Regression):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        if self.global_step % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.005, gradient_clip_algorithm="value")


class ThenScales(Regression):
    def on_before_optimizer_step(self, optimizer):
        self.clip_gradients(optimizer, gradient_clip_val=0.005, gradient_clip_algorithm="value")
        self.log("largest", max(p.grad.abs().max() for p in self.parameters()), on_step=False, on_epoch=True)
        for p in self.parameters():
            p.grad.mul_(3)


@pytest.mark.parametrize(
    ("made", "options"),
    [
        (Sometimes, {"micro_batch_size": 2}), (Sometimes, {"workers": 2}), (Sometimes, {"masters": True}),
        (ThenScales, {"micro_batch_size": 2}), (ThenScales, {"workers": 2}),
    ],
)  # fmt: skip
def test_a_hook_clips_the_gradients_of_its_step(made, options):
    """At once where they are means, so that it sees what it has done; and no others."""
    plain, logged = fitted(made(), None)
    found, metrics = fitted(made(), strategy("gpipe", **options))
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)
    assert metrics.get("largest", 0) == logged.get("largest", 0)


def test_clipping_at_once_has_the_bits_of_clipping_in_the_update():
    class Asks(Regression):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            self.clip_gradients(optimizer, gradient_clip_val=0.05)

    found = fitted(Asks(), strategy("gpipe", micro_batch_size=2))[0]
    assert torch.equal(found, fitted(Regression(), strategy("gpipe", micro_batch_size=2), gradient_clip_val=0.05)[0])


@pytest.mark.parametrize("method", ["pb", "pipedream"])
def test_limits_hold_for_one_step_with_delays_too(method):
    class First(Regression):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            if not self.global_step:
                self.clip_gradients(optimizer, gradient_clip_val=1e-12, gradient_clip_algorithm="value")

    class Always(Regression):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            self.clip_gradients(optimizer, gradient_clip_val=1e-12, gradient_clip_algorithm="value")

    begin = weights(Regression())
    moved = [(fitted(made(), strategy(method))[0] - begin).abs().max() for made in (First, Always)]
    assert moved[0] > 0.1 and moved[1] < 0.01


def slower(optimizer, *_):
    for group in optimizer.param_groups:
        group["lr"] *= 0.8


@pytest.mark.parametrize("options", [{}, {"micro_batch_size": 2}, {"workers": 2}])
def test_a_hook_after_the_step_may_set_the_rate(options):
    class Slower(Regression):
        def configure_optimizers(self):
            self.made = super().configure_optimizers()
            self.made.register_step_post_hook(slower)
            return self.made

    module = Slower()
    plain, _ = fitted(Slower(), None)
    found, _ = fitted(module, strategy("gpipe", **options))
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)
    assert module.made.param_groups[0]["lr"] == pytest.approx(0.8**12 * Slower().configure_optimizers().defaults["lr"])


def test_a_look_changes_no_bits():
    class Looks(pl.Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            assert all(p.grad is not None for p in module.parameters())

    clips = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}
    found = [fitted(Regression(), strategy("gpipe", micro_batch_size=1), *look, **clips)[0] for look in ([], [Looks()])]
    assert torch.equal(*found)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_a_hook_that_sees_no_gradients_is_named():
    class Looks(pl.Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            assert any(p.grad is None for p in module.parameters())

    with pytest.warns(UserWarning, match="with a store, .grad is None .*: Looks.on_before_optimizer_step neither sees"):
        fitted(Regression(), strategy("gpipe", store="host"), Looks())


def test_a_hook_that_sees_no_gradients_over_devices_is_named(crew):
    told, _ = crew.ranks(2).run(warnings_over_devices)
    says = "over several devices, .grad is None for all weights of the stages: Sees.on_after_backward neither"
    assert any(says in text for text in told), told


def warnings_over_devices():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ranks.fit(devices=2, module=Sees, max_epochs=1)
    return [str(each.message) for each in told]
