"""The names of Lightning and torchmetrics that are not public: each test fails when they change."""

import pickle
import signal
from datetime import timedelta

import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch import nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import MeanSquaredError

from pipeback.lightning import lightning_internals
from tests.lightning.cases import Regression, dataset, loader, strategy, trainer


def test_weight_averaging_goes_forward_only():
    class Look(Callback):
        def on_train_batch_start(self, trainer, *rest):
            seen.append((trainer.current_epoch, lightning_internals.forward_only(trainer)))

    seen = []
    averaging = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, device=None)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    trainer(max_epochs=2, callbacks=[averaging, Look()]).fit(Regression(model), loader(2, 16))
    assert set(seen) == {(0, False), (1, False), (2, True)}


def test_mid_epoch():
    class Look(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            seen.append(("batch", batch_idx, lightning_internals.mid_epoch(trainer)))

        def on_validation_end(self, trainer, *rest):
            seen.append(("validation", None, lightning_internals.mid_epoch(trainer)))

        def on_train_epoch_end(self, trainer, *rest):
            seen.append(("epoch", None, lightning_internals.mid_epoch(trainer)))

    seen = []
    trainer(max_epochs=1, callbacks=[Look()]).fit(Regression(), loader(3), loader(1))
    assert seen == [
        ("batch", 0, True), ("batch", 1, True), ("batch", 2, False), ("validation", None, True), ("epoch", None, False),
    ]  # fmt: skip


def test_loader_states(tmp_path):
    class Look(Callback):
        def on_train_start(self, trainer, *rest):
            seen.append(lightning_internals.take_loader_states(trainer))

        def setup(self, trainer, *rest, **named):
            trainer.strategy.load_optimizer_state_dict, original = (
                lambda checkpoint: (seen.append(lightning_internals.take_loader_states(trainer)), original(checkpoint)),
                trainer.strategy.load_optimizer_state_dict,
            )

    seen = []
    data = StatefulDataLoader(dataset(4), batch_size=3)
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    trainer(max_epochs=1, callbacks=[saving], enable_checkpointing=True).fit(Regression(), data)
    file = sorted(tmp_path.glob("*.ckpt"))[0]
    trainer(max_epochs=1, callbacks=[Look()]).fit(Regression(), data, ckpt_path=file)
    (first,), second = seen
    assert first["_num_yielded"] == 2 and second == []


def test_step_value():
    metric = MeanSquaredError()
    metric(torch.zeros(2), torch.ones(2))
    assert lightning_internals.step_value(metric) == 1
    lightning_internals.set_step_value(metric, torch.tensor(5.0))
    assert lightning_internals.step_value(metric) == 5 and metric.compute() == 1


def test_the_launchers():
    """Lightning's own start the processes; what is brought back goes through two methods of one."""
    launcher = trainer(strategy(), devices=2).strategy.launcher
    assert isinstance(launcher, lightning_internals.Launcher) and launcher.is_interactive_compatible is False
    assert callable(lightning_internals.MultiProcessingLauncher.get_extra_results)
    assert callable(lightning_internals.MultiProcessingLauncher.update_main_process_results)
    script = trainer(strategy(launcher="script"), devices=2).strategy.launcher
    assert isinstance(script, lightning_internals.ScriptLauncher) and script.num_processes == 2
    fork = trainer(strategy(launcher="fork"), devices=2).strategy.launcher
    assert fork.is_interactive_compatible
    assert trainer(strategy(launcher="fork")).strategy.launcher is None


def test_when_checkpoints_look_at_their_metric():
    every = ModelCheckpoint(monitor="x", every_n_train_steps=3)
    assert [step for step in range(1, 10) if lightning_internals.looks(every, step)] == [3, 6, 9]
    assert not lightning_internals.looks(ModelCheckpoint(every_n_train_steps=3), 3)
    assert not lightning_internals.looks(ModelCheckpoint(monitor="x"), 3)
    assert lightning_internals.looks(ModelCheckpoint(monitor="x", train_time_interval=timedelta(hours=1)), 4)


def test_a_logger_goes_on_from_what_another_process_has_written(tmp_path):
    theirs, here = CSVLogger(tmp_path), CSVLogger(tmp_path)
    theirs.log_metrics({"a": 1.0}, 0)
    theirs.save()
    vars(here).update(pickle.loads(pickle.dumps(lightning_internals.written(theirs))))
    here.log_metrics({"b": 2.0}, 1)
    here.save()
    (file,) = tmp_path.rglob("metrics.csv")
    assert file.read_text().split() == ["a,b,step", "1.0,,0", ",2.0,1"]


def test_validation_by_the_clock():
    assert lightning_internals.validates_by_the_clock(trainer(val_check_interval="00:00:10:00"))
    assert not lightning_internals.validates_by_the_clock(trainer(val_check_interval=0.5))


def test_where_a_module_holds_its_trainer():
    module = Regression()
    module.trainer = given = trainer()
    assert vars(module)[lightning_internals.TRAINER] is given


def test_a_module_shows_the_mesh_that_it_was_given():
    module, mesh = Regression(), object()
    assert module.device_mesh is None
    lightning_internals.show_mesh(module, mesh)
    assert module.device_mesh is mesh


def test_whether_validation_follows():
    """After the second batch and the fourth; after the last one, too, which is none of these."""

    class Look(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            seen.append(("begins", batch_idx, lightning_internals.validates_next(trainer)))

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            seen.append(("ends", batch_idx, lightning_internals.validates_next(trainer)))

        def on_validation_end(self, trainer, *rest):
            seen.append(("validation", None, lightning_internals.validates_next(trainer)))

    seen = []
    trainer(max_epochs=1, val_check_interval=2, callbacks=[Look()]).fit(Regression(), loader(5), loader(1))
    assert [each for each in seen if each[0] != "validation"] == [
        (what, n, what == "ends" and n in (1, 3)) for n in range(5) for what in ("begins", "ends")
    ]
    assert not any(due for what, _, due in seen if what == "validation")
    seen.clear()
    nothing = DataLoader(loader(1).dataset, batch_size=50, drop_last=True)
    trainer(max_epochs=1, val_check_interval=2, callbacks=[Look()]).fit(Regression(), loader(5), nothing)
    assert len(seen) == 10 and not any(due for *_, due in seen)


def test_the_signal_of_slurm():
    assert lightning_internals.requeue_signal(trainer()) is None
    for queues, number in ((True, signal.SIGUSR2), (False, None)):
        environment = SLURMEnvironment(auto_requeue=queues, requeue_signal=signal.SIGUSR2)
        assert lightning_internals.requeue_signal(trainer(plugins=[environment])) == number
