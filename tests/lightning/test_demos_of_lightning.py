"""Modules that nobody here wrote, those of Lightning's own demos, train as they do under Lightning alone.

Among them are an LSTM that hands its hidden state from one training_step to the next, and a transformer whose forward
takes inputs and targets.
"""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos import lstm, transformer
from lightning.pytorch.demos.boring_classes import BoringModel, DemoModel, RandomDataset
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pipeback.lightning import PipelineStrategy

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
WORDS, STEPS = 50, 4


def text():
    tokens = torch.randint(0, WORDS, (161,), generator=torch.Generator().manual_seed(0))
    return TensorDataset(tokens[:-1].view(-1, 8), tokens[1:].view(-1, 8))


MODULES = {
    "BoringModel": (BoringModel, lambda: RandomDataset(32, 64), 1),
    "DemoModel": (DemoModel, lambda: RandomDataset(32, 64), 1),
    "LightningLSTM": (lambda: lstm.LightningLSTM(vocab_size=WORDS), text, 3),
    "LightningTransformer": (lambda: transformer.LightningTransformer(vocab_size=WORDS), text, 7),
}


def fitted(name, strategy):
    make, data, _ = MODULES[name]
    pl.seed_everything(1, verbose=False)
    module = make()
    module.prepare_data = lambda: None  # which would download
    for layer in module.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0  # stages have random streams of their own
        elif isinstance(getattr(layer, "dropout", None), float):
            layer.dropout = 0.0
    trainer = pl.Trainer(
        max_epochs=1, limit_train_batches=STEPS, limit_val_batches=0, accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **({} if strategy is None else {"strategy": strategy}),
    )  # fmt: skip
    trainer.fit(module, DataLoader(data(), batch_size=4))
    return trainer, list(module.parameters())


@pytest.mark.parametrize("name", MODULES)
def test_a_module_that_nobody_here_wrote(name):
    _, wanted = fitted(name, None)
    trainer, found = fitted(name, PipelineStrategy("sgd"))
    assert all(map(torch.equal, found, wanted))
    assert len(trainer.strategy.pipeline.split.parts) == MODULES[name][2]
    trainer, found = fitted(name, "pipeback")
    assert trainer.global_step == STEPS and all(p.isfinite().all() for p in found)
