"""The report: numbers by hand, the same from every source, and what is said where something is missing or wrong."""

import csv
import io
import re
import shlex
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest

pytest.importorskip("hydra")
pytest.importorskip("matplotlib")

from pipeback.recipes import report
from pipeback.recipes.reports.runs import SAMPLES, gather
from pipeback.recipes.reports.sources import Run
from tests.recipes.reporting import runs
from tests.recipes.synthetic import facts, rows, write


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
        for name in (
            "samples_seen",
            "step",
            "wall_time",
            "training_loss",
            "mean_gap",
            "final",
            "target",
            "cost",
            "gap",
            "delay",
            "schedules",
        )
    }
    assert files == pictures | {"tables.md", "curves.csv", "stages.csv"} | {
        f"{name}.csv" for name in ("methods", "equal_delay", "target", "cost")
    }  # fmt: skip
    for name in pictures:
        assert (folder / "a page_files" / name).read_bytes().startswith(b"\x89PNG")
    stages = list(csv.DictReader((folder / "a page_files" / "stages.csv").read_text().splitlines()))
    assert len(stages) == 6 * 4 * 4 and stages[-1]["stage"] == "3" and float(stages[-4]["gap"]) == 0.75
    assert sorted(p.name for p in folder.iterdir()) == ["a page.html", "a page_files", ODD]  # no clutter
    tables = (folder / "a page_files" / "tables.md").read_text("utf-8")
    assert tables.startswith(f"```shell\npipeback report {shlex.quote(ODD)} ")
    assert (
        "\n```\n\nMeasured on 2026-11-22 at commit 0123abc (version 0.1.0), on a machine, 2 cores, torch 2.15.0, "
        "Python 3.11.7, intra-op threads per process: 1.\n\n## Every method at its own delay\n" in tables
    )


def test_page_is_self_contained(compared):
    page = (compared[0] / "a page.html").read_text()
    assert page.count("data:image/png;base64,") == 4 * 3  # heat maps and schedules, wide and narrow, light and dark
    assert page.count('class="plot"') == 3 * 3 and page.count('class="rows"') == 1 + 2 + 3
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
    assert page.count("data:image/png;base64,") == 4  # schedules
    assert page.count('class="plot"') == 1 and page.count('class="rows"') == 2  # over steps; the end, time to target
    for why in ("no run logged samples_seen", "no run logged wall_time", "no run logged pipeback/gap/stage_00",
                "no run logged train/loss",
                "no run logged its throughput"):  # fmt: skip
        assert f"Not shown: {why}" in page
    assert "version_0" in page and "Options that differ" not in page


def test_forty_runs(tmp_path):
    names = ("sgd", "pb", "sc", "lwp", "cerebras", "pipedream", "gpipe", "damped")
    methods = runs(*((name, [[0.1 * n, 0.5, 0.8] for n in range(5)]) for name in names))
    assert [m.label for m in methods] == list(names) and sum(len(m.runs) for m in methods) == 40
    from matplotlib import pyplot as plt

    from pipeback.recipes.reports.histories import histories
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
    figure = draw_curves(methods, histories(methods)[0], SAMPLES, paint)
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
    assert code == 0 and "target=null" in said and "-o both.html" in said


@pytest.mark.soak
def test_schedules_of_compared_methods_only_and_losses_beside_accuracy(tmp_path):
    for method in ("pb", "spectrain"):
        write(tmp_path / method, facts(method), rows([0.5, 0.8], gaps=[0.4, 0.2]))
    write(tmp_path / "sgd", facts("sgd"), rows([0.5, 0.9], monitor=False))
    code, _, complained = command(tmp_path, cwd=tmp_path)
    assert code == 0, complained
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert re.findall(r"<h3>(slack .*?|gpipe.*?|one_f.*?):", page) == ["slack 1 (spectrain)", "slack 2 (pb)"]
    with open(tmp_path / "report_files" / "methods.csv", encoding="utf-8") as file:
        table = {row["method"]: row for row in csv.DictReader(file)}
    assert float(table["pb"]["training loss"]) == pytest.approx(0.3)
    assert float(table["pb"]["gap at the end"]) == pytest.approx(0.15) and table["sgd"]["gap at the end"] == ""


def test_a_page_is_dark_where_the_reader_wants_it_and_tables_say_that_they_scroll(compared):
    page = (compared[0] / "a page.html").read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in page and "color-scheme: light dark" in page
    light = page.partition("</style>")[0].partition("@media (prefers-color-scheme: dark)")[0]
    assert not re.search(r"[ ;{](color|background): #", light)  # only named colours, which the dark scheme changes
    assert "no-repeat local" in page
