"""Law: under Lightning, stages that are alike and come from host memory are as one what they are one by one."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch.nn.functional import mse_loss

from pipeback import DiskStore, HostStore
from pipeback.streaming import disk_store
from tests.helpers.choice import mostly_rare, rare
from tests.laws.as_one import same
from tests.laws.cases import STEADY, allowed
from tests.laws.test_vectorized_streaming import STREAMED
from tests.lightning.test_as_one import BATCHES, Seeing, fitted


def with_store(case, vectorize, ahead=5, workers=None, **options):
    return fitted(case, vectorize, where={"store": HostStore(prefetch=ahead), "workers": workers}, **options)


def alike(case, **options):
    """Fit both, and compare losses, and weights at the end: between batches, the store may be amid an update."""
    (found, how), (wanted, _) = (with_store(case, vectorize, **options) for vectorize in (True, False))
    assert any(told.startswith("as one") for told in how.vectorized.values())
    same(found.losses, wanted.losses)
    same(list(found.parameters()), list(wanted.parameters()))
    return how


@pytest.mark.parametrize(
    ("case", "ahead"),
    mostly_rare([(c, a) for c in STREAMED for a in (5, 9)], ("pb", 9), ("cerebras", 5)),
)
def test_every_method_is_the_event_loop(case, ahead):
    optimizer = next(name for name in ("momentum", "sgd", "adamw") if allowed(case, name))
    how = alike(case, ahead=ahead, kind=lambda: Seeing(optimizer=optimizer))
    assert how.pipeline.traffic().peak_stages <= ahead + 1


@pytest.mark.parametrize("case", mostly_rare(("pb", "cerebras", "pipedream"), "cerebras"))
def test_threads(case):
    """Each has stages of its own, which come from the store for it."""
    alike(case, workers=2)


@pytest.mark.parametrize("case", [rare(case) for case in STEADY if case not in STREAMED] or ["gpipe"])
def test_what_would_move_more_runs_stage_by_stage(case):
    (found, how), (wanted, _) = (with_store(case, vectorize) for vectorize in ("auto", False))
    assert all(told.startswith("stage by stage") for told in how.vectorized.values())
    assert all(map(torch.equal, [*found.losses, *found.parameters()], [*wanted.losses, *wanted.parameters()]))


def test_flushes_run_stage_by_stage():
    """All slices of a batch at one stage, and then at the next: twice a batch, each stage comes to the device."""
    module, how = with_store("gpipe", "auto", max_epochs=1)
    assert "with a store, a method of flushes" in str(how.vectorized)
    assert how.pipeline.traffic().fetches < 2 * len(list(module.model)) * BATCHES
    with pytest.raises(ValueError, match='a method of flushes.* use vectorize=False or "auto", or method="pb"'):
        with_store("gpipe", True)


@pytest.mark.parametrize("algorithm", ["norm", rare("value")])
def test_clipping(algorithm):
    alike("pb", gradient_clip_val=0.01, gradient_clip_algorithm=algorithm)


def test_every_weight_comes_once_per_tick():
    """In the event loop, for F and for B, unless the stage is among the last that came."""
    moved = [with_store("pb", on, size=1, ahead=3)[1].pipeline.traffic().fetches for on in (True, False)]
    assert moved[0] < 0.7 * moved[1]


def test_what_the_plan_tells():
    """A batch is planned as it runs: in ticks, or one micro-batch after the other."""
    plans = []
    for on in (True, False):
        _, how = with_store("pb", on, size=1, ahead=3, max_epochs=1)
        x = torch.randn(1, 6, dtype=torch.float64)
        plans.append(how.pipeline.plan(x, expected=9).push.weights_in)
    assert plans[0] < 0.7 * plans[1]


@pytest.mark.parametrize(("case", "other"), [("cerebras", True), rare("pb", False), rare("pipedream", True)])
def test_a_checkpoint_in_flight(case, other, tmp_path):
    keep = ModelCheckpoint(tmp_path, every_n_train_steps=3, filename="{step}", auto_insert_metric_name=False)
    options = {"enable_checkpointing": True, "callbacks": [keep], "max_epochs": 1}
    whole, _ = with_store(case, other, **options)
    again, _ = with_store(case, True, ckpt=tmp_path / "3.ckpt", seed=11, max_epochs=1)
    same(again.losses, whole.losses[-len(again.losses) :])
    same(list(again.parameters()), list(whole.parameters()))


@pytest.mark.usefixtures("deterministic")  # times do not decide which ticks of a thread are whole
@pytest.mark.parametrize(
    ("case", "options"),
    mostly_rare([(c, o) for c in STREAMED for o in ({}, {"workers": 2})], ("cerebras", {}), ("pb", {"workers": 2})),
    ids=str,
)
def test_from_disk_as_from_host_memory(case, options, tmp_path, monkeypatch):
    """The same bits; a checkpoint in flight goes on, with files that begin anew."""
    monkeypatch.setattr(disk_store, "SMALL", 1)
    optimizer = next(name for name in ("momentum", "sgd", "adamw") if allowed(case, name))
    kind, found = lambda: Seeing(optimizer=optimizer), []
    for kept, store in (("in memory", HostStore(5)), ("on disk", DiskStore(tmp_path / "files", 5))):
        where, folder = {"store": store, **options}, tmp_path / kept
        keep = ModelCheckpoint(folder, every_n_train_steps=3, filename="{step}", auto_insert_metric_name=False)
        module, how = fitted(
            case, True, kind=kind, where=where, enable_checkpointing=True, callbacks=[keep], max_epochs=1
        )
        assert any(told.startswith("as one") for told in how.vectorized.values())
        found.append([*module.losses, *module.parameters()])
    assert len(found[0]) == len(found[1]) and all(map(torch.equal, *found))
    where = {"store": DiskStore(tmp_path / "anew", 5), **options}
    again, _ = fitted(case, True, kind=kind, where=where, ckpt=tmp_path / "on disk" / "3.ckpt", seed=11, max_epochs=1)
    ended = [*again.losses, *again.parameters()]
    assert again.losses and all(map(torch.equal, ended, found[1][-len(ended) :]))


# -- what goes wrong ---------------------------------------------------------------------------------------------------


class Failing(Seeing):
    """The loss of slice `at` fails."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if len(self.losses) == self.at:
            raise KeyError("mine")
        return loss


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("at", [8, 10])
def test_an_error_in_training_step(at, stored, tmp_path):
    """Amid the ticks, or in the newest slice: weights come back, and a checkpoint says what is lost."""
    made = []
    where = {"store": HostStore(prefetch=5)} if stored else {}

    def kind():
        made.append(Failing(at))
        return made[0]

    options = {"enable_checkpointing": True, "callbacks": [OnExceptionCheckpoint(tmp_path, "failed")]}
    with pytest.raises(KeyError, match="mine"), pytest.warns(UserWarning, match="what was in flight is lost"):
        fitted("pb", True, kind=kind, where=where, **options)
    kept = torch.load(tmp_path / "failed.ckpt", weights_only=False)["state_dict"]
    assert all(torch.isfinite(value).all() for value in kept.values())
    same(list(kept.values()), list(made[0].parameters()))
    assert made[0].losses and not all(map(torch.equal, made[0].parameters(), Seeing().parameters()))


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_weights_that_training_step_looks_at(first, stored):
    """Without gradients, before its call of the model or after it: others have moved the weights by then."""

    class Looking(Seeing):
        def training_step(self, batch, batch_idx):
            x, y = batch
            if first:
                self.look(x)
            loss = mse_loss(self.model(x), y)
            if not first:
                self.look(x)
            return loss

        @torch.no_grad()
        def look(self, x):
            self.losses.append(self.model(x).sum())

    run = with_store if stored else fitted
    with pytest.raises(ValueError, match=r"calls self.model without gradients, .*PipelineStrategy\(vectorize=False\)"):
        run("pb", True, kind=Looking)
    run("pb", False, kind=Looking, max_epochs=1)
