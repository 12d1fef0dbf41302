"""The names of Lightning and torchmetrics that are not public: each test fails when they change."""

import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, StochasticWeightAveraging
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import MeanSquaredError

from pipeback.lightning import private
from tests.lightning.cases import Regression, dataset, loader, trainer


def test_weight_averaging_goes_forward_only():
    class Look(Callback):
        def on_train_batch_start(self, trainer, *rest):
            seen.append((trainer.current_epoch, private.forward_only(trainer)))

    seen = []
    averaging = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, device=None)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    trainer(max_epochs=2, callbacks=[averaging, Look()]).fit(Regression(model), loader(2, 16))
    assert set(seen) == {(0, False), (1, False), (2, True)}


def test_mid_epoch():
    class Look(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            seen.append(("batch", batch_idx, private.mid_epoch(trainer)))

        def on_validation_end(self, trainer, *rest):
            seen.append(("validation", None, private.mid_epoch(trainer)))

        def on_train_epoch_end(self, trainer, *rest):
            seen.append(("epoch", None, private.mid_epoch(trainer)))

    seen = []
    trainer(max_epochs=1, callbacks=[Look()]).fit(Regression(), loader(3), loader(1))
    assert seen == [
        ("batch", 0, True), ("batch", 1, True), ("batch", 2, False), ("validation", None, True), ("epoch", None, False),
    ]  # fmt: skip


def test_loader_states(tmp_path):
    class Look(Callback):
        def on_train_start(self, trainer, *rest):
            seen.append(private.take_loader_states(trainer))

        def setup(self, trainer, *rest, **named):
            trainer.strategy.load_optimizer_state_dict, original = (
                lambda checkpoint: (seen.append(private.take_loader_states(trainer)), original(checkpoint)),
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
    assert private.step_value(metric) == 1
    private.set_step_value(metric, torch.tensor(5.0))
    assert private.step_value(metric) == 5 and metric.compute() == 1
