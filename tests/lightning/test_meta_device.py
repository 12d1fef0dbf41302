"""Models that are never in memory as a whole."""

import copy

import lightning.pytorch as pl
import pytest
import torch
from torch.nn.functional import mse_loss

import pipeback
from pipeback import Pipeline
from pipeback.lightning import SaveWeights
from tests.helpers.choice import diagonal
from tests.lightning.cases import Regression, loader, strategy, trainer, weights
from tests.lightning.streamed import STORES, same

pytestmark = pytest.mark.usefixtures("small")


def absent(seed=7):
    pl.seed_everything(seed, verbose=False)
    with torch.device("meta"):
        return Regression()


def present(seed=7):
    """The same with the values that `absent` gets."""
    module = absent(seed)
    pipe = Pipeline(copy.deepcopy(module.model), loss=mse_loss, optimizer=module_optimizer, method="gpipe")
    values = {f"model.{name}": value for _, part in pipe.values() for name, value in part.items()}
    module.load_state_dict(values, assign=True)
    return module


def module_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize(("method", "store"), diagonal(["gpipe", "cerebras"], ["host", "disk"]))
def test_a_model_from_the_meta_device(store, method, tmp_path):
    wanted, found, saved = present(), absent(), tmp_path / "saved"
    trainer(strategy(method)).fit(wanted, loader())
    run = trainer(strategy(method, store=STORES[store](tmp_path)), callbacks=[SaveWeights(saved)])
    run.fit(found, loader(), loader(2))
    assert torch.equal(torch.stack(found.losses), torch.stack(wanted.losses))
    assert any(p.is_meta for p in found.parameters()) == (store == "disk")

    # what was saved is what was trained, and begins another fit
    again = absent()
    begin = strategy("gpipe", store=pipeback.Streaming("host", init=saved))
    trainer(begin, max_epochs=1, limit_train_batches=1).fit(again, loader())
    trainer(strategy("gpipe"), max_epochs=1, limit_train_batches=1).fit(wanted, loader())
    assert torch.equal(weights(again), weights(wanted))


def test_a_checkpoint_gives_a_model_from_the_meta_device_its_values(tmp_path):
    def fit(module, epochs, ckpt=None):
        run = trainer(strategy("gpipe", store="host"), max_epochs=epochs, tmp=tmp_path)
        run.fit(module, loader(), ckpt_path=ckpt)
        return run

    whole, half, rest = present(), absent(), absent(seed=8)
    trainer(strategy("gpipe")).fit(whole, loader())
    fit(half, 1).save_checkpoint(tmp_path / "half.ckpt")
    fit(rest, 2, tmp_path / "half.ckpt")
    assert torch.equal(weights(rest), weights(whole))


def test_the_plan_is_told_before_the_first_micro_batch(monkeypatch):
    told = []

    def tell(text):
        told.append((text, len(found.losses), weights(found).isfinite().all()))

    monkeypatch.setattr("pipeback.lightning.strategy.rank_zero_info", tell)
    found = present()
    trainer(strategy("gpipe", store="host", micro_batch_size=1, plan=True)).fit(found, loader())
    ((text, steps, _),) = told
    assert "3 × 1 sample" in text and "optimizer state" in text and not steps
    wanted = present()
    trainer(strategy("gpipe", store="host", micro_batch_size=1, plan=False)).fit(wanted, loader())
    same(found, wanted)
    assert len(told) == 1


def test_a_model_without_values_is_refused(tmp_path):
    def fit(message, module=absent, devices=1, checkpoints=False, **options):
        run = trainer(strategy("gpipe", **options), devices=devices, enable_checkpointing=checkpoints, tmp=tmp_path)
        with pytest.raises(ValueError, match=message):
            run.fit(module(), loader())

    fit("on the meta device, without values")
    fit("or use devices=1", devices=2, store="host", launcher="fork")
    fit("ModelCheckpoint collects all of them", store=f"disk:{tmp_path / 'a'}", checkpoints=True)
    with pytest.raises(ValueError, match="use ModelCheckpoint"):
        trainer(callbacks=[SaveWeights(tmp_path)]).fit(present(), loader())
    fit("init gives values", module=present, store=pipeback.Streaming("host", init=lambda module: None))
