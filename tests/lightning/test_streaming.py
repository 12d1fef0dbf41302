"""Law: fit with a store is fit without one, bit for bit; a batch of a flush costs two passes over the weights."""

from functools import partial
from itertools import product

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn.functional import mse_loss

from pipeback.lightning import PipelineMonitor
from pipeback.streaming.store import HostStore
from tests.helpers.choice import mostly_rare, rare
from tests.laws.cases import CASES, STAGES, usual
from tests.lightning import ranks
from tests.lightning.cases import Regression, loader, weights
from tests.lightning.streamed import STORES, fitted, same
from tests.lightning.test_monitor import rows

pytestmark = pytest.mark.usefixtures("small")


@pytest.mark.parametrize(("case", "size"), mostly_rare(
    product(CASES, (None, 2)),
    ("gpipe", 2), ("pb", None), ("pipedream-vertical", 2), ("pipedream_2bw", None), ("lwp-weight+sc", None),
))  # fmt: skip
def test_streamed_is_resident(case, size, tmp_path):
    data = lambda: loader(samples=5)  # noqa: E731
    module = partial(Regression, optimizer=usual(CASES[case](STAGES)))
    _, wanted = fitted(None, CASES[case](STAGES), size, module, data=data)
    for name, store in STORES.items():
        run, found = fitted(store(tmp_path), CASES[case](STAGES), size, module, data=data, val=lambda: loader(2))
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
@pytest.mark.parametrize(
    ("where", "method", "size"),
    mostly_rare(
        [(where, *row) for where in ("before", "after") for row in (("gpipe", 4), ("cerebras", None), ("pb", 4))],
        ("before", "gpipe", 4), ("after", "cerebras", None), ("before", "pb", 4),
    ),
)  # fmt: skip
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


class Reading(Regression):
    """Reads a weight in validation, once something was trained."""

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            with self.trainer.strategy.pipeline.shown():
                self.hook = self.model[0][0].weight.detach().clone()

    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking:
            with self.trainer.strategy.pipeline.shown():
                self.step = self.model[0][0].weight.detach().clone()
        return super().validation_step(batch, batch_idx)


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_weights_are_read_in_validation(kind, tmp_path):
    given = {"method": "pb", "module": Reading, "val": loader}
    (_, found), (_, wanted) = fitted(STORES[kind](tmp_path), **given), fitted(**given)
    assert torch.equal(found.step, wanted.step)
    assert torch.equal(found.hook, wanted.hook)
    same(found, wanted)
