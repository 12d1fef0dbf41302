"""Stores that cannot be, and what a store does not go with."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging

from pipeback.errors import StoreError
from pipeback.streaming.disk_store import DiskStore
from pipeback.streaming.store import HostStore
from tests.laws.cases import data, network, pipeline
from tests.lightning.cases import Regression, loader, strategy, trainer, weights
from tests.lightning.streamed import equal, fitted, same

pytestmark = pytest.mark.usefixtures("small")


def refused(message, store, error=(ValueError, TypeError), **options):
    before = network().state_dict()
    module = None

    def made():
        nonlocal module
        module = Regression()
        return module

    with pytest.raises(error, match=message):
        fitted(store, module=made, **options)
    if module is not None:
        assert equal(dict(module.model.state_dict()), dict(before))


def test_bad_stores(tmp_path):
    refused("store='hots' is unknown; give None, 'host', 'disk:FOLDER'", "hots")
    refused('store must be None, "host", "disk:FOLDER" or a pipeback.Store, but is 3', 3)
    with pipeline(network(), "gpipe", store=DiskStore(tmp_path / "own")) as pipe:
        pipe.push(*data(1)[0])
    (tmp_path / "of two").mkdir()
    (tmp_path / "own").rename(tmp_path / "of two" / "rank-1")
    with pipeline(network(), "gpipe", store=DiskStore(tmp_path / "own")) as pipe:
        pipe.push(*data(1)[0])
    for folder in (tmp_path / "own", tmp_path / "of two"):
        refused(f"{folder} holds a committed version .*give fit a checkpoint", f"disk:{folder}")
        refused(f"{folder} holds a committed version .*give fit a checkpoint", DiskStore(folder))
    fitted(DiskStore(tmp_path / "empty"))


@pytest.mark.parametrize("method", ["gpipe", "pb"])
def test_a_second_fit_with_the_same_store(method, tmp_path):
    """A fit commits nothing, since no fit resumes from it, however the store is given."""
    store, wanted = DiskStore(tmp_path / "own", prefetch=2), fitted(None, method)[1]
    for _ in range(2):
        same(fitted(store, method)[1], wanted)
    assert store.commit_every is None


def test_fused_without_support(tmp_path):
    class Rprop(Regression):
        def configure_optimizers(self):
            return torch.optim.Rprop(self.parameters())

    for store in (HostStore(fused=True), DiskStore(tmp_path, fused=True)):
        module = Rprop()
        with pytest.raises(ValueError, match="fused=True: Rprop of stage 0 .* has no fused implementation"):
            trainer(strategy(store=store)).fit(module, loader())
        assert torch.equal(weights(module), weights(Rprop()))


def test_fused_stays_so_when_rates_change():
    class Scheduled(Regression):
        def __init__(self):
            super().__init__(optimizer="adam", scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5))

    run, _ = fitted(HostStore(fused=True), module=Scheduled)
    for optimizer in run.strategy.pipeline.optimizers:
        assert [group["fused"] for group in optimizer.param_groups] == [True]
        assert [group["lr"] for group in optimizer.param_groups] == [0.005]


def test_two_trainers_on_one_folder(tmp_path):
    class Second(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 3:
                refused("process .* uses this store", where, StoreError)
                self.heard = True

    where, second = f"disk:{tmp_path}", Second()
    _, found = fitted(where, callbacks=[second])
    assert second.heard
    same(found, fitted(None)[1])
    same(fitted(where)[1], found)  # nobody has it any more


@pytest.mark.parametrize("kind", [StochasticWeightAveraging, WeightAveraging])
def test_averaging_is_refused(kind):
    callback = kind(swa_lrs=0.01) if kind is StochasticWeightAveraging else kind()
    refused(f"{kind.__name__} reads and writes all weights .* use store=None", "host", callbacks=[callback])
