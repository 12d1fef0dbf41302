"""Law: under Lightning, stages that run as one train what the event loop trains: weights after every batch, losses and
logs, to rounding, with schedulers, clipping, accumulation, callbacks and checkpoints in flight.
"""

import copy
import re
import warnings
from functools import partial
from itertools import product

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import OneCycleLR
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import MeanSquaredError

from pipeback.lightning import PipelineMonitor
from pipeback.vectorized.stacks import whole_cost
from tests.helpers.choice import mostly_rare, rare
from tests.laws.as_one import S, model, same
from tests.laws.cases import CASES, STEADY, allowed
from tests.lightning.cases import DataLoader, Regression, TensorDataset, dataset, strategy, trainer

pytestmark = pytest.mark.filterwarnings("ignore:an update is of", "ignore:.*takes its statistics")
QUICK = ["pipedream", "spectrain", "pipemare", "lwp-weight", "gpipe-4", "one_f_one_b-3", "pipedream_2bw", "sgd"]
BATCHES = 5


class Seeing(Regression):
    """Sees its weights after every batch, as they are there."""

    def __init__(self, build=model, **options):
        super().__init__(build(), **options)
        self.after = []

    def on_train_batch_end(self, *_):
        self.after.append(torch.cat([p.detach().flatten() for p in self.parameters()]))


class Logged(pl.Callback):
    """What is logged, and how often hooks are called."""

    def __init__(self):
        self.values, self.calls = [], []

    def on_train_batch_end(self, trainer, *_):
        self.values.append({k: float(v) for k, v in trainer.callback_metrics.items()})
        self.calls.append("batch")

    def on_train_epoch_end(self, trainer, *_):
        self.values.append({k: float(v) for k, v in trainer.callback_metrics.items()})
        self.calls.append("epoch")


def doubled(samples=9, batches=BATCHES):
    found = dataset(batches, samples)
    return StatefulDataLoader(TensorDataset(*(t.double() for t in found.tensors)), batch_size=samples)


def fitted(case, vectorize, size=2, kind=Seeing, seed=3, data=None, ckpt=None, where=None, **options):
    """The module after two epochs of batches of nine samples: slices of two, and one of one."""
    pl.seed_everything(seed, verbose=False)
    module = kind()
    how = strategy(CASES[case](S), micro_batch_size=size, vectorize=vectorize, **(where or {}))
    trainer(how, **options).fit(module, data or doubled(), ckpt_path=ckpt)
    return module, how


def alike(case, kind=Seeing, as_one=True, **options):
    """Fit both, and compare weights after every batch and at the end, and losses."""
    wanted, _ = fitted(case, False, kind=kind, **options)
    found, how = fitted(case, True, kind=kind, **options)
    told = " ".join(how.vectorized.values())
    assert ("as one" in told) == as_one, told
    assert len(found.after) == len(wanted.after) > 0 and len(found.losses) == len(wanted.losses)
    same([*found.after, *found.parameters()], [*wanted.after, *wanted.parameters()])
    same(found.losses, wanted.losses)
    return found, wanted


@pytest.mark.parametrize(
    ("case", "size"),
    mostly_rare(product(STEADY, (1, 2, 4)), *((case, 2) for case in QUICK[::2]), ("pb", 1), ("cerebras", 4)),
)
def test_every_method_is_the_event_loop(case, size):
    optimizer = next(name for name in ("momentum", "sgd", "adamw") if allowed(case, name))
    alike(case, kind=lambda: Seeing(optimizer=optimizer), size=size)


@pytest.mark.parametrize(("case", "size"), mostly_rare(product(STEADY, (1, 2)), ("cerebras", 1), ("gpipe-4", 2)))
def test_threads(case, size):
    """Each as one over its own stages; but for methods whose workers have several parts of the model."""
    optimizer = next(name for name in ("momentum", "sgd", "adamw") if allowed(case, name))
    kind, whole = partial(Seeing, optimizer=optimizer), CASES[case](S).chunks == 1
    wanted, _ = fitted(case, False, size, kind)
    found, how = fitted(case, True if whole else "auto", size, kind, where={"workers": 2})
    assert set(how.pipeline.owner) == {0, 1}
    told = "as one|as a graph" if whole else "every worker has several parts of the model"
    assert re.search(told, " ".join(how.vectorized.values()))
    same([*found.after, *found.losses], [*wanted.after, *wanted.losses])


@pytest.mark.parametrize("case", [rare("pb"), rare("pipedream"), "gpipe"])
def test_adam(case):
    alike(case, kind=lambda: Seeing(optimizer="adamw"))


@pytest.mark.parametrize("case", [rare("cerebras"), "pb-slack1"])
def test_schedulers_by_step(case):
    rates = lambda o: {"scheduler": OneCycleLR(o, 0.05, total_steps=2 * BATCHES), "interval": "step"}  # noqa: E731
    alike(case, kind=lambda: Seeing(scheduler=rates))


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping(algorithm):
    alike("pb", gradient_clip_val=0.01, gradient_clip_algorithm=algorithm)


@pytest.mark.parametrize("case", [rare("gpipe"), "one_f_one_b"])
def test_accumulation(case):
    """Of five batches two and two, and a last one."""
    alike(case, accumulate_grad_batches=2)


def test_logs_and_calls_of_several_callbacks():
    class Measuring(Seeing):
        def __init__(self):
            super().__init__()
            self.error = MeanSquaredError()

        def training_step(self, batch, batch_idx):
            x, y = batch
            output = self.model(x)
            self.error(output, y)
            self.log("train/error", self.error, on_step=True, on_epoch=True, batch_size=len(x))
            loss = mse_loss(output, y)
            self.log_dict({"loss": loss, "first": y[0, 0]}, on_step=True, on_epoch=True, batch_size=len(x))
            self.losses.append(loss.detach())
            return {"loss": loss, "output": output.detach()}

    found = [(Logged(), Logged()) for _ in range(2)]
    for logged, vectorize in zip(found, (False, True), strict=True):
        fitted("pb", vectorize, kind=Measuring, callbacks=list(logged))
    for wanted, mine in zip(*found, strict=True):
        assert mine.calls == wanted.calls
        for a, b in zip(mine.values, wanted.values, strict=True):
            assert a == pytest.approx(b, rel=1e-10, abs=1e-10)


def test_weights_that_are_averaged():
    """A callback that reads all weights after every batch."""
    found, wanted = (fitted("pb", vectorize, callbacks=[WeightAveraging()])[0] for vectorize in (True, False))
    same(list(found.parameters()), list(wanted.parameters()))


def test_what_is_drawn():
    """In training_step before and after its call, and in stages."""

    class Drawing(Seeing):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return super().training_step((x + 0.1 * torch.randn_like(x), y), batch_idx)

    def build():
        return nn.Sequential(*model()[:-1], nn.Dropout(0.3), model()[-1])

    alike("pb", kind=lambda: Drawing(build))


class Called(nn.Module):
    """A network whose forward is its own."""

    def __init__(self):
        super().__init__()
        self.body = model()

    def forward(self, x, *, scale):
        for module in self.body:
            x = module(x)
        return {"output": scale * x}


@pytest.mark.parametrize("case", [rare("pb"), "pipedream"])
def test_a_traced_model(case):
    class Tracing(Seeing):
        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = mse_loss(self.model(x, scale=2.0)["output"], y)
            self.losses.append(loss.detach())
            return loss

    alike(case, kind=lambda: Tracing(Called), where={"stages": [f"body.{n}" for n in range(1, S)]})


def test_a_call_without_gradients_within_a_flush():
    """No update lies between the slices of a batch, so that it sees the weights of its time."""

    class Looking(Seeing):
        def training_step(self, batch, batch_idx):
            with torch.no_grad():
                self.losses.append(self.model(batch[0]).sum())
            return super().training_step(batch, batch_idx)

    found, wanted = (fitted("gpipe", vectorize, kind=Looking)[0] for vectorize in (True, False))
    same(sorted(found.losses), sorted(wanted.losses))


@pytest.mark.parametrize(
    ("case", "other"),
    [
        ("pipedream", True), ("gpipe-4", False), rare("pb", True), rare("cerebras", False),
        rare("pb", False), rare("cerebras", True), rare("pipedream", False), rare("gpipe-4", True),
    ],
)  # fmt: skip
def test_a_checkpoint_in_flight(case, other, tmp_path):
    """It goes on as if nothing had been in between; saved as one, it goes on as one."""
    keep = ModelCheckpoint(
        tmp_path, save_top_k=-1, every_n_train_steps=3, filename="{step}", auto_insert_metric_name=False
    )
    whole, _ = fitted(case, other, enable_checkpointing=True, callbacks=[keep])
    again, _ = fitted(case, True, ckpt=tmp_path / "3.ckpt", seed=11)
    assert len(again.after) == 2 * BATCHES - 3
    same([*again.after, *again.parameters()], [*whole.after[3:], *whole.parameters()])


@pytest.mark.parametrize("case", [rare("gpipe-4"), "spectrain"])
def test_a_checkpoint_in_flight_of_threads(case, tmp_path):
    keep = ModelCheckpoint(tmp_path, every_n_train_steps=3, filename="{step}", auto_insert_metric_name=False)
    where = {"workers": 2}
    whole, _ = fitted(case, True, enable_checkpointing=True, callbacks=[keep], where=where, max_epochs=1)
    again, _ = fitted(case, True, ckpt=tmp_path / "3.ckpt", seed=11, where=where, max_epochs=1)
    same([*again.after, *again.parameters()], [*whole.after[3:], *whole.parameters()])


def test_drained_before_every_validation():
    class Validated(Seeing):
        def validation_step(self, batch, batch_idx):
            x, y = batch
            self.losses.append(mse_loss(self.model(x), y))

    def run(vectorize):
        module = Validated()
        how = strategy("pb", micro_batch_size=2, vectorize=vectorize, drain="validation")
        trainer(how, val_check_interval=2).fit(module, doubled(), doubled(batches=2))
        return module

    found, wanted = run(True), run(False)
    same([*found.after, *found.losses], [*wanted.after, *wanted.losses])


@pytest.mark.parametrize("case", [rare("cerebras"), "pipedream"])
def test_a_monitor_measures_the_same(case):
    class Kept(pl.Callback):
        def __init__(self):
            self.values = []

        def on_train_batch_end(self, trainer, *_):
            measured = ("delay", "gap", "update_norm")
            found = {k: float(v) for k, v in trainer.logged_metrics.items() if k.split("/")[1] in measured}
            self.values.append(found)

    found = [Kept() for _ in range(2)]
    for kept, vectorize in zip(found, (False, True), strict=True):
        callbacks = [PipelineMonitor(every_n_steps=3), kept]
        fitted(case, vectorize, callbacks=callbacks, data=doubled(batches=12), log_every_n_steps=1)
    assert max(len(values) for values in found[0].values) > S
    for a, b in zip(*(kept.values for kept in found), strict=True):
        assert a == pytest.approx(b, rel=1e-9, abs=1e-9)


# -- what runs one by one ----------------------------------------------------------------------------------------------


def hook(name):
    kind = type("Looking", (Seeing,), {name: lambda self, *args: getattr(Seeing, name)(self, *args)})
    return kind


@pytest.mark.parametrize("name", ["on_after_backward", "on_before_optimizer_step", "backward", "on_before_zero_grad"])
def test_hooks_amid_a_step_see_what_they_would(name):
    kind, told = hook(name), rf"Looking.{name} may look at gradients or weights amid a step; leave that hook out"
    wanted, _ = fitted("pb", False, kind=kind)
    found, how = fitted("pb", "auto", kind=kind)
    assert how.vectorized == {"all stages": f"stage by stage: {told}"}
    assert all(map(torch.equal, found.after, wanted.after))
    with pytest.raises(ValueError, match=rf'vectorize=True: {told}, or vectorize="auto"'):
        fitted("pb", True, kind=kind)


def test_a_callback_amid_a_step():
    class Norms(pl.Callback):
        def on_before_optimizer_step(self, *_):
            pass

    _, how = fitted("pb", "auto", callbacks=[Norms()])
    assert "Norms.on_before_optimizer_step may look" in how.vectorized["all stages"]


@pytest.mark.parametrize(
    ("options", "more", "told"),
    [
        ({"activations": "host"}, {}, "activations='host' does not go with stages as one; use activations='device'"),
    ],
)
def test_options_that_do_not_go_with_it(options, more, told):
    def run(vectorize):
        how = strategy("pb", micro_batch_size=2, vectorize=vectorize, **options)
        data = DataLoader(dataset(2, 4), batch_size=4)
        trainer(how, max_epochs=1, **more).fit(Regression(model(torch.float32)), data)
        return how

    assert re.search(told, run("auto").vectorized["all stages"])
    with pytest.raises(ValueError, match=f'vectorize=True: {told}.*, or vectorize="auto"'):
        run(True)


@pytest.mark.parametrize(("case", "size", "gain"), [("sgd", 1, 3.0), ("pb", None, 1.4)])
def test_auto_leaves_what_gains_nothing(case, size, gain, monkeypatch):
    """With one micro-batch a batch, each would go forward through the stages alone."""
    monkeypatch.setattr(whole_cost, "gain", lambda stack, under, whole: gain)
    wanted, _ = fitted(case, False, size)
    found, how = fitted(case, "auto", size)
    assert all(told.startswith("stage by stage") for told in how.vectorized.values()) and how.vectorized
    assert all(map(torch.equal, found.after, wanted.after))


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda m, x, y: x.sum().requires_grad_(), "did not call self.model"),
        (lambda m, x, y: m.model(x).sum() + m.model(x).sum(), "called self.model twice"),
        (lambda m, x, y: [m.model(x), None][1], "returned no loss"),
        (lambda m, x, y: m.model(x.clone().requires_grad_()).sum(), "requires a gradient"),
        (lambda m, x, y: [m.model(x), x.sum().requires_grad_()][1], "does not depend on the output"),
    ],
)
def test_a_training_step_that_is_not_one(step, message):
    class Odd(Seeing):
        def training_step(self, batch, batch_idx):
            return step(self, *batch)

    with pytest.raises(ValueError, match=message):
        fitted("pb", True, kind=Odd)


@pytest.mark.parametrize("workers", [None, 2])
def test_an_error_in_training_step(workers):
    """It comes to the caller with its traceback, and the other slices clean up."""
    cleaned = []

    class Failing(Seeing):
        def training_step(self, batch, batch_idx):
            try:
                loss = super().training_step(batch, batch_idx)
                if len(self.losses) == 8:
                    raise KeyError("mine")
                return loss
            finally:
                cleaned.append(1)

    with pytest.raises(KeyError, match="mine") as caught:
        fitted("pb", True, kind=Failing, where={"workers": workers})
    assert "training_step" in [entry.name for entry in caught.traceback]
    assert len(cleaned) == 10


@pytest.mark.parametrize("workers", [None, 2])
def test_a_loss_that_depends_on_nothing(workers):
    class Skipping(Seeing):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss if len(self.losses) != 7 else torch.zeros((), dtype=torch.float64, requires_grad=True)

    with pytest.raises(ValueError, match="micro-batch 6: the loss depends on no output.*vectorize=False"):
        fitted("pb", True, kind=Skipping, where={"workers": workers})
    fitted("pb", False, kind=Skipping, where={"workers": workers})


def test_the_option():
    with pytest.raises(ValueError, match='CUDA graphs need a GPU, but this fit is on cpu; use .*, or vectorize="auto"'):
        fitted("pb", "cuda_graph")
    with pytest.raises(ValueError, match='are of one thread, but workers=2; use workers=None, or vectorize="auto"'):
        fitted("pb", "cuda_graph", where={"workers": 2})
    with pytest.raises(ValueError, match=r'vectorize must be True, False, "auto" or "cuda_graph", but is 3'):
        strategy(vectorize=3)
    with warnings.catch_warnings():
        assert copy.copy(strategy(vectorize="auto").options).vectorize == "auto"
