"""The report: numbers by hand, the same from every source, and what is said where something is missing or wrong."""

import csv
import io
import math
import sys
from contextlib import redirect_stderr, redirect_stdout
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("hydra")
pytest.importorskip("matplotlib")

from pipeback.recipes import report
from pipeback.recipes.reports import curves, heat_maps, wandb_runs
from pipeback.recipes.reports.metric import Metric, mean_and_deviation, spread
from pipeback.recipes.reports.runs import SAMPLES, SECONDS, STEPS, gather
from pipeback.recipes.reports.sources import Run, read
from pipeback.recipes.reports.summary import divergence, glance, lead, unfinished
from pipeback.recipes.reports.tables import differences, tables
from pipeback.recipes.reports.target import reference, target
from tests.recipes.synthetic import facts, rows, write


def runs(*groups):
    """(method, values of every seed) -> methods"""
    return gather([Run(facts(name, seed), rows(values), {}, f"{name}{seed}")
                   for name, seeds in groups for seed, values in enumerate(seeds)])  # fmt: skip


def command(*arguments, cwd):
    """`pipeback report` in this process: code, what it printed, what it complained of."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(cwd)
        patch.setattr(sys, "argv", ["pipeback report", *map(str, arguments)])
        try:
            report.main()
        except SystemExit as end:
            code = end.code
    return code, out.getvalue(), err.getvalue()


# --- numbers


def test_mean_and_spread():
    assert mean_and_deviation([3.0]) == (3.0, None)
    assert mean_and_deviation([0.1, 0.1, 0.1]) == (0.1, 0.0)
    assert mean_and_deviation([1.0, 2.0, 6.0]) == (3.0, pytest.approx(math.sqrt(7)))
    assert spread([0.90, 0.94], ".1f", 100) == "92.0 ±2.8"
    assert spread([], ".1f") == "–"
    assert spread([30_000.0, 50_000.0], ".2f") == "4e+04 ±1e+04"


def test_table_holds_hand_computed_numbers():
    # 320 samples an epoch, validated every 160: the second value is epoch 1, the fourth epoch 2
    by_hand = {name: [[0.5, *v[:1], 0.8, *v[1:]] for v in values] for name, values in
               {"sgd": [(0.90, 0.96), (0.94, 0.98)], "pb": [(0.70, 0.90), (0.80, 0.94)]}.items()}  # fmt: skip
    methods = gather([Run(facts(name, seed), rows(values, every=5), {}, f"{name}{seed}")
                      for name, seeds in by_hand.items() for seed, values in enumerate(seeds)])  # fmt: skip
    found = {table.name: table for table in tables(methods, target(methods))}
    assert [" ".join(name.split()) for name in found["methods"].head] == [
        "method", "update size", "D at stage 0", "accuracy % epoch 1", "accuracy % epoch 2", "held-out loss"
    ]  # fmt: skip
    assert found["methods"].rows == [
        ["sgd", "1", "0", "92.0 ±2.8", "97.0 ±1.4", "0.30 ±0.00"],
        ["pb", "1", "6", "75.0 ±7.1", "92.0 ±2.8", "0.30 ±0.00"],
    ]
    numbers = dict(zip(found["methods"].numbers[0], found["methods"].numbers[2], strict=True))
    assert numbers["method"] == "pb" and numbers["runs"] == 2
    assert numbers["accuracy % epoch 1"] == pytest.approx(75)
    assert numbers["accuracy % epoch 1 deviation"] == pytest.approx(math.sqrt(50))
    assert found["cost"].rows[0] == ["sgd", "100 ±0", "90 ±0", "2", "0", "0.5", "1.3"]


def test_time_to_target_by_hand():
    methods = runs(("sgd", [[0.5, 0.8, 0.9, 1.0]]), ("pb", [[0.1, 0.95, 0.8, 1.0], [0.1, 0.2, 0.96, 1.0], [0.1] * 4]))
    goal = target(methods)
    assert goal == (pytest.approx(0.95), "5 % short of what sgd reaches in the end")
    sgd, pb = methods
    assert sgd.first(0.95) == [39]
    # 32 samples a batch, a validation every 10 batches, 100 samples a second: the first measurement at 95 % counts
    assert pb.until(0.95, SAMPLES) == [640, 960] and pb.until(0.95, SECONDS) == [6.4, 9.6]
    assert pb.until(0.95, STEPS) == [19, 29]
    (table,) = [t for t in tables(methods, goal) if t.name == "target"]
    assert table.title == "Time to 95.0 %"
    assert table.rows == [
        ["sgd", "1 of 1", "1,280", "39", "12.8"],
        ["pb", "2 of 3", "800 ±226", "24 ±7", "8.0 ±2.3"],
    ]
    assert target(methods, "90%").value == target(methods, 0.9).value == pytest.approx(0.9)


def test_curve_is_the_mean_over_seeds():
    a = Run(facts("pb", 0), rows([0.2, 0.4, 0.6], rate=100.0), {}, "a")
    b = Run(facts("pb", 1), rows([0.4, 0.8, 0.6], rate=50.0), {}, "b")
    c = Run(facts("pb", 2), rows([0.5], every=20), {}, "c")  # measured elsewhere: adds to the one point that it has
    (m,) = gather([a, b])
    assert m.curve(SAMPLES).x == [320, 640, 960] and m.curve(STEPS).x == [9, 19, 29]
    assert m.curve(SAMPLES).mean == pytest.approx([0.3, 0.6, 0.6])
    assert m.curve(SECONDS).x == pytest.approx([4.8, 9.6, 14.4])  # 3.2 and 6.4 seconds a validation
    (m,) = gather([a, b, c])
    assert m.curve(SAMPLES).values == [[0.2, 0.4], pytest.approx([0.4, 0.8, 0.5]), [0.6, 0.6]]


def test_the_drained_measurement_replaces_the_one_before_it():
    logged = rows([0.4, 0.6])
    again = {**logged[-1], "step": 20, "val/accuracy": 0.7}  # measured once more, a step but no sample later
    (m,) = gather([Run(facts("pb"), [*logged, again], {}, "a")])
    assert m.held_out == [[(9, 0.4), (20, 0.7)]] and m.after(2) == m.finals == [0.7]


def test_divergence_is_counted_and_kept_out_of_the_means():
    methods = runs(("sgd", [[0.9, 0.9]]), ("pb", [[0.9, 0.8], [0.9, math.nan]]), ("sc", [[math.nan, 0.1]]))
    _, pb, sc = methods
    assert (pb.diverged, sc.diverged) == ([False, True], [True])
    assert pb.finals == [0.8] and pb.fate == "" and sc.fate == "diverged"
    assert pb.curve(STEPS).values == [[0.9, 0.9], [0.8]]  # a run counts until it diverges
    assert divergence(methods) == "2 of 4 runs (pb 1 of 2, sc 1 of 1)"
    table = tables(methods, None)[0]
    assert table.head[-1] == "runs\ndiverged" and [row[-1] for row in table.rows] == ["0 of 1", "1 of 2", "1 of 1"]
    assert "diverged" in table.rows[2]


def test_a_loss_above_guessing_is_unstable():
    (m,) = gather([Run(facts("pb"), rows([0.1, 0.1], loss=5.0), {}, "a")])
    assert m.fate == "unstable" and "†" in tables([m], None)[0].rows[0][0]
    (m,) = gather([Run(facts("pb", classes=None), rows([0.1, 0.1], loss=5.0), {}, "a")])
    assert m.fate == ""  # what guessing costs is not known


def test_perplexity_is_better_when_lower():
    def lm(name, values):
        named = facts(name, metric="val/perplexity", mode="min", classes=None, epochs=3)
        return Run(named, rows(values, column="val/perplexity"), {}, name)

    methods = gather([lm("sgd", [40.0, 20.0, 10.0]), lm("pb", [50.0, 10.4, 12.0]), lm("sc", [9.0, 30.0, 11.0])])
    goal = target(methods)
    assert goal.value == pytest.approx(10.5)
    assert [m.first(goal.value) for m in methods] == [[29], [19], [9]]
    assert glance(methods, goal)["Best perplexity at the end"] == "sgd, 10.00"
    assert tables(methods, goal)[0].head[5] == "perplexity\nepoch 3" and tables(methods, goal)[0].rows[0][5] == "10.00"
    assert target(methods, 12).value == 12.0
    assert reference(methods).label == "sgd" and reference(methods[1:]).label == "sc"


def test_metric_reads_and_writes_values():
    accuracy, bleu = Metric("val/accuracy"), Metric("val/bleu")
    assert (accuracy.text(0.971), bleu.text(23.456), Metric("val/perplexity", "min").text(5.0)) == (
        "97.1 %",
        "23.5",
        "5.00",
    )
    assert (accuracy.parse("97.5 %"), accuracy.parse(1), bleu.parse("23.5")) == (0.975, 1.0, 23.5)
    for metric, text in ((accuracy, "high"), (accuracy, "90"), (accuracy, "nan"), (bleu, "20%")):
        with pytest.raises(ValueError, match="target"):
            metric.parse(text)


def test_runs_of_one_name_that_differ_stay_apart():
    def run(seed, lr, config=True):
        chosen = {"seed": seed, "out": f"x{seed}", "optimizer": {"lr": lr}, "data": {"root": f"d{seed}"}}
        return Run(
            facts("pb", seed, optimizer={"lr": lr / 32}), rows([0.5 + lr]), chosen if config else {}, f"{seed}{lr}"
        )

    methods = gather([run(0, 0.1), run(1, 0.1), run(0, 0.2)])
    assert [(m.label, len(m.runs), m.base) for m in methods] == [("pb lr=0.1", 2, "pb"), ("pb lr=0.2", 1, "pb")]
    methods = gather([run(0, 0.1), run(1, 0.1), run(0, 0.2, config=False)])  # then by what is known of all: the facts
    assert [m.label for m in methods] == ["pb lr=0.003125", "pb lr=0.00625"]
    methods = gather([Run(facts("pb", experiment=name), rows([0.5]), {}, name) for name in ("digits", "cifar10")])
    assert [m.label for m in methods] == ["pb, cifar10", "pb, digits"]


def test_options_that_differ():
    def run(name, seed, **more):
        config = {"seed": seed, "model": {"depth": 3}, "optimizer": {"lr": 0.1}, "trainer": {"strategy": {"x": name}}}
        return Run(facts(name, seed, **more), rows([0.5]), config, f"{name}{seed}")

    flush = {"method_options": {"name": "gpipe", "micro_batches": 8}, "optimizer": {"name": "SGD", "lr": 0.1}}
    methods = gather([run("sgd", 0), run("sgd", 1), run("gpipe", 0, **flush), run("gpipe", 1, **flush)])
    table = differences(methods)
    assert table.head == ["method", "options", "optimizer.lr", "optimizer.momentum"]
    assert table.rows == [["sgd", "–", "0.003", "0.997"], ["gpipe", "micro_batches=8", "0.1", "–"]]
    assert differences(methods[:1]) is None


def test_equal_delay_has_its_own_table():
    methods = runs(("sgd", [[0.9]]), ("pb", [[0.8]]), ("pipedream", [[0.8]]), ("pipedream_slack2", [[0.7]]))
    found = {table.name: [row[0] for row in table.rows] for table in tables(methods, None)}
    assert found["methods"] == ["sgd", "pb", "pipedream"]
    assert found["equal_delay"] == ["sgd", "pb", "pipedream_slack2"]


def test_heat_map_is_the_mean_over_seeds():
    a, b = (
        [Run(facts("pb", n), rows([0.5, 0.5], gaps=gaps), {}, str(n))]
        for n, gaps in enumerate([[4.0, 2.0, 0.0], [2.0, 2.0, 0.0]])
    )
    (m,) = gather([*a, *b])
    found = heat_maps.field(m, "gap")
    assert list(found.steps) == [9, 19]
    np.testing.assert_allclose(found.values, [[3.0, 1.5], [2.0, 1.0], [0.0, 0.0]])
    assert heat_maps.field(m, "clip_share") is None
    fresh = gather([Run(facts("sgd"), rows([0.5], gaps=[0.0, 0.0]), {}, "s")])
    assert heat_maps.fields([m, *fresh], "gap")[1] == ["sgd"]


def test_summary_sentences():
    methods = runs(("sgd", [[0.5, 0.9, 0.96]]), ("pb", [[0.5, 0.95, 0.97], [0.5, 0.95]]))
    assert lead(methods) == "2 methods, 4 stages, 320 training samples, 2 epochs, 1 to 2 seeds"
    assert glance(methods, target(methods)) == {
        "Best accuracy at the end": "sgd, 96.0 %",
        "Fewest samples to 91.2 %": "pb, 640 samples",
        "Least time to 91.2 %": "pb, 6.4 s",
        "Diverged": "none of 3 runs",
    }
    assert unfinished(methods) == ["a run of pb ended after 640 of 960 samples"]


def test_the_order_of_the_folders_does_not_matter(tmp_path):
    for name, seed in (("a", 1), ("b", 0), ("c", 10), ("d", 2)):
        write(tmp_path / name, facts("pb", seed), rows((0.3, 0.5, 0.8, 0.9 + seed / 1000)))
    (method,) = gather(read([tmp_path])[0])
    assert [run.facts["seed"] for run in method.runs] == [0, 1, 2, 10]


# --- sources


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


# --- the page and the command


ODD = "seed=0, it's [a]"  # the name of a folder, which Hydra's grammar would not take as it is


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    for name, values in {
        "sgd": (0.6, 0.8, 0.9, 0.96),
        "pb": (0.3, 0.5, 0.8, 0.9),
        "pipedream_slack2": (0.4, 0.5, 0.8, 0.85),
    }.items():
        for seed in (0, 1):
            values = [v - 0.01 * seed for v in values]
            gaps = [0.0] * 4 if name == "sgd" else [3.0, 2.0, 1.0, 0.0]
            config = {"name": "digits", "seed": seed, "model": {"name": "residual_mlp", "depth": 3}}
            write(folder / ODD / f"{name}-seed{seed}", facts(name, seed), rows(values, gaps=gaps, every=5), config)
    code, said, complained = command(ODD, "-o", "a page.html", "title='Again & again'", "target=80%", cwd=folder)
    assert code == 0, complained
    return folder, said


def test_report_writes_page_pictures_and_numbers(compared):
    folder, said = compared
    assert "Every method at its own delay" in said and "At equal delay" in said and "Time to 80.0 %" in said
    files = {file.name for file in (folder / "a page_files").iterdir()}
    pictures = {
        f"{name}.png"
        for name in ("samples_seen", "step", "wall_time", "final", "target", "cost", "gap", "delay", "schedules")
    }
    assert files == pictures | {"tables.md", "curves.csv", "stages.csv"} | {
        f"{name}.csv" for name in ("methods", "equal_delay", "target", "cost")
    }  # fmt: skip
    for name in pictures:
        assert (folder / "a page_files" / name).read_bytes().startswith(b"\x89PNG")
    stages = list(csv.DictReader((folder / "a page_files" / "stages.csv").read_text().splitlines()))
    assert len(stages) == 6 * 4 * 4 and stages[-1]["stage"] == "3" and float(stages[-4]["gap"]) == 0.75
    assert sorted(p.name for p in folder.iterdir()) == ["a page.html", "a page_files", ODD]  # no clutter


def test_page_is_self_contained(compared):
    page = (compared[0] / "a page.html").read_text()
    assert page.count("data:image/png;base64,") == 2 * 9  # wide and narrow
    assert 'src="http' not in page and "href=" not in page and "<script" not in page and "@import" not in page
    for text in ("<h1>Again &amp; again</h1>", "a machine, 2 cores", "2.15.0", "6 runs in seed=0, it&#39;s [a]",
                 "depth: 3", "pipeback report &#39;seed=0", "Zero throughout, and not drawn: sgd",
                 "none of 6 runs", "Time to 80.0 %"):  # fmt: skip
        assert text in page, text


def test_one_run_without_monitor_or_facts(tmp_path):
    """A run of some other Lightning program: what there is is shown, what is not is told."""
    plain = [{k: v for k, v in row.items() if k in ("step", "epoch", "val/accuracy", "val/loss")}
             for row in rows([0.5, 0.7], monitor=False)]  # fmt: skip
    write(tmp_path / "version_0", {"lr": 0.1}, plain)
    code, _, complained = command(tmp_path / "version_0", cwd=tmp_path)
    assert code == 0, complained
    page = (tmp_path / "version_0" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2 * 4  # over steps, at the end, time to target, schedules
    for why in ("no run logged samples_seen", "no run logged wall_time", "no run logged pipeback/gap/stage_00",
                "no run logged its throughput"):  # fmt: skip
        assert f"Not shown: {why}" in page
    assert "version_0" in page and "Options that differ" not in page


def test_forty_runs(tmp_path):
    names = ("sgd", "pb", "sc", "lwp", "cerebras", "pipedream", "gpipe", "damped")
    methods = runs(*((name, [[0.1 * n, 0.5, 0.8] for n in range(5)]) for name in names))
    assert [m.label for m in methods] == list(names) and sum(len(m.runs) for m in methods) == 40
    from matplotlib import pyplot as plt

    from pipeback.recipes.reports.plots import draw_curves
    from pipeback.recipes.reports.style import Paint

    paint = Paint(methods)
    assert list(paint.shown) == [
        "Spike compensation, weight prediction", "Stashing, prediction, rescheduling", "Update size above one",
        "Other methods",
    ]  # fmt: skip
    for panel in paint.shown.values():
        assert [m.label for m in panel][:2] == ["sgd", "pb"]
        assert len({paint.of[m.label] for m in panel}) == len(panel)
    figure = draw_curves(methods, SAMPLES, paint, narrow=False)
    assert [len(ax.lines) for ax in figure.axes] == [5, 3, 3, 3]
    plt.close(figure)


def test_many_variants_in_one_panel_look_different():
    from pipeback.recipes.reports.style import Paint

    methods = gather([Run(facts("pb", optimizer={"lr": lr}), rows([0.5]), {}, str(lr)) for lr in range(20)])
    assert len(set(Paint(methods).of.values())) == 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "which runs?"),
        (["nowhere"], "there is no folder nowhere"),
        (["empty"], "there are no runs in empty: neither metrics.csv"),
        (["file.txt"], "file.txt is not a run: give the folder"),
        (["words"], "line 3 holds what is not a number"),
        (["nostep"], "has no step"),
        (["torn"], "hparams.yaml cannot be read as YAML"),
        (["silent"], "nothing was logged in any run of silent"),
        (["unmeasured"], "no held-out value (val/...) was logged"),
        (["good", "perplexity"], "different metrics (val/accuracy in good; val/perplexity in perplexity)"),
        (["good", "target=high"], "target must be a value of val/accuracy, such as 0.9 or 90%, but is 'high'"),
        (["good", "target=90"], "target=90: val/accuracy runs from 0 to 1"),
        (["good", "titel=x"], "did you mean 'title'?"),
        (["good", "-o"], "-o names no file"),
        (["good", "out=report.pdf"], "out must name a page, such as report.html"),
        (["good", "-o", "file.txt/x.html"], "file.txt"),
        (["wandb:me"], "write wandb:entity/project"),
        (["broken"], "is not an offline W&B run that can be read"),
    ],
)  # fmt: skip
def test_bad_input_reads_well(arguments, message, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("hello")
    write(tmp_path / "good", facts(), rows([0.5]))
    write(tmp_path / "perplexity", facts(metric="val/perplexity", mode="min"), rows([5.0], column="val/perplexity"))
    write(tmp_path / "silent", facts(), [])
    write(tmp_path / "unmeasured", facts(metric=None), [{"step": 0, "train/loss": 1.0}])
    write(tmp_path / "nostep", facts(), [{"val/accuracy": 1.0}])
    write(tmp_path / "words", facts(), [{"step": 0, "val/accuracy": 0.5}, {"step": 1, "val/accuracy": "high"}])
    write(tmp_path / "torn", facts(), rows([0.5]))
    (tmp_path / "torn" / "hparams.yaml").write_text("a: [1")
    if arguments == ["broken"]:
        pytest.importorskip("wandb")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run-abc.wandb").write_bytes(b"no records")
    before = sorted(tmp_path.rglob("*"))
    code, said, complained = command(*arguments, cwd=tmp_path)
    assert code == 2 and message in complained, complained
    assert "Traceback" not in complained and not said
    assert sorted(tmp_path.rglob("*")) == before


def test_help_tells_the_options(tmp_path):
    code, said, _ = command("--help", cwd=tmp_path)
    assert code == 0 and "target: null" in said and "-o both.html" in said
