"""Where a report reads runs from: CSV files, offline wandb and its API give the same numbers."""

import csv
import math
from functools import cache, partial
from types import SimpleNamespace

import pytest

pytest.importorskip("hydra")
pytest.importorskip("matplotlib")

from pipeback.recipes.reports import curves, wandb_runs
from pipeback.recipes.reports.runs import gather
from pipeback.recipes.reports.seeds import once
from pipeback.recipes.reports.sources import read
from pipeback.recipes.reports.summary import glance
from pipeback.recipes.reports.tables import tables
from pipeback.recipes.reports.target import target
from tests.recipes.synthetic import facts, rows, write


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """Two runs that Lightning logged to CSV and to offline W&B at once; and the same runs as the API would tell."""
    pytest.importorskip("wandb")
    lightning = pytest.importorskip("lightning.pytorch")
    import torch
    import wandb
    from lightning.pytorch.loggers import CSVLogger, WandbLogger

    class Task(lightning.LightningModule):
        def __init__(self, seed):
            super().__init__()
            self.layer, self.seed = torch.nn.Linear(1, 1), seed

        def training_step(self, batch, index):
            self.log("train/loss", 1.0 / (1 + index))
            for stage in range(2):
                self.log(f"pipeback/gap/stage_{stage:02}", 0.1 * (index + stage))
            self.log("pipeback/weight_copies", 2.0)
            return self.layer(batch).sum()

        def validation_step(self, batch, index):
            n = self.global_step
            self.log("val/accuracy", 1 - 1 / (n + 2 + self.seed))
            self.log("val/loss", math.nan if n > 4 and self.seed else 0.1 * n)
            self.log("samples_seen", 4.0 * n)
            self.log("wall_time", 0.3 * n)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    patch = pytest.MonkeyPatch()
    patch.setattr(wandb_runs, "inspect", cache(wandb_runs.inspect))  # two thirds of a second a run: once is enough
    root = tmp_path_factory.mktemp("logged")
    data = torch.utils.data.DataLoader(torch.ones(16, 1), batch_size=4)
    told = []
    for seed in (0, 1):
        known = facts("pb", seed, epoch_samples=16, batch_size=4, optimizer={"lr": 0.1, "weight_decay": 0.0})
        folder = root / "csv" / f"pb-seed{seed}"
        loggers = [CSVLogger(folder, name="", version=""), WandbLogger(save_dir=root / "offline", offline=True)]
        trainer = lightning.Trainer(
            max_epochs=2, logger=loggers, accelerator="cpu", enable_progress_bar=False, enable_checkpointing=False,
            enable_model_summary=False, num_sanity_val_steps=0, log_every_n_steps=1,
        )  # fmt: skip
        for logger in loggers:
            logger.log_hyperparams(known)
        trainer.fit(Task(seed), data, data)
        wandb.finish()
        told.append((known, folder))
    yield root, told
    patch.undo()


def test_csv_and_offline_wandb_give_the_same_numbers(logged, tmp_path):
    root, _ = logged
    found = {}
    for kind in ("csv", "offline"):
        methods = gather(read([root / kind])[0])
        (tmp_path / kind).mkdir()
        curves.save(methods, tmp_path / kind)
        files = {file.name: file.read_text() for file in (tmp_path / kind).iterdir()}
        found[kind] = (tables(methods, target(methods)), files, glance(methods, target(methods)))
    assert found["csv"] == found["offline"]
    sheets, files, _ = found["csv"]
    assert sheets[0].head[-1] == "runs\ndiverged" and sheets[0].rows[0][-1] == "1 of 2"
    assert len(files["curves.csv"].splitlines()) == 1 + 4  # two runs of two epochs
    assert len(files["stages.csv"].splitlines()) == 1 + 2 * 8 * 2


def test_a_run_found_twice_counts_once(logged):
    root, _ = logged
    kept, notes = read([root / "csv", root / "offline"])
    assert len(kept) == 2 and all("csv" in run.origin for run in kept)
    assert notes == ["2 runs found twice (same method, seed and numbers) counted once"]
    kept, notes = read([root / "csv" / "pb-seed0", root / "offline"])  # mixed: seed 1 is in W&B alone
    assert sorted(run.facts["seed"] for run in kept) == [0, 1] and len(notes) == 1
    (method,) = gather(kept)  # whole numbers that JSON made of 0.0 do not tell runs apart
    assert method.label == "pb" and len(method.runs) == 2


def test_offline_wandb_alone_is_read_whole(logged):
    root, told = logged
    kept, _ = read([root / "offline"])
    found = {run.facts["seed"]: run for run in kept}
    assert found[1].facts == told[1][0]
    assert found[1].values("samples_seen") == [(3.0, 16.0), (7.0, 32.0)]
    assert math.isnan(found[1].last("val/loss"))


def test_runs_of_the_api(logged, monkeypatch):
    """wandb.Api as far as it is used: .runs(path, filters) -> .config, .scan_history(), .name."""
    wandb = pytest.importorskip("wandb")
    root, told = logged
    asked = []

    def history(folder):
        for n, row in enumerate(csv.DictReader((folder / "metrics.csv").read_text().splitlines())):
            numbers = {name: float(cell) for name, cell in row.items() if cell}
            yield {"_step": n, "_runtime": 0.5, "trainer/global_step": numbers.pop("step"),
                   **{k: "NaN" if math.isnan(v) else v for k, v in numbers.items()}}  # fmt: skip

    class Api:
        def runs(self, path, filters):
            asked.append((path, filters))
            return [SimpleNamespace(config={**known, "_wandb": {}}, name=f"pb-s{known['seed']}",
                                    scan_history=partial(history, folder)) for known, folder in told]  # fmt: skip

    monkeypatch.setattr(wandb, "Api", Api)
    online, _ = read(["wandb:me/pipeback/digits"])
    local, _ = read([root / "csv"])
    assert asked == [("me/pipeback", {"group": "digits"})]
    assert [(run.facts, run.identity) for run in online] == [(run.facts, run.identity) for run in local]
    assert tables(gather(online), None)[0] == tables(gather(local), None)[0]
    assert len(read([root / "csv", "wandb:me/pipeback"])[0]) == 2 and asked[1] == ("me/pipeback", {})


def test_a_run_that_was_stopped_is_no_second_seed(tmp_path):
    """The same command, typed again after Ctrl-C, goes to a folder of its own, and the stopped run stays."""
    for name, values, progress in [
        ("pb-seed0", [0.1], "running"), ("pb-seed0-2", [0.5, 0.9], "finished"), ("pb-seed0-3", [0.5, 0.8], "finished"),
        ("pb-seed1", [0.4, 0.7], "finished"), ("sgd-seed0", [0.3], "running"), ("sc-seed0", [0.2], "running"),
        ("sc-seed0-2", [0.1], "diverged"),
    ]:  # fmt: skip
        method, seed = name.split("-")[0], int(name.split("-")[1][4:])
        folder = write(tmp_path / name, facts(method, seed), rows(values), {"model": {"depth": 3}, "seed": seed})
        (folder / "progress.json").write_text(f'{{"state": "{progress}", "loss": NaN}}')
    write(tmp_path / "alone", facts(seed=None), rows([0.5, 0.6]))
    kept, notes = once(read([tmp_path])[0])
    names = [run.origin.rpartition("/")[2] for run in kept]
    assert names == ["alone", "pb-seed0-2", "pb-seed1", "sc-seed0-2", "sgd-seed0"]
    first, again, sc = notes
    assert f"{tmp_path}/pb-seed0 did not end, and is left out: {tmp_path}/pb-seed0-2 is a run of the same" in first
    assert "pb-seed0-3 is left out" in again and "sc-seed0 did not end" in sc
