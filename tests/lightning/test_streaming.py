"""Law: fit with a store is fit without one, bit for bit; a batch of a flush costs two passes over the weights."""

import copy

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from pipeback import disk
from pipeback.disk import DiskStore
from pipeback.lightning import PipelineMonitor, PipelineStrategy
from pipeback.pages import StoreError
from pipeback.store import HostStore
from tests.laws.cases import CASES, STAGES, network
from tests.lightning import ranks
from tests.lightning.cases import Regression, loader, strategy, trainer, weights

STORES = {
    "host": lambda folder: "host",
    "host-3": lambda folder: HostStore(prefetch=3),
    "disk": lambda folder: f"disk:{folder / 'a'}",
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(disk, "SMALL", 1)  # these networks are small


def fitted(store=None, method="gpipe", size=None, module=Regression, data=loader, val=None, seed=7, **options):
    pl.seed_everything(seed, verbose=False)
    found = module()
    run = trainer(strategy(method, micro_batch_size=size, store=store), **options)
    run.fit(found, data(), None if val is None else val())
    return run, found


def same(found, wanted):
    assert torch.equal(weights(found), weights(wanted))
    assert torch.equal(torch.stack(found.losses), torch.stack(wanted.losses))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [None, 2])
def test_streamed_is_resident(case, size, tmp_path):
    data = lambda: loader(samples=5)  # noqa: E731
    _, wanted = fitted(None, CASES[case](STAGES), size, data=data)
    for name, store in STORES.items():
        run, found = fitted(store(tmp_path), CASES[case](STAGES), size, data=data, val=lambda: loader(2))
        same(found, wanted)
        if name == "host":
            assert run.strategy.pipeline.traffic().peak_stages == 2
