"""Law: a checkpoint saved at SLURM's signal is that of whole batches: killed and resumed equals uninterrupted."""

import signal

import pytest
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torchdata.stateful_dataloader import StatefulDataLoader

from pipeback.lightning.requeue_signal import RequeueSignal
from tests.laws.cases import network
from tests.lightning.cases import Regression, dataset, strategy, trainer, weights

AT = 3  # the number of the batch amid which the signal comes


class Told(Regression):
    """Gets the signal once: before or behind the call of the model, behind the backward, or at the end of a batch."""

    def __init__(self, where=None, model=None):
        super().__init__(model)
        self.where = where

    def tell(self, where, batch_idx):
        if where == self.where and batch_idx == AT:
            self.where = None
            signal.raise_signal(signal.SIGUSR1)

    def training_step(self, batch, batch_idx):
        self.tell("before", batch_idx)
        loss = super().training_step(batch, batch_idx)
        self.tell("behind", batch_idx)
        return loss

    def on_after_backward(self):
        self.tell("backward", self.trainer.fit_loop.epoch_loop.batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.tell("end", batch_idx)


@pytest.fixture
def fit(tmp_path, monkeypatch):
    for name, value in {
        "JOB_ID": "17", "NTASKS": "1", "NTASKS_PER_NODE": "1", "JOB_NAME": "job", "LOCALID": "0", "NODEID": "0",
        "PROCID": "0", "NODELIST": "localhost",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"SLURM_{name}", value)
    (tmp_path / "scontrol").write_text("#!/bin/sh\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def run(module, folder, method, **options):
        environment = SLURMEnvironment(requeue_signal=signal.SIGUSR1)
        where = strategy(method, micro_batch_size=2)
        made = trainer(where, tmp_path / folder, plugins=[environment], **options)
        made.fit(module, StatefulDataLoader(dataset(6, samples=4), batch_size=4))
        return made

    return run


@pytest.mark.parametrize(
    ("method", "where", "batches"),
    [("pb", "before", 1), ("pb", "behind", 1), ("gpipe", "behind", 1), ("pb", "backward", 1), ("gpipe", "behind", 2)],
)
def test_a_signal_amid_a_batch(fit, method, where, batches, tmp_path):
    options = {"accumulate_grad_batches": batches}
    whole = Told()
    fit(whole, "whole", method, **options)
    gone_on = Told(where)
    fit(gone_on, "killed", method, **options)
    assert torch.equal(weights(gone_on), weights(whole))
    saved = torch.load(tmp_path / "killed" / "hpc_ckpt_1.ckpt", weights_only=True)
    assert saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["processed"] == AT + 1
    resumed = Told(model=network(seed=99))
    fit(resumed, "killed", method, **options)  # Lightning finds the checkpoint
    assert torch.equal(weights(resumed), weights(whole))


def test_a_signal_between_batches_is_handled_at_once(fit, tmp_path):
    class Between(Told):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            super().on_train_batch_end(outputs, batch, batch_idx)
            saved.append((tmp_path / "once" / "hpc_ckpt_1.ckpt").exists())

    saved = []
    run = fit(Between("end"), "once", "pb", max_epochs=1)
    assert saved == [n >= AT for n in range(6)]
    run.fit(Between("end"), StatefulDataLoader(dataset(6, samples=4), batch_size=4))
    assert sum(isinstance(each, RequeueSignal) for each in run.callbacks) == 1
