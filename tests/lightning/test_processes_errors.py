"""Bad input and faults over several devices: every rank ends, and says which rank is at fault and why."""

import os
import time
from contextlib import nullcontext
from functools import partial
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch.nn.functional import mse_loss

import pipeback
from pipeback.errors import RankError
from pipeback.lightning import PipelineStrategy
from pipeback.lightning.ranks.meeting import Meeting, _unfinished
from tests.helpers.processes import fork_for_spawn
from tests.laws.cases import network
from tests.lightning import ranks, script
from tests.lightning.cases import Regression, loader, strategy, trainer

pytestmark = pytest.mark.filterwarnings("ignore")


def own_rank():
    return int(os.environ["LOCAL_RANK"])


def raised(crew, function, *arguments, **named):
    """What every rank raises, and within how many seconds; the next test gets a new process group."""
    begin = time.monotonic()
    crew.start(function, *arguments, **named)
    found = crew.results(seconds=60)
    crew.again()
    assert time.monotonic() - begin < 50
    assert all(isinstance(error, BaseException) for error in found), found
    return found


REFUSED = {
    "2 stages for 3 devices; use as many devices or less": dict(module=partial(Regression, network(2))),
    "StochasticWeightAveraging needs the whole model in one process": dict(callbacks=[StochasticWeightAveraging(0.1)]),
    "each rank has a clock of its own": dict(val_check_interval="00:00:01:00", val=partial(loader, 2)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused_on_every_rank(message, crew):
    errors = raised(crew.ranks(3), ranks.fit, devices=3, **REFUSED[message])
    assert all(isinstance(error, ValueError) and message in str(error) for error in errors), errors


def other_option(which):
    options = {"micro_batch_size": {"given": {"micro_batch_size": own_rank() + 1}},
               "max_epochs": {"max_epochs": own_rank() + 1},
               "method": {"method": ("pb", {"slack": own_rank() + 1})}}  # fmt: skip
    ranks.fit(devices=2, **options[which])


@pytest.mark.parametrize("which", ["micro_batch_size", "max_epochs", "method"])
def test_ranks_with_other_options(which, crew):
    for error in raised(crew.ranks(2), other_option, which):
        assert isinstance(error, ValueError) and f"rank 1 has {which} " in str(error), error


class Broken(Regression):
    """Something goes wrong in one hook of one rank."""

    def __init__(self, where, rank):
        super().__init__()
        self.where, self.rank = where, rank

    def fail(self, where):
        if where == self.where and own_rank() == self.rank and self.trainer.global_step == 5:
            raise ArithmeticError("broken on purpose")

    def on_train_batch_start(self, batch, batch_idx):
        self.fail("batch start")

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = mse_loss(self.model(x), y)
        self.fail("after the model")
        if self.where == "no loss" and self.trainer.global_step == 5:
            return None
        return loss

    def backward(self, loss):
        if self.where != "no backward" or self.trainer.global_step != 5:
            super().backward(loss)


def broken(where, rank):
    ranks.fit(devices=2, module=partial(Broken, where, rank), given={"workers": pipeback.Processes(timeout=20.0)})


@pytest.mark.parametrize(
    ("where", "rank", "kind", "message"),
    [
        ("batch start", 1, ArithmeticError, "broken on purpose"),
        ("after the model", 0, ArithmeticError, "broken on purpose"),
        ("no loss", 0, ValueError, "training_step returned no loss, but the micro-batch has gone forward"),
        ("no backward", 0, RuntimeError, "with several devices every micro-batch goes backward"),
    ],
)
def test_an_error_of_one_rank_ends_all(where, rank, kind, message, crew):
    errors = raised(crew.ranks(2), broken, where, rank)
    assert isinstance(errors[rank], kind) and message in str(errors[rank])
    other = errors[1 - rank]
    assert isinstance(other, RankError) and other.rank == rank and message in str(other)


class Peeks(Regression):
    """Calls the model where it should not."""

    def __init__(self, where):
        super().__init__()
        self.where = where

    def training_step(self, batch, batch_idx):
        x, y = batch
        output = self.model(x)
        if self.where == "after" and self.trainer.global_step == 3:
            with torch.no_grad():
                self.model.eval()(x)
        return mse_loss(output, y)

    def validation_step(self, batch, batch_idx):
        if self.where == "gradients":
            torch.set_grad_enabled(True)
        if self.where == "training":
            self.model.train()
        self.model(batch[0])


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("after", "where the other ranks leave training_step; call it before"),
        ("gradients", "was called with gradients outside of training_step"),
        ("training", "was called without gradients in training mode"),
    ],
)
def test_calls_that_several_devices_cannot_serve(where, message, crew):
    options = dict(module=partial(Peeks, where), val=partial(loader, 2), inference_mode=False)
    errors = raised(crew.ranks(2), ranks.fit, devices=2, **options)
    assert message in str(errors[0]) and message in str(errors[1])


class SavesAlone(pl.Callback):
    def on_train_batch_end(self, trainer, *rest):
        if trainer.is_global_zero and trainer.global_step == 5:
            trainer.save_checkpoint("alone.ckpt")


def test_a_checkpoint_of_rank_0_alone(crew, tmp_path):
    options = dict(callbacks=[SavesAlone()], given={"workers": pipeback.Processes(timeout=5.0)})
    errors = raised(crew.ranks(2), ranks.fit, devices=2, **options)
    assert all("rank 0" in str(error) for error in errors), errors


def killed():
    ranks.fit(devices=2, callbacks=[script.Fault("kill")], given={"workers": pipeback.Processes(timeout=20.0)})


def test_a_rank_that_is_killed(crew):
    crew.ranks(2).start(killed)
    (error,) = crew.results(ranks=[0], seconds=60)
    crew.members[1].join(30)  # its end is seen by others before it has ended
    crew.again()
    assert isinstance(error, RankError) and error.rank == 1
    assert "its process has ended without leaving" in str(error) or "its connection to rank 0 broke" in str(error)


# -- in the process that would start the others ------------------------------------------------------------------------


def test_what_is_known_before_anything_is_started():
    with pytest.raises(ValueError, match="2 stages for 3 devices"):
        trainer(strategy(), devices=3).fit(Regression(network(2)), loader())
    with pytest.raises(TypeError, match="functools.partial instead of a lambda.*launcher='fork'"):
        trainer(strategy(), devices=2).fit(Regression(scheduler=lambda optimizer: None), loader())
    with pytest.raises(ValueError, match="launcher must be one of auto, spawn, fork, script, but is 'thread'"):
        PipelineStrategy(launcher="thread")
    with pytest.raises(ValueError, match="timeout must be above 0 seconds, but is 0"):
        PipelineStrategy(workers=pipeback.Processes(timeout=0))
    run = trainer(strategy(), devices=2)
    with pytest.raises(RuntimeError, match="with several devices it is in the processes that fit starts"):
        run.strategy.pipeline  # noqa: B018


def test_torchrun_with_another_number(monkeypatch):
    for name, value in dict(TORCHELASTIC_RUN_ID="1", WORLD_SIZE="2", RANK="0", LOCAL_RANK="0").items():
        monkeypatch.setenv(name, value)
    for devices in (1, 3):
        with pytest.raises(ValueError, match=f"`devices={devices}`.*does not match the world size \\(2\\)"):
            trainer(strategy(), devices=devices)


def test_the_parent_raises_what_a_child_raised(tmp_path, monkeypatch):
    fork_for_spawn(monkeypatch)
    with pytest.raises(Exception, match="broken on purpose"):
        script.train(2, tmp_path, "spawn", fault="error")


def test_work_that_is_given_up_keeps_its_group():
    """A group that is freed waits for its work: for ever, where a rank has died."""

    class Ill(Exception):
        pass

    meeting, work = Meeting.__new__(Meeting), Mock(is_completed=Mock(return_value=False))
    meeting.rest, meeting._group, kept = nullcontext, object(), len(_unfinished)
    meeting.health = Mock(calling=Mock(return_value=nullcontext()), check=Mock(side_effect=Ill))
    with pytest.raises(Ill):
        meeting._wait(work, "a call")
    assert _unfinished[kept:] == [(meeting._group, work)]
    meeting.health = None
    work.is_completed.return_value = True
    meeting._wait(work, "a call")
    assert _unfinished.pop() == (meeting._group, work), "and what was waited for is not kept"
    assert len(_unfinished) == kept
