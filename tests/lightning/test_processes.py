"""Law: Trainer(devices=N) is Trainer(devices=1), bit for bit, and rank 0 has the loss."""

import os
import random
import time
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

from tests.fuzz.fits.module import Asks
from tests.laws.cases import network
from tests.lightning import ranks
from tests.lightning.cases import Regression, loader

pytestmark = pytest.mark.filterwarnings("ignore")


MOMENTUM = dict(module=partial(Regression, scheduler=ranks.cycle))
CASES = {
    "pb": (2, dict(method="pb", **MOMENTUM)),
    "pb, everything random": (2, dict(method="pb", module=ranks.Whole, data=partial(ranks.shuffled, samples=8))),
    "pb, dropout set": (2, dict(method="pb", module=ranks.Whole, callbacks=[ranks.Dropout()])),
    "pb, hooks on weights": (2, dict(method="pb", module=ranks.hooked)),
    "pipedream, clipped": (2, dict(method="pipedream", gradient_clip_val=0.1, **MOMENTUM)),
    "cerebras, slices": (
        3, dict(method="cerebras", given={"micro_batch_size": 2}, data=partial(loader, samples=5),
                gradient_clip_val=0.1, gradient_clip_algorithm="value", **MOMENTUM),
    ),
    "gpipe, accumulated slices": (
        2, dict(method="gpipe", given={"micro_batch_size": 2}, data=partial(loader, samples=5),
                accumulate_grad_batches=5),
    ),
    "interleaved slices": (
        2, dict(method="interleaved", given={"micro_batch_size": 2}, data=partial(loader, samples=5),
                accumulate_grad_batches=5),
    ),
    "pipedream_2bw, accumulated": (2, dict(method="pipedream_2bw", accumulate_grad_batches=6)),
    "pipemare": (2, dict(method=("pipemare", {"anneal": 10}), val=partial(loader, 2), val_check_interval=0.25)),
    "drained at validation": (
        2, dict(method="cerebras", given={"drain": "validation"}, val=partial(loader, 2), val_check_interval=0.5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_devices_are_one_device(case, crew):
    count, options = CASES[case]
    wanted = ranks.result(devices=1, **options)
    for rank, found in enumerate(crew.ranks(count).run(ranks.result, devices=count, **options)):
        assert ranks.differences(found, wanted) == [], rank
        assert (found["losses"] is not None) == (rank == 0)


def test_what_hooks_freeze_is_frozen(crew):
    options = dict(method="pb", callbacks=[ranks.Freezes()], **MOMENTUM)
    wanted = ranks.result(devices=1, **options)
    for found in crew.ranks(2).run(ranks.result, devices=2, **options):
        assert ranks.differences(found, wanted) == []


WHOLE = dict(module=ranks.Whole, data=partial(ranks.shuffled, samples=8), val=partial(loader, 3, samples=4))
LIMITS = [
    {"max_steps": 7, "max_epochs": -1}, {"limit_train_batches": 5}, {"fast_dev_run": 3}, {"overfit_batches": 2},
    {"val_check_interval": 0.25}, {"max_epochs": 0}, {"num_sanity_val_steps": 2}, {"detect_anomaly": True},
    {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3},
]  # fmt: skip


def limited():
    return [ranks.result("pb", 2, **options, **WHOLE) for options in LIMITS]


def test_limits(crew):
    wanted = [ranks.result("pb", 1, **options, **WHOLE) for options in LIMITS]
    for results in crew.ranks(2).run(limited):
        for options, found, one in zip(LIMITS, results, wanted, strict=True):
            assert ranks.differences(found, one) == [], options


class Created(nn.Module):
    """Makes a tensor of the default type, which precision= sets."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.inner(x) + torch.full((6,), 1 / 3))


class Declared(nn.Module):
    """Stages in another order than they are declared in, in a body inside the model."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.last, self.first, self.middle = nn.Linear(6, 6), Created(), Created()

    def forward(self, x):
        return self.last(self.middle(self.first(x)))

    def pipeline_stages(self):
        return [self.first, self.middle, self.last]


class Configured(Regression):
    """Has no model until configure_model."""

    def __init__(self):
        super().__init__(nn.Identity())

    def configure_model(self):
        if isinstance(self.model, nn.Identity):
            self.model = Declared()


def modules(devices):
    kinds = [("32-true", Configured), ("bf16-true", lambda: Regression(Declared())),
             ("64-true", lambda: Regression(Declared())), ("bf16-mixed", lambda: Regression(Declared()))]  # fmt: skip
    return [
        ranks.result("pb", devices, precision=precision, module=kind, val=partial(loader, 2))
        for precision, kind in kinds
    ]


def test_precision_and_declared_stages(crew):
    for results in crew.ranks(2).run(modules, 2):
        for found, wanted in zip(results, modules(1), strict=True):
            assert ranks.differences(found, wanted) == []


class Slow(Created):
    """Still has work to do when a callback comes."""

    def forward(self, x):
        time.sleep(0.01)
        return super().forward(x)


def slow():
    return Regression(nn.Sequential(Slow(), Slow(), Created(), Slow()))


def asked(devices):
    return ranks.result("pb", devices, precision="bf16-true", module=slow, callbacks=[Asks()])


@pytest.mark.timeout(60)
def test_a_callback_may_wait_for_stages_that_need_the_default_dtype(crew):
    wanted = asked(1)
    for found in crew.ranks(2).run(asked, 2):
        assert ranks.differences(found, wanted) == []


# -- what is measured, and what is decided by it -----------------------------------------------------------------------


def everything(folder, devices):
    """What loggers and callbacks of a rank hold; files are rank 0's."""
    logger = CSVLogger(folder, name="", version="")
    best = ModelCheckpoint(folder, monitor="val/error", save_top_k=2, filename="{epoch}-{val/error:.4f}",
                           auto_insert_metric_name=False)  # fmt: skip
    stop = EarlyStopping("train/loss_epoch", patience=1, min_delta=1e3)
    step = ModelCheckpoint(folder, monitor="train/loss_step", every_n_train_steps=5, filename="step-{step}")
    rates = LearningRateMonitor()
    bar = TQDMProgressBar()
    run, module = ranks.fit(
        "pb", devices, callbacks=[stop, best, step, rates, bar], logger=logger, log_every_n_steps=1, max_epochs=5,
        enable_checkpointing=True, enable_progress_bar=True, num_sanity_val_steps=1, **WHOLE,
    )  # fmt: skip
    names = [Path(path).name for path in (*best.best_k_models, best.best_model_path, step.best_model_path)]
    scores = [float(best.best_model_score), float(step.best_model_score), float(stop.best_score), stop.stopped_epoch]
    return {**ranks.outcome(run, module), "names": names, "scores": scores, "quiet": bar.is_disabled}


def test_metrics_and_decisions_are_one_devices_on_every_rank(tmp_path, crew):
    wanted = everything(tmp_path / "one", 1)
    assert wanted["step"] == (24, 2) and wanted["scores"][-1] == 1
    for rank, found in enumerate(crew.ranks(2).run(everything, tmp_path / "two", 2)):
        assert ranks.differences(found, wanted) == []
        assert (found["names"], found["scores"]) == (wanted["names"], wanted["scores"])
        assert found["quiet"] == (rank > 0)
    files = [sorted(p.relative_to(tmp_path / n) for p in (tmp_path / n).rglob("*")) for n in ("one", "two")]
    assert files[0] == files[1]
    assert (tmp_path / "one" / "metrics.csv").read_text() == (tmp_path / "two" / "metrics.csv").read_text()


@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_plateau_on_the_training_loss(interval, crew):
    scheduler = partial(ranks.plateau, interval=interval)
    options = dict(module=partial(Regression, scheduler=scheduler), max_epochs=3)
    wanted = ranks.result(devices=1, **options)
    for found in crew.ranks(2).run(ranks.result, devices=2, **options):
        assert ranks.differences(found, wanted) == []


class StopOnZero(pl.Callback):
    """Only rank 0 knows the loss."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.is_global_zero and batch_idx == 4:
            trainer.should_stop = True


def test_a_stop_on_rank_0_is_heard_at_the_next_meeting(crew):
    found = crew.ranks(2).run(ranks.result, devices=2, callbacks=[StopOnZero()], max_epochs=4)
    assert [f["step"] for f in found] == [(12, 1), (12, 1)]
    options = dict(callbacks=[StopOnZero()], max_epochs=4, val=partial(loader, 2), val_check_interval=0.5)
    assert [f["step"] for f in crew.run(ranks.result, devices=2, **options)] == [(6, 1), (6, 1)]


def evaluated(devices):
    """Before fit, after it, and from a checkpoint; over several devices every rank does it by itself."""
    run, module = ranks.fit("pb", devices, **WHOLE)
    data = partial(loader, 3, samples=4)
    found = [run.validate(module, data(), verbose=False), run.test(module, data(), verbose=False)]
    return found, run.predict(module, data()), ranks.outcome(run, module)["weights"]


def test_evaluation_after_fit(crew):
    wanted = evaluated(1)
    for metrics, outputs, _ in crew.ranks(2).run(evaluated, 2):
        assert metrics == wanted[0]
        assert all(torch.equal(a, b) for a, b in zip(outputs, wanted[1], strict=True))


# -- data --------------------------------------------------------------------------------------------------------------


class Drawn(torch.utils.data.Dataset):
    """Augments with whatever generator is there."""

    def __len__(self):
        return 36

    def __getitem__(self, n):
        noise = torch.rand(6) + random.random()
        return torch.full((6,), n / 36.0) + noise, torch.full((6,), n / 18.0)


def drawn(workers=0):
    return DataLoader(Drawn(), batch_size=6, shuffle=True, num_workers=workers)


def test_every_rank_augments_alike(crew):
    """Though nobody has seeded anything; under a seed it is what one device sees."""
    options = dict(module=partial(ranks.Whole, partial(network, 4)), data=drawn, seed=None)
    first, second = crew.ranks(2).run(ranks.result, devices=2, **options)
    assert ranks.differences(second, first) == []
    options["seed"] = 5
    wanted = ranks.result(devices=1, **options)
    assert ranks.differences(crew.run(ranks.result, devices=2, **options)[0], wanted) == []


def different(devices):
    rank = int(os.environ["LOCAL_RANK"])
    return ranks.result(devices=devices, data=partial(loader, seed=rank))


def test_other_batches_are_found(crew):
    crew.ranks(2).start(different, 2)
    for found in crew.results():
        assert isinstance(found, RuntimeError)
        assert "micro-batch 0 is not the one that worker 0 was given" in str(found)
        assert "no DistributedSampler" in "".join(found.__notes__)
    crew.again()
