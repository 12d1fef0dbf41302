"""Lightning's callbacks, loops and limits: without delay as without us, with delay as they are meant."""

import copy
import warnings

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from tests.laws.cases import network
from tests.lightning.cases import Regression, loader, strategy, trainer, weights

HOOKS = [
    "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad", "on_before_backward",
    "on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_end", "on_train_end",
    "on_validation_start", "on_validation_end",
]  # fmt: skip


class Count(pl.Callback):
    """Every hook, in order."""

    def __init__(self):
        self.heard = []


def _hook(name):
    return lambda self, *rest: self.heard.append(name)


for name in HOOKS:
    setattr(Count, name, _hook(name))


class Counting(Regression):
    """The hooks of a LightningModule that a strategy could forget."""

    def __init__(self, **options):
        super().__init__(**options)
        self.heard = []

    def optimizer_step(self, *args, **kwargs):
        self.heard.append("optimizer_step")
        return super().optimizer_step(*args, **kwargs)

    def configure_gradient_clipping(self, *args, **kwargs):
        self.heard.append("configure_gradient_clipping")
        return super().configure_gradient_clipping(*args, **kwargs)

    def lr_scheduler_step(self, *args, **kwargs):
        self.heard.append("lr_scheduler_step")
        return super().lr_scheduler_step(*args, **kwargs)

    def optimizer_zero_grad(self, *args, **kwargs):
        self.heard.append("optimizer_zero_grad")
        return super().optimizer_zero_grad(*args, **kwargs)


@pytest.mark.parametrize(("method", "size", "accumulate"), [("pb", None, 1), ("pb", 1, 1), ("gpipe", None, 3)])
def test_hooks_and_steps_are_plain_lightnings(method, size, accumulate):
    """But for on_before_backward, which hears of every slice."""
    found = []
    for where in (None, strategy(method, micro_batch_size=size)):
        module, count = Counting(scheduler=lambda o: {"scheduler": StepLR(o, 5), "interval": "step"}), Count()
        run = trainer(where, callbacks=[count], accumulate_grad_batches=accumulate)
        run.fit(module, loader(), loader(2))
        heard = [name for name in count.heard if size is None or name != "on_before_backward"]
        found.append((heard, module.heard, run.global_step, run.current_epoch))
    assert found[0] == found[1]


LIMITS = [
    {"max_steps": 7, "max_epochs": -1}, {"limit_train_batches": 5}, {"limit_train_batches": 0.5}, {"fast_dev_run": 3},
    {"overfit_batches": 2}, {"min_epochs": 3, "max_epochs": 3}, {"val_check_interval": 0.25}, {"max_epochs": 0},
    {"check_val_every_n_epoch": 2}, {"limit_val_batches": 0}, {"num_sanity_val_steps": 2}, {"detect_anomaly": True},
    {"reload_dataloaders_every_n_epochs": 1},
]  # fmt: skip


@pytest.mark.parametrize("options", LIMITS, ids=str)
def test_limits_are_plain_lightnings(options):
    found = []
    for where in (None, strategy("sgd")):
        module = Regression()
        run = trainer(where, **options)
        run.fit(module, loader(), loader(2))
        found.append((weights(module), run.global_step, len(module.losses), dict(run.callback_metrics)))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]


def test_validate_test_and_predict():
    class Whole(Regression):
        def test_step(self, batch, batch_idx):
            self.validation_step(batch, batch_idx)

        def predict_step(self, batch, batch_idx):
            return self.model(batch[0])

    plain, ours = Whole(), Whole()
    for module, where in ((plain, None), (ours, strategy("pb"))):
        run = trainer(where, max_epochs=1)
        module.seen = [run.validate(module, loader(2), verbose=False), run.test(module, loader(2), verbose=False)]
        module.seen += run.predict(module, loader(2))
    assert all(torch.equal(a, b) if torch.is_tensor(a) else a == b for a, b in zip(plain.seen, ours.seen, strict=True))
    run.fit(ours, loader(), loader(2))
    after = run.validate(ours, loader(2), verbose=False)
    assert after != ours.seen[0]  # it has learnt, and validation sees it


def test_validation_sees_the_newest_weights_and_disturbs_nothing():
    quiet, watched = Regression(), Regression()
    trainer(strategy("pb")).fit(quiet, loader())
    trainer(strategy("pb"), val_check_interval=1).fit(watched, loader(), loader(2))
    assert torch.equal(weights(quiet), weights(watched))


def test_drain_at_validation():
    """What follows a drain is what a pipeline does that was drained there."""
    from torch.nn.functional import mse_loss

    import pipeback
    from tests.laws.cases import OPTIMIZERS

    batches = list(loader())
    pipe = pipeback.Pipeline(network(), loss=mse_loss, optimizer=OPTIMIZERS["momentum"], method="pb")
    for _ in range(2):
        for half in (batches[:6], batches[6:]):
            for x, y in half:
                pipe.push(x, y)
            pipe.drain()
    module = Regression()
    trainer(strategy("pb", drain="validation"), val_check_interval=0.5).fit(module, loader(), loader(2))
    assert torch.equal(weights(module.model), weights(pipe.model))


def test_model_checkpoint_top_k_and_last(tmp_path):
    saving = ModelCheckpoint(tmp_path, monitor="val/loss", save_top_k=2, save_last=True)
    module = Regression()
    run = trainer(strategy("pb"), max_epochs=4, callbacks=[saving], enable_checkpointing=True)
    run.fit(module, loader(), loader(2))
    assert len(saving.best_k_models) == 2 and (tmp_path / "last.ckpt").exists()
    best = torch.load(saving.best_model_path, weights_only=True)
    again = Regression()
    again.load_state_dict(best["state_dict"])
    found = trainer().validate(again, loader(2), verbose=False)[0]["val/loss"]
    assert found == pytest.approx(float(saving.best_model_score))


def test_early_stopping():
    stop = EarlyStopping("val/loss", patience=1, min_delta=1e3)
    run = trainer(strategy("pb"), max_epochs=9, callbacks=[stop])
    run.fit(Regression(), loader(), loader(2))
    assert run.current_epoch == 2 and stop.stopped_epoch == 1


def test_learning_rate_monitor_and_plateau(tmp_path):
    def plateau(opt):
        return {"scheduler": ReduceLROnPlateau(opt, patience=0, threshold=1e9), "monitor": "val/loss"}

    rows = []
    for name, where in (("plain", None), ("ours", strategy("sgd"))):
        logger = CSVLogger(tmp_path / name, name="", version="")
        run = trainer(where, max_epochs=4, logger=logger, callbacks=[LearningRateMonitor()], log_every_n_steps=3)
        run.fit(Regression(scheduler=plateau), loader(), loader(2))
        rows.append((tmp_path / name / "metrics.csv").read_text())
    assert rows[0] == rows[1] and "lr-SGD" in rows[0]


def test_rich_progress_bar(capsys):
    run = trainer(strategy("pb"), callbacks=[RichProgressBar()], enable_progress_bar=True, max_epochs=1)
    run.fit(Regression(), loader(), loader(2))
    assert "Epoch 0/0" in capsys.readouterr().out


def test_timer():
    stopped, running = Timer(duration={"seconds": 0}), Timer(duration={"hours": 1})
    for timer, steps in ((stopped, 0), (running, 24)):
        run = trainer(strategy("pb"), callbacks=[timer])
        run.fit(Regression(), loader())
        assert run.global_step == steps
    assert running.time_elapsed("train") > 0


class Normalised(Regression):
    def __init__(self, norm):
        torch.manual_seed(0)
        block = lambda: nn.Sequential(nn.Linear(6, 6), norm(6), nn.Tanh())  # noqa: E731
        super().__init__(nn.Sequential(block(), block(), nn.Linear(6, 6)))


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm])
def test_weight_averaging_without_delay(norm):
    """Averages and statistics are plain Lightning's.

    With BatchNorm, plain Lightning ends the epoch that only goes forward with one more step, on the gradients that the
    last batch before it has left; here a backward that is skipped makes no step, and the averages stay.
    """
    found = []
    for where in (None, strategy("sgd"), strategy("gpipe")):
        module = Normalised(norm)
        averaging = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2, device=None)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*was still in flight")  # nothing was
            trainer(where, max_epochs=5, callbacks=[averaging]).fit(module, loader(samples=16))
        found.append((module, averaging._average_model))
    (plain, plains_average), (ours, average), (_, flushing) = found
    assert torch.equal(weights(plains_average), weights(average)) and torch.equal(weights(flushing), weights(average))
    for (name, a), b in zip(plain.named_buffers(), ours.buffers(), strict=True):
        assert torch.equal(a, b), name
    for a, b in zip(average.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm])
def test_what_is_in_flight_does_not_move_averaged_weights(norm):
    averaging = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2, device=None)
    module = Normalised(norm)
    with pytest.warns(UserWarning, match="has put other weights into the model"):
        trainer(strategy("pb"), max_epochs=5, callbacks=[averaging]).fit(module, loader(samples=16))
    for average, weight in zip(averaging._average_model.parameters(), module.parameters(), strict=True):
        assert torch.equal(average, weight)


def test_a_backward_that_is_skipped_runs_no_b_and_no_u():
    class Sometimes(Regression):
        def backward(self, loss, *args, **kwargs):
            if self.current_epoch == 0 and len(self.losses) % 3:
                super().backward(loss, *args, **kwargs)

    module = Sometimes()
    where = strategy("pb")
    before = copy.deepcopy(module.model.state_dict())
    trainer(where, max_epochs=2).fit(module, loader())
    kinds = [record.kind for record in where.pipeline.ledger]
    assert kinds.count("F") == 24 * 5 and kinds.count("B") == 8 * 5
    assert not torch.equal(before["0.0.weight"], module.model[0][0].weight)


def test_gradients_are_there_for_the_hooks():
    class Norms(Regression):
        def __init__(self):
            super().__init__()
            self.norms = []

        def on_before_optimizer_step(self, optimizer):
            self.norms.append([float(p.grad.norm()) for p in self.parameters() if p.grad is not None])

    module = Norms()
    trainer(strategy("pb"), max_epochs=1).fit(module, loader())
    assert len(module.norms) == 12
    assert len(module.norms[0]) == 2 and len(module.norms[-1]) == 10  # the pipeline fills from its end


def test_optimizer_hooks_and_a_user_who_looks_into_its_state():
    seen = []

    class Looking(Regression):
        def configure_optimizers(self):
            made = super().configure_optimizers()
            made.register_step_post_hook(lambda opt, *rest: seen.append(len(opt.state)))
            return made

        def on_train_batch_end(self, *rest):
            last = self.trainer.optimizers[0].state[self.model[-1][0].weight]
            assert torch.isfinite(last["momentum_buffer"]).all()

    run = trainer(strategy("pb"), max_epochs=1)
    run.fit(Looking(), loader())
    assert len(seen) == 12


def test_what_is_logged_on_slices_is_the_batchs_mean(tmp_path):
    """Losses, counts and metrics are those of one training_step on the whole batch, where weights do not move."""
    from torchmetrics import MeanSquaredError

    class Logging(Regression):
        def __init__(self):
            super().__init__()
            self.error = MeanSquaredError()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

        def training_step(self, batch, batch_idx):
            x, y = batch["inputs"]["x"], batch["y"]
            output = self.model(x)
            loss = nn.functional.mse_loss(output, y)
            self.error(output, y)
            self.log("loss", loss, on_step=True, on_epoch=True)
            self.log("index", float(batch_idx))
            self.log("error", self.error, on_step=True, on_epoch=True)
            self.log_dict({"a": loss * 2, "b": 3}, on_step=True, on_epoch=False)
            assert len(batch["names"]) == len(x)
            return {"loss": loss, "other": 1}

    class Outputs(pl.Callback):
        def __init__(self):
            self.seen = []

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            assert outputs["other"] == 1
            self.seen.append(float(outputs["loss"]))

    def batches():
        return [
            {"inputs": {"x": x}, "y": y, "names": [str(n) for n in range(5)], "constant": 7}
            for x, y in loader(4, samples=5)
        ]

    found = []
    for name, where in (("plain", None), ("ours", strategy("sgd", micro_batch_size=2))):
        outputs = Outputs()
        logger = CSVLogger(tmp_path / name, name="", version="")
        run = trainer(where, max_epochs=2, logger=logger, log_every_n_steps=1, callbacks=[outputs])
        run.fit(Logging(), torch.utils.data.DataLoader(batches(), batch_size=None))
        rows = (tmp_path / name / "metrics.csv").read_text().splitlines()
        numbers = [float(v) if v else -1.0 for row in rows[1:] for v in row.split(",")]
        found.append((rows[0], numbers, outputs.seen))
    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-6)
    assert found[0][2] == pytest.approx(found[1][2], rel=1e-6)


def test_fit_twice():
    """A second fit begins a new pipeline on the weights that are there, as plain Lightning begins new optimizers."""
    plain, ours = Regression(), Regression()
    for module, where in ((plain, None), (ours, strategy("sgd"))):
        run = trainer(where, max_epochs=1)
        run.fit(module, loader())
        run.fit_loop.epoch_progress.reset()
        run.fit(module, loader())
        assert len(module.losses) == 24
    assert torch.equal(weights(plain), weights(ours))


def test_nothing_of_ours_stays_behind():
    module, where = Regression(), strategy("pb")
    names = set(vars(module.model))
    run = trainer(where, max_epochs=1)
    run.fit(module, loader())
    assert set(vars(module.model)) == names and "log" not in vars(module)
    assert "clip_gradients" not in vars(run.precision_plugin) and "step" not in vars(run.optimizers[0])
    assert all(p.grad is None for p in module.parameters())


class Unfreezes(BaseFinetuning):
    """Trains the first layer from the second epoch on."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.model[0])

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.model[0], optimizer, lr=0.01)


class Chosen(Regression):
    """Its optimizer gets the weights that require a gradient."""

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


def test_layers_are_unfrozen_between_two_fits():
    module = Chosen()
    with pytest.raises(RuntimeError, match="was frozen when the pipeline was built") as raised:
        trainer(strategy(), callbacks=[Unfreezes()]).fit(module, loader())
    assert "go on with fit of another Trainer" in raised.value.__notes__[0]
    module = Chosen()
    module.model[0].requires_grad_(False)
    before = module.model[0][0].weight.clone()
    trainer(strategy(), max_epochs=1).fit(module, loader())
    assert torch.equal(module.model[0][0].weight, before)
    module.model[0].requires_grad_(True)
    trainer(strategy(), max_epochs=1).fit(module, loader())
    assert not torch.equal(module.model[0][0].weight, before)
