"""Law: fit with a store is fit without one, bit for bit; a batch of a flush costs two passes over the weights."""

import copy
import threading
from functools import partial
from itertools import product

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn.functional import mse_loss

from pipeback import Pipeline
from pipeback.errors import StoreError
from pipeback.lightning import PipelineMonitor, PipelineStrategy, SaveWeights
from pipeback.streaming import disk_store
from pipeback.streaming.disk_store import DiskStore
from pipeback.streaming.store import HostStore
from tests.choice import mostly_rare, rare
from tests.laws.cases import CASES, STAGES, network
from tests.lightning import ranks
from tests.lightning.cases import Regression, loader, strategy, trainer, weights
from tests.lightning.test_monitor import rows

STORES = {
    "host": lambda folder: "host",
    "host-3": lambda folder: HostStore(prefetch=3),
    "disk": lambda folder: f"disk:{folder / 'a'}",
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(disk_store, "SMALL", 1)  # these networks are small


def fitted(store=None, method="gpipe", size=None, module=Regression, data=loader, val=None, seed=7, **options):
    pl.seed_everything(seed, verbose=False)
    found = module()
    run = trainer(strategy(method, micro_batch_size=size, store=store), **options)
    run.fit(found, data(), None if val is None else val())
    return run, found


def same(found, wanted):
    assert torch.equal(weights(found), weights(wanted))
    assert torch.equal(torch.stack(found.losses), torch.stack(wanted.losses))


@pytest.mark.parametrize(("case", "size"), mostly_rare(
    product(CASES, (None, 2)),
    ("gpipe", 2), ("one_f_one_b-3", 2), ("pb", None), ("pb-slack1", 2), ("pipedream-vertical", 2),
    ("pipedream_2bw", None), ("pipemare-t3", 2), ("spectrain-v2", None), ("lwp-weight+sc", None),
))  # fmt: skip
def test_streamed_is_resident(case, size, tmp_path):
    data = lambda: loader(samples=5)  # noqa: E731
    _, wanted = fitted(None, CASES[case](STAGES), size, data=data)
    for name, store in STORES.items():
        run, found = fitted(store(tmp_path), CASES[case](STAGES), size, data=data, val=lambda: loader(2))
        same(found, wanted)
        if name == "host":
            assert run.strategy.pipeline.traffic().peak_stages == 2


@pytest.mark.parametrize(
    ("method", "size"), [("gpipe", 3), ("one_f_one_b", 1), rare("gpipe", 1), rare("one_f_one_b", 3)]
)
def test_a_batch_is_two_passes_over_the_weights(method, size):
    """Though it is cut into many micro-batches: one pass forward, one backward, and each gradient leaves once."""
    batches = 2 * 12
    for store in ("host", HostStore(prefetch=0)):
        run, found = fitted(store, method, size, data=lambda: loader(samples=8))
        same(found, fitted(None, method, size, data=lambda: loader(samples=8))[1])
        one = sum(p.numel() * p.element_size() for p in found.parameters())
        traffic = run.strategy.pipeline.traffic()
        lines = sum(-(-p.numel() * p.element_size() // 64) * 64 for p in found.parameters())  # as they lie in memory
        assert one * batches < traffic.weights_in <= 2 * lines * batches
        assert traffic.gradients_out == one * batches and traffic.sums_in == 0
        assert traffic.fetches <= batches * 2 * STAGES


@pytest.mark.parametrize(("method", "accumulate", "size"), mostly_rare(
    ((method, *row) for method in ("gpipe", "one_f_one_b", "pipedream_2bw") for row in ((2, None), (5, 1), (5, 2))),
    ("gpipe", 2, None), ("one_f_one_b", 5, 2), ("pipedream_2bw", 5, 1),
))  # fmt: skip
def test_accumulation(method, accumulate, size, tmp_path):
    """With 5, the last flush of an epoch is short."""
    accumulate = 6 if method == "pipedream_2bw" else accumulate
    options = {"accumulate_grad_batches": accumulate, "data": lambda: loader(samples=4)}
    _, wanted = fitted(None, method, size, **options)
    for store in STORES.values():
        same(fitted(store(tmp_path), method, size, **options)[1], wanted)


def test_a_flush_that_ends_within_a_batch():
    """gpipe with a flush of four on batches of five slices: not all may go forward together, and none does."""
    options = {"data": lambda: loader(samples=5)}
    _, wanted = fitted(None, CASES["gpipe-4"](STAGES), 1, **options)
    same(fitted("host", CASES["gpipe-4"](STAGES), 1, **options)[1], wanted)


class Drawing(Regression):
    """Random layers, batch statistics, and random numbers of training_step's own."""

    def __init__(self, where="after"):
        super().__init__(ranks.drawing())
        self.where = where

    def training_step(self, batch, batch_idx):
        x, y = batch
        if self.where == "before":
            x = x + 0.1 * torch.randn_like(x)
        output = self.model(x)
        if self.where == "after":
            output = nn.functional.dropout(output, 0.3)
        loss = mse_loss(output, y)
        self.losses.append(loss.detach())
        return loss


@pytest.mark.filterwarnings("ignore:.*takes its statistics")
@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize(("method", "size"), [("gpipe", 4), ("cerebras", None), ("pb", 4)])
def test_random_numbers_and_batch_statistics(where, method, size):
    module, data = (lambda: Drawing(where)), (lambda: loader(samples=8))
    _, wanted = fitted(None, method, size, module, data)
    same(fitted("host", method, size, module, data)[1], wanted)


@pytest.mark.filterwarnings("ignore:.*takes its statistics")
def test_logs_metrics_and_outputs(tmp_path):
    """Of `Whole`, which logs in every way, before and after it calls the model."""
    found = []
    for name, store in (("resident", None), ("streamed", "host")):
        logger = CSVLogger(tmp_path / name, name="", version="")
        module, data = (lambda: ranks.Whole()), (lambda: loader(samples=8))
        run, made = fitted(
            store, "gpipe", 3, module, data, lambda: loader(3, samples=4), logger=logger, log_every_n_steps=1
        )
        found.append((weights(made), dict(run.callback_metrics), (tmp_path / name / "metrics.csv").read_text()))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:] and "train/error_step" in found[0][2]


@pytest.mark.parametrize("precision", ["bf16-true", "64-true", "bf16-mixed"])
@pytest.mark.parametrize(("method", "size"), [("gpipe", 2), ("pipedream", None)])
def test_precision(precision, method, size):
    """Types and casts are those of each training_step, in the forwards of all slices and after them."""

    class Typed(Regression):
        def training_step(self, batch, batch_idx):
            before = torch.get_default_dtype(), torch.is_autocast_enabled("cpu")
            loss = super().training_step(batch, batch_idx) * torch.tensor(1.0)
            assert before == (torch.get_default_dtype(), torch.is_autocast_enabled("cpu"))
            assert precision != "bf16-true" or torch.ones(1).dtype == torch.bfloat16
            return loss

    options = {"precision": precision, "data": lambda: loader(samples=5), "module": Typed}
    _, wanted = fitted(None, method, size, **options)
    same(fitted("host", method, size, **options)[1], wanted)
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping(algorithm):
    options = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm}
    for method, size in (("pb", None), ("gpipe", 1)):
        same(fitted("host", method, size, **options)[1], fitted(None, method, size, **options)[1])


# -- training_step, suspended ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda m, x, y: x.sum().requires_grad_(), "did not call self.model"),
        (lambda m, x, y: m.model(x).sum() + m.model(x).sum(), "called self.model twice"),
        (lambda m, x, y: [m.model(x), None][1], "returned no loss"),
        (lambda m, x, y: m.model(x, x).sum(), "2 positional"),
        (lambda m, x, y: m.model(x.clone().requires_grad_()).sum(), "requires a gradient"),
    ],
)
def test_a_training_step_that_is_not_one(step, message):
    class Odd(Regression):
        def training_step(self, batch, batch_idx):
            return step(self, *batch)

    with pytest.raises((ValueError, TypeError), match=message):
        fitted("host", size=1, module=Odd)
    assert not [t for t in threading.enumerate() if t.name == "pipeback call"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_error_in_training_step(when):
    """It comes to the caller with its traceback; the other slices clean up."""
    cleaned = []

    class Failing(Regression):
        def training_step(self, batch, batch_idx):
            x, y = batch
            try:
                if when == "before" and len(self.losses) == 0 and float(x[0, 0]) == second:
                    raise KeyError("mine")
                output = self.model(x)
                if float(x[0, 0]) == second:
                    raise KeyError("mine")
                return mse_loss(output, y)
            finally:
                cleaned.append(1)

    second = float(next(iter(loader()))[0][1, 0])
    with pytest.raises(KeyError, match="mine") as caught:
        fitted("host", size=1, module=Failing)
    assert "training_step" in [entry.name for entry in caught.traceback]
    assert len(cleaned) == (2 if when == "before" else 3)
    assert not [t for t in threading.enumerate() if t.name == "pipeback call"]


def test_a_call_without_gradients_within_training_step():
    class Looking(Regression):
        def training_step(self, batch, batch_idx):
            with torch.no_grad():
                before = mse_loss(self.model(batch[0]), batch[1])
            loss = super().training_step(batch, batch_idx)
            assert torch.equal(before, loss)
            return loss

    for method, size in (("gpipe", 1), ("gpipe", None), ("sgd", None)):
        same(fitted("host", method, size, Looking)[1], fitted(None, method, size, Looking)[1])


def test_gradients_outside_of_training_step():
    class Odd(pl.Callback):
        def on_train_batch_end(self, trainer, module, *rest):
            module.model(torch.ones(1, 6))

    with pytest.raises(RuntimeError, match="outside of training_step; its stages live in a store"):
        fitted("host", callbacks=[Odd()])


def test_a_backward_that_is_skipped():
    """As without a store: the last slice falls, those before it count."""

    class Sometimes(Regression):
        def backward(self, loss, *args, **kwargs):
            if len(self.losses) % 2:
                super().backward(loss, *args, **kwargs)

    for size in (1, None):
        same(fitted("host", size=size, module=Sometimes)[1], fitted(None, size=size, module=Sometimes)[1])


# -- checkpoints and evaluation ----------------------------------------------------------------------------------------


def saved(folder):
    return sorted(folder.glob("*.ckpt"), key=lambda file: int(file.stem.split("-")[-1]))


def checkpoints(folder):
    return ModelCheckpoint(
        folder, save_top_k=-1, every_n_train_steps=5, filename="{step}", auto_insert_metric_name=False
    )


def equal(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a, b) if torch.is_tensor(a) else a == b


@pytest.mark.parametrize(("method", "size"), [("pb", None), ("cerebras", 1), rare("pipedream", None), rare("gpipe", 1)])
def test_checkpoints_are_those_without_a_store(method, size, tmp_path):
    """Weights, the optimizer's state and what is in flight; one resumes from the other, and plain Lightning from it."""

    def fit(store, folder=None, ckpt=None):
        pl.seed_everything(7, verbose=False)
        module = Regression(optimizer="momentum")
        callbacks = [checkpoints(folder)] if folder else []
        run = trainer(
            strategy(method, micro_batch_size=size, store=store), callbacks=callbacks,
            enable_checkpointing=bool(callbacks),
        )  # fmt: skip
        run.fit(module, torch.utils.data.DataLoader(loader().dataset, batch_size=3), ckpt_path=ckpt)
        return run, module

    _, wanted = fit(None, tmp_path / "resident")
    resident = saved(tmp_path / "resident")
    for name, store in STORES.items():
        run, found = fit(store(tmp_path), tmp_path / name)
        same(found, wanted)
        assert len(resident) == len(saved(tmp_path / name)) == 4
        for ours, theirs in zip(saved(tmp_path / name), resident, strict=True):
            ours, theirs = torch.load(ours, weights_only=True), torch.load(theirs, weights_only=True)
            assert equal(ours["state_dict"], theirs["state_dict"])
            assert equal(ours["optimizer_states"], theirs["optimizer_states"])
            here, there = ours["pipeback"]["state"], theirs["pipeback"]["state"]
            assert equal(here["stages"], there["stages"]) and here["plain"]["loops"] == there["plain"]["loops"]
        run.save_checkpoint(tmp_path / f"{name}-after.ckpt")
        after = torch.load(tmp_path / f"{name}-after.ckpt", weights_only=True)
        assert equal(after["state_dict"], dict(found.state_dict())) and "pipeback" in after
        plain = Regression(network(seed=99))
        plain.load_state_dict(after["state_dict"])
        assert torch.equal(weights(plain), weights(found))
        if method == "pb":
            with pytest.warns(UserWarning, match="dataloader is not resumable"):
                for ckpt, where in ((resident[1], store(tmp_path)), (saved(tmp_path / name)[1], None)):
                    _, first = fit(None, ckpt=ckpt)
                    _, second = fit(where, ckpt=ckpt)
                    assert torch.equal(weights(first), weights(second))


@pytest.mark.parametrize("store", STORES)
def test_resumed_is_uninterrupted(store, tmp_path):
    """From an epoch's end, with micro-batches in flight."""

    def fit(folder, seed=0, ckpt=None, epochs=3):
        module = Regression(network(seed=seed), optimizer="momentum")
        saving = ModelCheckpoint(tmp_path / folder, save_top_k=-1, filename="{epoch}", auto_insert_metric_name=False)
        run = trainer(
            strategy("cerebras", store=STORES[store](tmp_path / folder)), callbacks=[saving], max_epochs=epochs,
            enable_checkpointing=True,
        )  # fmt: skip
        run.fit(module, loader(), loader(2), ckpt_path=ckpt)
        return module

    whole = fit("whole")
    for epoch in (0, 1):
        resumed = fit(f"again-{epoch}", seed=99, ckpt=tmp_path / "whole" / f"{epoch}.ckpt")
        assert torch.equal(weights(whole), weights(resumed))


class Predicting(Regression):
    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        return self.model(batch[0])


@pytest.mark.parametrize("store", STORES)
def test_validate_test_and_predict(store, tmp_path):
    """Before a fit, within it, and after it."""
    seen = []
    for where in (None, STORES[store](tmp_path)):
        module = Predicting()
        run = trainer(strategy("cerebras", store=where), val_check_interval=0.25, num_sanity_val_steps=1)
        mine = []
        for _ in range(2):
            mine += [run.validate(module, loader(2), verbose=False), run.test(module, loader(2), verbose=False)]
            mine += [run.predict(module, loader(2)), module.model(torch.ones(2, 6)).detach()]
            run.fit(module, loader(), loader(2))
            mine += [dict(run.callback_metrics), weights(module)]
        seen.append(mine)
    assert equal(*seen)


@pytest.mark.parametrize("store", STORES)
def test_after_a_failure_the_module_has_its_weights(store, tmp_path):
    class Fails(nn.Tanh):
        left = 17

        def forward(self, x):
            Fails.left -= 1
            if not Fails.left:
                raise OSError("mine")
            return super().forward(x)

    model = nn.Sequential(*network(), Fails())
    module, before = Regression(model), weights(model)
    with pytest.raises(RuntimeError, match="stage 5 .* the forward failed: mine"):
        trainer(strategy("pb", store=STORES[store](tmp_path))).fit(module, loader())
    found = weights(module)
    assert torch.isfinite(found).all() and not torch.equal(found, before)
    fitted(STORES[store](tmp_path))  # its folder is free again


# -- the monitor -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "size"),
    [("cerebras", 1), ("pipedream", None), rare("pb", None), rare("spectrain", None), rare("gpipe", 1)],
)
def test_the_monitor_sees_the_same_numbers(method, size, tmp_path):
    found = []
    for name in ("resident", *STORES):
        store = STORES[name](tmp_path) if name in STORES else None
        logger = CSVLogger(tmp_path / name, name="", version="")
        run, _ = fitted(
            store, method, size, logger=logger, log_every_n_steps=6, max_epochs=4, gradient_clip_val=0.05,
            callbacks=[PipelineMonitor()],
        )  # fmt: skip
        found.append([row for row in rows(tmp_path / name) if "pipeback/throughput" in row])
        if store == "host":
            last = found[-1][-1]
            assert last["pipeback/peak_stages"] == 2 and 0 <= last["pipeback/stall_share"] < 1
            total = sum(row["pipeback/streamed_mb"] for row in found[-1])
            traffic = run.strategy.pipeline.traffic()
            assert 0 < 1e6 * total <= traffic.weights_in + traffic.gradients_out + traffic.sums_in
    resident, *streamed = found
    kinds = ("delay", "gap", "update_norm", "clip_share", "activation_mb")
    names = [name for name in resident[-1] if name.startswith("pipeback/") and name.split("/")[1] in kinds]
    assert len(names) == 4 * STAGES + 1
    for some in streamed:
        for row, wanted in zip(some, resident, strict=True):
            assert [row.get(name) for name in names] == [wanted.get(name) for name in names]


def test_a_monitor_that_keeps_no_copy(tmp_path):
    logger = CSVLogger(tmp_path, name="", version="")
    monitor = PipelineMonitor(follow=False)
    run, _ = fitted("host", "pb", logger=logger, log_every_n_steps=6, callbacks=[monitor], gradient_clip_val=0.05)
    last = rows(tmp_path)[-1]
    assert {"pipeback/throughput", "pipeback/stall_share", "pipeback/update_norm/stage_00"} <= set(last)
    assert not any(name.startswith(("pipeback/gap", "pipeback/delay")) for name in last)
    assert run.strategy.pipeline.memory().copies == 1


# -- bad input ---------------------------------------------------------------------------------------------------------


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
    refused("store must be None, 'host', 'disk:FOLDER', a HostStore or a DiskStore, but is int", 3)
    committed = DiskStore(tmp_path / "own")
    fitted(committed)
    refused("own holds a committed version .*give fit a checkpoint", f"disk:{tmp_path / 'own'}")
    refused("own holds a committed version .*give fit a checkpoint", committed)


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


# -- names and several devices -----------------------------------------------------------------------------------------


def test_the_name_is_registered():
    module = Regression()
    run = trainer("pipeback_streaming")
    assert isinstance(run.strategy, PipelineStrategy)
    run.fit(module, loader())
    assert run.strategy.pipeline.traffic().fetches
    same(module, fitted(None)[1])


DEVICES = {
    "pb": dict(method="pb", gradient_clip_val=0.1),
    "cerebras, everything random": dict(
        method="cerebras", module=ranks.Whole, data=partial(ranks.shuffled, samples=8),
        val=partial(loader, 3, samples=4),
    ),
    "gpipe, slices": dict(
        method="gpipe", given={"micro_batch_size": 2}, data=partial(loader, samples=5), val=partial(loader, 2)
    ),
    "gpipe, everything random": dict(
        method="gpipe", given={"micro_batch_size": 4}, module=ranks.Whole, data=partial(loader, samples=8),
        precision="bf16-true",
    ),
    "gpipe, accumulated slices": dict(
        method="one_f_one_b", given={"micro_batch_size": 2}, data=partial(loader, samples=5), accumulate_grad_batches=5
    ),
}  # fmt: skip


def streamed(store, folder, **options):
    """Results, what a checkpoint holds, and bytes of weights that were copied."""
    given = {**options.pop("given", {}), "store": store}
    run, module = ranks.fit(devices=2, given=given, callbacks=[Bytes()], **options)
    run.save_checkpoint(folder / "two.ckpt")
    return ranks.outcome(run, module), run.callbacks[0].traffic


class Bytes(pl.Callback):
    def on_train_end(self, trainer, module):
        self.traffic = trainer.strategy.pipeline.traffic()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", mostly_rare(DEVICES, "pb", "gpipe, slices"))
def test_devices_stream_their_own_stages(case, tmp_path, crew):
    options = DEVICES[case]
    run, module = ranks.fit(devices=1, **options)
    wanted = ranks.outcome(run, module)
    run.save_checkpoint(tmp_path / "one.ckpt")
    one = torch.load(tmp_path / "one.ckpt", weights_only=True)
    for store in ("host", f"disk:{tmp_path}"):
        for found, traffic in crew.ranks(2).run(streamed, store, tmp_path, **options):
            assert ranks.differences(found, wanted) == []
            assert traffic.peak_stages == 2
        two = torch.load(tmp_path / "two.ckpt", weights_only=True)
        assert equal(one["state_dict"], two["state_dict"])
        assert equal(one["optimizer_states"], two["optimizer_states"])
        if case == "gpipe, slices":
            assert traffic.fetches <= 24 * 2 * STAGES


class Early(Regression):
    """Asks the model before it trains it, or after it."""

    late = False

    def look(self, x):
        self.model.eval()
        with torch.no_grad():
            self.log("seen", self.model(x).sum())
        self.model.train()

    def training_step(self, batch, batch_idx):
        if not self.late:
            self.look(batch[0])
        loss = super().training_step(batch, batch_idx)
        if self.late:
            self.look(batch[0])
        return loss


class Late(Early):
    late = True


@pytest.mark.filterwarnings("ignore")
def test_devices_and_a_call_without_gradients(crew):
    options = dict(method="gpipe", given={"micro_batch_size": 1, "store": "host"})
    for module in (Early, Late):
        wanted = ranks.result(devices=1, module=module, **options)
        resident = ranks.result(devices=1, module=module, **{**options, "given": {"micro_batch_size": 1}})
        assert ranks.differences(wanted, resident) == []
        crew.ranks(2).start(ranks.result, devices=2, module=module, **options)
        for rank, found in enumerate(crew.results()):
            if module is Early:
                assert ranks.differences(found, wanted) == [], rank
            else:
                assert isinstance(found, RuntimeError) and "call it before" in str(found)
    crew.again()


# -- models that are never in memory as a whole --------------------------------------------------------------------


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


@pytest.mark.parametrize("store", ["host", "disk"])
@pytest.mark.parametrize("method", ["gpipe", "cerebras"])
def test_a_model_from_the_meta_device(store, method, tmp_path):
    wanted, found, saved = present(), absent(), tmp_path / "saved"
    trainer(strategy(method)).fit(wanted, loader())
    run = trainer(strategy(method, store=STORES[store](tmp_path)), callbacks=[SaveWeights(saved)])
    run.fit(found, loader(), loader(2))
    assert torch.equal(torch.stack(found.losses), torch.stack(wanted.losses))
    assert any(p.is_meta for p in found.parameters()) == (store == "disk")

    # what was saved is what was trained, and begins another fit
    again = absent()
    begin = strategy("gpipe", store="host", init=saved)
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
    fit("init gives values", module=present, store="host", init=lambda module: None)
