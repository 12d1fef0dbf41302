"""Law: where stages run as one, or visit a store, a suspended `training_step` cannot tell: it runs in the thread of
`fit`, and what it sets for itself reaches neither the stages nor other slices.
"""

import contextvars
import subprocess
import sys
import threading

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.laws.as_one import model, same
from tests.lightning.test_as_one import Seeing, alike, fitted

HOW = {"as one": {"vectorize": True}, "store": {"vectorize": False, "where": {"store": "host"}}}
MARK = contextvars.ContextVar("mark", default=0)


@pytest.mark.parametrize("how", HOW)
def test_it_runs_in_the_thread_of_fit(how):
    seen = set()

    class Threaded(Seeing):
        def training_step(self, batch, batch_idx):
            seen.add(threading.get_ident())
            loss = super().training_step(batch, batch_idx)
            seen.add(threading.get_ident())
            return loss

    fitted("gpipe", kind=Threaded, **HOW[how])
    assert seen == {threading.get_ident()}


class Hearing(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.heard = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.heard += 1
        return func(*args, **(kwargs or {}))


class Setting(Seeing):
    """Each slice finds what it has set itself, and not what another one has."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        mine = len(self.losses) + 1
        assert MARK.get() == 0 and torch.is_grad_enabled() and torch.get_default_dtype() == torch.float32
        token = MARK.set(mine)
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"), torch.autocast("cpu", torch.bfloat16, cache_enabled=False), Hearing() as mode:
            before = mode.heard
            output = self.model(x)
            assert mode.heard - before < 9
            assert torch.empty(1).is_meta and torch.is_autocast_enabled("cpu")
        assert MARK.get() and torch.get_default_dtype() == torch.float64 and not torch.empty(1).is_meta
        torch.set_default_dtype(torch.float32)
        MARK.reset(token)
        loss = mse_loss(output.to(y.dtype), y)
        self.losses.append(loss.detach())
        return loss


@pytest.mark.parametrize("how", HOW)
def test_what_it_sets_is_its_own(how):
    module, _ = fitted("gpipe", kind=Setting, **HOW[how])
    assert len(module.losses) == 50 and MARK.get() == 0
    assert torch.get_default_device() == torch.device("cpu")


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("how", HOW)
def test_a_mode_that_would_see_other_slices(how):
    class Watched(Seeing):
        inside = True

        def training_step(self, batch, batch_idx):
            if not self.inside:
                return super().training_step(batch, batch_idx)
            with Watching():
                output = self.model(batch[0])
            return mse_loss(output, batch[1])

    with pytest.raises(ValueError, match=r"within Watching, .*; leave it out, or use vectorize=False and store=None"):
        fitted("gpipe", kind=Watched, **HOW[how])
    assert fitted("gpipe", vectorize=False, kind=Watched)  # the cures
    Watched.inside = False
    assert fitted("gpipe", kind=Watched, **HOW[how])


@pytest.mark.parametrize("asks", ["wait", "drain", "memory", "state_dict"])
def test_the_pipeline_is_asked_by_a_training_step(asks):
    """Where stages run as one, they have other micro-batches by then."""

    class Asking(Seeing):
        before = True

        def training_step(self, batch, batch_idx):
            pipe = self.trainer.strategy.pipeline
            if self.before and pipe is not None:
                getattr(pipe, asks)()
            loss = super().training_step(batch, batch_idx)
            if not self.before:
                getattr(pipe, asks)()
            return loss

    alike("cerebras", kind=Asking) if asks != "drain" else None
    Asking.before = False
    with pytest.raises(RuntimeError, match=r"has gone forward; .*\(under Lightning, ask in on_train_batch_end\)"):
        fitted("cerebras", vectorize=True, kind=Asking)


class Operator(Seeing):
    """Calls one of torch.ops itself, from which no other Python code may be gone on with."""

    linear = staticmethod(torch.ops.aten.linear)

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(6, dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        loss = mse_loss(self.model(self.linear(batch[0], self.weight)), batch[1])
        self.losses.append(loss.detach())
        return loss


def test_a_step_that_begins_with_an_operator(monkeypatch):
    with pytest.raises(ValueError, match=r"one of torch\.ops, .*; use torch\.nn\.functional, or vectorize=False and"):
        fitted("pb", vectorize=True, kind=Operator)
    wanted, _ = fitted("pb", vectorize=False, kind=Operator)  # a cure
    found, how = fitted("pb", vectorize="auto", kind=Operator)
    assert how.vectorized == {"all stages": "stage by stage: the first that training_step calls is one of torch.ops"}
    same(found.losses, wanted.losses)
    monkeypatch.setattr(Operator, "linear", staticmethod(torch.nn.functional.linear))  # the other
    same(fitted("pb", vectorize=True, kind=Operator)[0].losses, wanted.losses)


def test_without_greenlet():
    code = "import sys; sys.modules['greenlet'] = None; import pipeback.lightning"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert "pipeback.lightning needs greenlet: pip install 'pipeback[lightning]'" in done.stderr


def test_hooks_of_the_model():
    """Its call in training_step runs them, for every slice, and with what they return."""

    def hooked():
        found = model()
        found.register_forward_pre_hook(lambda module, given: (0.5 * given[0],))
        found.register_forward_hook(lambda module, given, output: 2 * output)
        return found

    alike("pb", kind=lambda: Seeing(hooked))
