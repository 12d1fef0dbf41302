"""PipelineMonitor tells what happened, through plain self.log, and changes nothing."""

import csv
import math
from functools import partial

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from pipeback.lightning import PipelineMonitor
from tests.lightning.cases import Regression, loader, strategy, trainer, weights
from tests.lightning.ranks import fit


def rows(folder):
    with open(folder / "metrics.csv") as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


def watched(tmp_path, method="pb", size=None, every=None, **options):
    logger = CSVLogger(tmp_path, name="", version="")
    run = trainer(
        strategy(method, micro_batch_size=size), logger=logger, log_every_n_steps=6, max_epochs=4,
        callbacks=[PipelineMonitor(every)], **options,
    )  # fmt: skip
    module = Regression()
    run.fit(module, loader(), loader(2))
    return module, run, rows(tmp_path)


def test_values(tmp_path):
    _, run, found = watched(tmp_path)
    last = [row for row in found if "pipeback/throughput" in row][-1]
    assert [last[f"pipeback/delay/stage_0{s}"] for s in range(5)] == run.strategy.pipeline.delays == [8, 6, 4, 2, 0]
    gaps = [last[f"pipeback/gap/stage_0{s}"] for s in range(5)]
    assert gaps[4] == 0 and all(gap > 0 for gap in gaps[:4])
    assert all(last[f"pipeback/update_norm/stage_0{s}"] > 0 for s in range(5))
    assert all(last[f"pipeback/clip_share/stage_0{s}"] == 0 for s in range(5))
    assert last["pipeback/throughput"] > 0 and 0 < last["pipeback/utilisation"] < 1
    assert last["pipeback/weight_copies"] == 1 and last["pipeback/state_copies"] == 0
    assert last["pipeback/activation_mb"] == pytest.approx(run.strategy.pipeline.memory().activations / 1e6)
    assert not any(math.isnan(v) for v in last.values())
    first = next(row for row in found if "pipeback/throughput" in row)
    assert "pipeback/gap/stage_00" not in first  # no backward of stage 0 has come in six batches: nothing is made up


def test_it_changes_nothing(tmp_path):
    for method, size in (("pb", None), ("cerebras", 1), ("pipedream", None), ("pipedream", 2)):
        quiet = Regression()
        trainer(strategy(method, micro_batch_size=size), max_epochs=4).fit(quiet, loader(), loader(2))
        module, *_ = watched(tmp_path / f"{method}{size}", method, size)
        assert torch.equal(weights(quiet), weights(module))


def test_clip_share(tmp_path):
    _, _, found = watched(tmp_path, gradient_clip_val=1e-6)
    shares = [row["pipeback/clip_share/stage_02"] for row in found if "pipeback/clip_share/stage_02" in row]
    assert shares[-1] == 1


def test_every_n_steps(tmp_path):
    _, _, found = watched(tmp_path, every=12)
    speeds = {row["step"]: row["pipeback/throughput"] for row in found if "pipeback/throughput" in row}
    assert list(speeds) == [11, 23, 35, 47]  # and no old value in between
    assert len(set(speeds.values())) == 4


@pytest.mark.parametrize(("method", "copies"), [("pipedream", 1 + (4 + 3 + 2 + 1) / 5), ("cerebras", 2)])
def test_copies(method, copies, tmp_path):
    _, _, found = watched(tmp_path, method)
    assert [r for r in found if "pipeback/weight_copies" in r][-1]["pipeback/weight_copies"] == pytest.approx(copies)


def monitored(folder):
    """Every second batch, over two ranks."""
    logger = CSVLogger(folder, name="", version="")
    options = dict(logger=logger, log_every_n_steps=6, max_epochs=4, callbacks=[PipelineMonitor()])
    fit("cerebras", 2, val=partial(loader, 2), gradient_clip_val=0.05, **options)


def test_two_ranks_tell_what_one_device_does(tmp_path, crew):
    """Speed apart: memory, delays, gaps, norms and shares are those of the same micro-batches."""
    crew.ranks(2).run(monitored, tmp_path / "two")
    _, _, wanted = watched(tmp_path / "one", "cerebras", gradient_clip_val=0.05)
    found = rows(tmp_path / "two")
    kinds = {name for row in found for name in row if name.startswith("pipeback/")}
    assert kinds == {name for row in wanted for name in row if name.startswith("pipeback/")} - {"pipeback/utilisation"}
    final, last = ([r for r in some if "pipeback/throughput" in r][-1] for some in (found, wanted))
    for name in kinds - {"pipeback/throughput"}:
        kind = name.split("/")[1]
        if kind == "gap":  # a rank follows the next micro-batch that comes to it, which need not be the same
            assert (final[name] > 0) == (last[name] > 0), name
        elif kind == "activation_mb":  # five inputs of stage 2, of 3 x 6 numbers, lie at both ranks
            assert final[name] == pytest.approx(last[name] + 5 * 3 * 6 * 4 / 1e6), name
        else:
            assert final[name] == pytest.approx(last[name]), name
