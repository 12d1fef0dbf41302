"""What is refused under Lightning says what to do, and that trains."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

import pipeback
from pipeback.lightning import PipelineMonitor, SaveWeights
from tests.helpers.wrapping import Wrapping
from tests.laws.cases import network
from tests.lightning.cases import Regression, loader, strategy, trainer
from tests.lightning.several_modules import batches

from . import lightning_modules
from .lightning_modules import (
    Counting,
    Functions,
    Idle,
    Listed,
    Making,
    Noting,
    Ordered,
    Peeks,
    Penalized,
    Resting,
    Returning,
    Saves,
    Setting,
    Stepless,
    Switching,
    Taking,
    Trained,
    Turning,
    Twice,
    Working,
    all_of,
    meta,
    normal,
    numbers,
    some_frozen,
    some_of,
)
from .rows import Row, refused

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def vector(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in module.parameters()])


def fits(
    module: Any = Regression,
    where: Any = None,
    data: Any = loader,
    val: Any = None,
    later: bool = False,
    **options: Any,
) -> Any:
    """What trains a new module for two epochs. later: it fails after some updates."""

    def do() -> None:
        made = module()
        before = vector(made)
        try:
            trainer(where() if where else strategy("pb"), **options).fit(made, data(), None if val is None else val())
        except (ValueError, TypeError):
            assert later or before.is_meta or torch.equal(before, vector(made)), "half a step was trained"
            raise
        assert not torch.equal(before, vector(made))

    return do


class OwnPrecision(pl.plugins.Precision):
    precision = "8-mixed"


def scaled() -> Any:
    return pl.plugins.MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))


nominated = partial(strategy, "pb", module="model")
own = partial(strategy, "pb", module="self")
ROWS: dict[str, Row] = {
    "a list of modules": Row(
        fits(lambda: Listed(nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])), nominated),
        r"'model' \(ModuleList\) has no forward, so training_step cannot call it; write it as an nn.Sequential",
        fits(lambda: Listed(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))), nominated),
    ),
    "stages in another order": Row(
        fits(lambda: Regression(Ordered("second", "first"))),
        r"model.pipeline_stages\(\) does not compute what Ordered.forward does; return the modules in the order in",
        fits(lambda: Regression(Ordered("first", "second"))),
    ),
    "two calls": Row(
        fits(lambda: Twice("twice"), partial(strategy, "pb", module="model")),
        r'called self.model twice; .*concatenate the inputs and call it once, wrap a call that needs no gradient in '
        r'torch.no_grad\(\), or have all calls of training_step followed: PipelineStrategy\(module="self"\)',
        lambda: [
            fits(lambda: Twice("joined"))(), fits(lambda: Twice("no_grad"))(), fits(lambda: Twice("twice"), own)(),
        ],
    ),
    "a penalty on weights": Row(
        fits(Penalized), r'have all of training_step followed: PipelineStrategy\(module="self"\), or use',
        fits(Penalized, own),
    ),
    "a closure without a step": Row(
        fits(lambda: Stepless(early=False), later=True), "to leave a batch out, return -1 from on_train_batch_start",
        fits(lambda: Stepless(early=True)),
    ),
    "a step that takes its batch itself": Row(
        fits(Taking, data=batches), r"training_step takes dataloader_iter, .*; let it take \(batch, batch_idx\)",
        fits(Returning, data=batches),
    ),
    "no call": Row(
        fits(lambda: Idle(False)), "did not call self.model, so there is nothing for the stages to learn from; call it",
        fits(lambda: Idle(True)),
    ),
    "a checkpoint in training_step": Row(
        fits(lambda: Saves(True)), "in training_step after the call of self.model, .*; save it in on_train_batch_end",
        fits(lambda: Saves(False)),
    ),
    "an attribute that a forward sets": Row(
        fits(Setting, data=batches), r"but it runs in the stages, and training_step does not see what they set; have",
        fits(Returning, data=batches),
    ),
    "a counter of the Trainer's": Row(
        fits(Counting, data=batches), r"write self.seen = self.global_step in on_train_batch_start, and read self.seen",
        fits(Noting, data=batches),
    ),
    "no trained weight": Row(
        fits(Resting, data=batches), r"uses no trained weight, so there is nothing for the stages to learn; call",
        fits(Working, data=batches),
    ),
    "gradients beside a store": Row(
        fits(lambda: Peeks(True), partial(strategy, "pb", store="host")),
        r"called with gradients outside of training_step; its stages live in a store.*call it in torch.no_grad\(\)",
        fits(lambda: Peeks(False), partial(strategy, "pb", store="host")),
    ),
    "no values": Row(
        fits(meta, partial(strategy, "pb")),
        r'without values, which stages get on one device with store="host" or "disk:FOLDER"; build it with its values',
        lambda: [
            trainer(strategy("pb", store=pipeback.Streaming("host", init=normal))).fit(meta(), loader()), fits()(),
        ],
    ),
    "values beside init": Row(
        fits(where=partial(strategy, "pb", store=pipeback.Streaming("host", init=normal))),
        r'init gives values .* but self.model has its values; build it in torch.device\("meta"\), or leave init out',
        lambda: [
            trainer(strategy("pb", store=pipeback.Streaming("host", init=normal))).fit(meta(), loader()),
            fits(where=partial(strategy, "pb", store="host"))(),
        ],
    ),
    "a monitor of nothing": Row(
        lambda: trainer(callbacks=[PipelineMonitor()]).fit(Regression(), loader()),
        r'PipelineMonitor watches the pipeback strategy.*use Trainer\(strategy="pipeback"\) or leave the callback out',
        lambda: [fits(where=lambda: "pipeback")(), trainer().fit(Regression(), loader())],
    ),
    "loss scaling": Row(
        lambda: fits(plugins=[scaled()])(),
        'precision="16-mixed": loss scaling needs one step for all stages; use "bf16-mixed", "bf16-true" or "32-true"',
        lambda: [fits(precision=name)() for name in ("bf16-mixed", "bf16-true", "32-true")],
    ),
    "another precision": Row(
        lambda: fits(plugins=[OwnPrecision()])(),
        'precision="8-mixed" is not supported by pipeback; use "32-true", "bf16-true" or "64-true"',
        lambda: [fits(precision=name)() for name in ("32-true", "bf16-true")],
    ),
    "an optimizer that evaluates again": Row(
        fits(lambda: Trained(lambda m: torch.optim.LBFGS(m.parameters()))),
        "configure_optimizers returned LBFGS, which evaluates the loss several times per step.*use SGD or Adam",
        fits(lambda: Trained(lambda m: torch.optim.Adam(m.parameters()))),
    ),
    "an optimizer around another": Row(
        fits(lambda: Trained(lambda m: Wrapping(torch.optim.SGD(m.parameters(), lr=0.1)))),
        "configure_optimizers returned Wrapping, which steps another optimizer inside.*return the optimizer inside, or "
        r"use pipeback.Pipeline\(optimizer=lambda weights: Wrapping\(...\)\)",
        lambda: [
            fits(lambda: Trained(lambda m: torch.optim.SGD(m.parameters(), lr=0.1)))(),
            pipeback.Pipeline(
                network(), loss=nn.functional.mse_loss,
                optimizer=lambda weights: Wrapping(torch.optim.SGD(weights, lr=0.1)),
            ).push(torch.ones(4, 6), torch.ones(4, 6)),
        ],
    ),
    "steps of one's own": Row(
        fits(lambda: Trained(all_of, automatic=False)),
        "uses manual optimization, .*; use automatic optimization: return the loss from training_step",
        fits(lambda: Trained(all_of)),
    ),
    "weights in no group": Row(
        fits(lambda: Trained(some_of)),
        "is in no group of the optimizer; add it, or set its requires_grad to False before training",
        lambda: [fits(lambda: Trained(all_of))(), fits(lambda: Trained(some_frozen))()],
    ),
    "a step that goes another way": Row(
        fits(Turning, data=batches, later=True),
        "the pipeline makes the same calls for every micro-batch: put what differs into the forward of one module",
        fits(Switching, data=batches),
    ),
    "stages that are no modules": Row(
        fits(lambda: Regression(Functions(True))),
        "gave a builtin_function_or_method as stage 1; return modules, and wrap a function in one",
        fits(lambda: Regression(Functions(False))),
    ),
    "a clock of each rank": Row(
        fits(val_check_interval="00:00:10:00", devices=2, val=loader),
        "each rank has a clock of its own; give a number of batches or a fraction of an epoch",
        lambda: [fits(val_check_interval=value, val=loader)() for value in (2, 0.5)],
    ),
    "an average over devices": Row(
        fits(callbacks=[pl.callbacks.StochasticWeightAveraging(swa_lrs=0.01)], devices=2),
        "needs the whole model in one process; leave it out, or use devices=1",
        lambda: fits(callbacks=[pl.callbacks.StochasticWeightAveraging(swa_lrs=0.01)])(),
    ),
    "another optimizer": Row(
        fits(lambda: lightning_modules.Regrouped(lightning_modules.another_optimizer), later=True),
        r"another optimizer within fit, .*; set options of its groups instead \(group\[\"lr\"\] = 0.01\)",
        fits(lambda: lightning_modules.Regrouped(lightning_modules.another_rate)),
    ),
    "a weight in another group": Row(
        fits(lambda: lightning_modules.Regrouped(lightning_modules.to_another_group), later=True),
        "hold other weights than when fit began, .*; set options of groups only",
        fits(lambda: lightning_modules.Regrouped(lightning_modules.another_rate)),
    ),
    "a weight in no group": Row(
        fits(lambda: lightning_modules.Regrouped(lightning_modules.taken_out), later=True),
        r"and requires_grad_\(False\) for what is not to be trained, or let the fit end before",
        fits(lambda: lightning_modules.Regrouped(lightning_modules.frozen)),
    ),
    "threads on devices": Row(
        fits(where=partial(strategy, "pb", workers=2), devices=2),
        r"workers=2: with several devices each has a process.*leave workers out, or use Trainer\(devices=1\)",
        fits(where=partial(strategy, "pb", workers=2), devices=1),
    ),
    "words for threads": Row(
        fits(where=partial(strategy, "pb", workers="two")),
        "workers must be a number of threads, a pipeback.Processes or None, but is 'two'; for example workers=2",
        fits(where=partial(strategy, "pb", workers=2)),
    ),
    "samples that nobody counts": Row(
        fits(Making, partial(strategy, "pb", reference_batch=32), numbers),
        "but the batch has no tensors of one length that would count them; leave reference_batch out",
        fits(Making, partial(strategy, "pb"), numbers),
    ),
    **{
        f"{name} of the Trainer's": Row(
            fits(where=partial(strategy, "pb", **given)),
            rf"PipelineStrategy does not take {name}=.*; use ",
            fits(**cure),
        )
        for name, given, cure in (
            ("weights", {"micro_batch_size": pipeback.MicroBatches(weights="samples")},
             {"where": partial(strategy, "pb", micro_batch_size=pipeback.MicroBatches(weights="equal"))}),
            ("device", {"store": pipeback.Streaming("host", device="cpu")}, {"accelerator": "cpu"}),
            ("check_finite", {"debug": pipeback.Debug(check_finite=True)},
             {"where": partial(strategy, "pb", debug=pipeback.Debug(check_finite=False))}),
            ("take_back", {"debug": pipeback.Debug(take_back=3)},
             {"where": partial(strategy, "pb", debug=pipeback.Debug(take_back=None))}),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_the_cure_works(name):
    row = ROWS[name]
    refused(row.broken, row.says)
    row.cured()


def test_weights_in_files(tmp_path):
    run = partial(SaveWeights, tmp_path / "weights")
    says = (
        "SaveWeights writes the stages of a PipelineStrategy, but the strategy is SingleDevice.*; use ModelCheckpoint"
    )
    refused(lambda: trainer(callbacks=[run()]).fit(Regression(), loader()), says)
    cure = pl.callbacks.ModelCheckpoint(tmp_path)
    trainer(callbacks=[cure], enable_checkpointing=True).fit(Regression(network(2)), loader())
    assert list(tmp_path.glob("*.ckpt"))


def test_files_of_a_model_that_memory_may_not_hold(tmp_path):
    given = pipeback.Streaming(f"disk:{tmp_path / 'store'}", init=normal)
    every = [pl.callbacks.ModelCheckpoint(tmp_path)]
    says = "use enable_checkpointing=False, and pipeback.lightning.SaveWeights"
    run = trainer(strategy("pb", store=given), callbacks=every, enable_checkpointing=True)
    refused(lambda: run.fit(meta(), loader()), says)
    saving = [SaveWeights(tmp_path / "weights")]
    trainer(strategy("pb", store=given), callbacks=saving, enable_checkpointing=False).fit(meta(), loader())
    assert list((tmp_path / "weights").rglob("*.safetensors"))


def test_commits_of_a_fit(tmp_path):
    def fit(every, **options):
        given = pipeback.DiskStore(tmp_path / "own", commit_every=every)
        run = trainer(strategy("pb", store=given), **options)
        run.fit(Regression(network(2)), loader())

    says = r"does not resume; leave commit_every out, and give fit a checkpoint \(ckpt_path=...\)"
    refused(lambda: fit(8), says)
    fit(None)
