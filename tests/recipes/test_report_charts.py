"""The charts of the report: losses and gaps beside accuracy, with numbers under the mouse, legible light and dark."""

import re
from xml.etree import ElementTree

import pytest

pytest.importorskip("hydra")
pytest.importorskip("matplotlib")

import io

from rich.console import Console

from pipeback.recipes.report import report
from pipeback.recipes.reports.charts import groups
from pipeback.recipes.reports.histories import WINDOWS, averaged, gaps, histories, losses
from pipeback.recipes.reports.row_charts import bars, finals
from pipeback.recipes.reports.runs import SAMPLES, SECONDS, STEPS, gather
from pipeback.recipes.reports.scales import Scale, of_curves
from pipeback.recipes.reports.sources import Run
from pipeback.recipes.reports.style import COLOURS, DARK, ON_DARK, SPARE, Paint, contrast, on_dark
from tests.recipes.reporting import runs
from tests.recipes.synthetic import facts, rows, write


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    for name, probed in {"sgd": [0.0, 0.0], "pb": [0.4, 0.2], "gpipe": None}.items():
        for seed in (0, 1):
            logged = rows([0.5, 0.8 - 0.1 * seed], gaps=probed, monitor=probed is not None)
            write(folder / "runs" / f"{name}-seed{seed}", facts(name, seed), logged)
    report([folder / "runs"], folder / "report.html", Console(file=io.StringIO()))
    return (folder / "report.html").read_text(encoding="utf-8")


def charts_of(page, name):
    """title -> the figure of it, as parsed XML, of the group of charts with this id"""
    part = page.partition(f'<div id="{name}">')[2]
    figures = [ElementTree.fromstring(text) for text in re.findall(r'<figure class="chart">.*?</figure>', part, re.S)]
    return {figure.findtext("figcaption"): figure for figure in figures[:3]}


@pytest.mark.parametrize(
    ("name", "where"), [("samples_seen", "320 samples"), ("step", "step 9"), ("wall_time", "3.2 s")]
)
def test_losses_and_gaps_beside_accuracy_tell_their_numbers_to_the_mouse(page, name, where):
    found = charts_of(page, name)
    assert list(found) == ["Held-out accuracy", "Training loss", "Gap ‖w now − w used‖"]
    told = {title: [t.text for t in figure.iter("title")] for title, figure in found.items()}
    assert f"pb at {where}: held-out accuracy 50.0 % (50.0 % to 50.0 % over 2 seeds)" in told["Held-out accuracy"]
    assert any(text.endswith("held-out accuracy 75.0 % (70.0 % to 80.0 % over 2 seeds)")
               for text in told["Held-out accuracy"])  # fmt: skip
    assert f"pb at {where}: training loss 0.6 (0.6 to 0.6 over 2 seeds)" in told["Training loss"]
    gap = told["Gap ‖w now − w used‖"]
    assert f"pb at {where}: gap ‖w now − w used‖ 0.3 (0.3 to 0.3 over 2 seeds)" in gap
    assert not any("sgd" in text or "gpipe" in text for text in gap)
    notes = [note.text for note in found["Gap ‖w now − w used‖"].iter("p")]
    assert notes == ["Zero throughout: sgd.", "Not logged: gpipe."]
    for figure in found.values():  # the points lie on the lines, within the chart
        for place in figure.iter("circle"):
            assert all(-1 <= float(place.get(side).rstrip("%")) <= 101 for side in ("cx", "cy"))


def test_a_curve_that_no_run_logged_is_a_sentence(tmp_path):
    old = [{k: v for k, v in row.items() if not k.startswith(("train", "pipeback"))} for row in rows([0.5, 0.7])]
    write(tmp_path / "old", facts(), [row for row in old if "val/accuracy" in row])
    report([tmp_path / "old"], tmp_path / "report.html", Console(file=io.StringIO()))
    found = charts_of((tmp_path / "report.html").read_text(encoding="utf-8"), "samples_seen")
    assert [figure.find("svg") is None for figure in found.values()] == [False, True, True]
    assert [figure.findtext("p") for figure in found.values()] == [
        None,
        "Not shown: no run logged train/loss.",
        "Not shown: no run logged pipeback/gap/stage_00 and so on; "
        "the callback pipeback.lightning.PipelineMonitor does.",
    ]


def test_letters_have_one_scale_of_sizes_and_colours_hold_in_the_dark(page):
    style = page.partition("<style>")[2].partition("</style>")[0]
    sizes = set(re.findall(r"font-size: ([^;}]+)", style))
    assert sizes == {"var(--title)", "var(--head)", "var(--text)", "var(--small)", "inherit"}
    assert not re.search(r"font-size|<font|style=\"font", page.partition("</style>")[2])
    assert "font:" not in style
    light, dark = (dict(re.findall(r"--(c\d+): (#\w+);", part)) for part in style.split("prefers-color-scheme: dark"))
    assert len(light) == 3 and list(dark) == list(light)
    used = set(re.findall(r'class="(?:line |band )?(c\d+)', page))
    assert used == set(light)
    for colour in {*COLOURS.values(), *SPARE}:
        assert contrast(on_dark(colour), DARK) >= 3, colour
    assert len({on_dark(colour) for colour in COLOURS.values()}) == len(set(COLOURS.values()))
    assert f"--page: {DARK};" in style
    assert all(contrast(ON_DARK[name], DARK) >= 4.5 for name in ("text.color", "axes.labelcolor", "xtick.color"))
    for picture in re.findall("<picture>.*?</picture>", page, re.DOTALL):  # what is no line is drawn for the dark, too
        assert re.findall(r'media="(.*?)"', picture) == [
            "(prefers-color-scheme: dark) and (max-width: 700px)", "(prefers-color-scheme: dark)", "(max-width: 700px)"
        ]  # fmt: skip
        assert len(set(re.findall(r'(?:srcset|src)="(data:image/png;base64,[^"]+)"', picture))) == 4


def test_windows_average_what_is_logged_often():
    logged = [{"step": n, SAMPLES: 2.0 * n, "train/loss": float(n % 2), "val/accuracy": 0.5} for n in range(400)]
    (m,) = gather([Run(facts("pb"), logged, {}, "a")])
    curve = averaged(m, SAMPLES, losses)
    assert len(curve.x) == WINDOWS and curve.values == [[0.5]] * WINDOWS
    assert curve.x[0] == pytest.approx(2 * 4.5) and curve.x[-1] == pytest.approx(2 * 394.5)
    assert averaged(m, SECONDS, losses).x == [] and gaps(m.runs[0]) == []
    diverged = [*logged[:40], {"step": 40, "train/loss": float("nan")}, *logged[41:80]]
    (m,) = gather([Run(facts("pb"), diverged, {}, "a")])
    assert len(losses(m.runs[0])) == 40  # a run counts until it diverges


def test_a_line_goes_where_its_numbers_are():
    methods = runs(("sgd", [[0.5, 0.75, 1.0]]), ("pb", [[0.5, 0.5, 0.5], [0.5, 0.5, 0.7]]))
    (group,) = groups(methods, histories(methods), STEPS, Paint(methods))
    chart = group.charts[0]
    assert [(mark.text, mark.y) for mark in chart.left] == [
        ("50 %", 100.0), ("60 %", 80.0), ("70 %", 60.0), ("80 %", 40.0), ("90 %", 20.0), ("100 %", 0.0),
    ]  # fmt: skip
    sgd, pb = chart.lines
    assert sgd.places == "31.03,100.00 65.52,50.00 100.00,0.00" and sgd.band == ""
    assert pb.places.endswith("100.00,80.00") and "100.00,60.00" in pb.band
    assert [(p.x, p.y) for p in sgd.points] == [(31.03, 100.0), (65.52, 50.0), (100.0, 0.0)]


def test_scales_hold_what_matters():
    assert of_curves([], True) is None
    assert of_curves([[0.42, 0.9]], True) == (0.4, 1.0, False)
    assert of_curves([[9.0, 1.0, 1.0, 1.0, 1.0, 2.0]], False).high < 3 < 9 < of_curves([[9.0, 1.0]], False, True).high
    wide = of_curves([[0.01, 0.02, 5.0]], False)
    assert wide.logarithmic and wide.place(wide.low) == 0 and wide.place(wide.high) == pytest.approx(100)
    assert wide.place(0.0) < 0 and all(wide.holds(n) for n in wide.marks(5)) and len(wide.marks(5)) >= 2
    assert of_curves([[3.0, 3.0]], False).holds(3.0)
    assert Scale(0.0, 10.0).marks(5) == [0, 2, 4, 6, 8, 10]


def test_rows_are_sorted_and_say_what_failed():
    methods = runs(("sgd", [[0.9], [0.8]]), ("pb", [[0.95]]), ("sc", [[float("nan")]]))
    paint = Paint(methods)
    panel = finals(methods, paint)
    assert [(row.label, row.value, row.failed) for row in panel.rows] == [
        ("pb", "95.0 %", False), ("sgd", "85.0 ±7.1 %", False), ("sc", "diverged", True),
    ]  # fmt: skip
    assert panel.dotted == panel.rows[1].mean and len(panel.rows[1].seeds) == 2
    (one,) = bars(methods, [("samples", ",.0f", lambda m: [] if m.label == "sc" else [100.0])], "not reached", paint)
    assert [row.value for row in one.rows] == ["100", "100", "not reached"]
    assert [row.mean for row in one.rows] == [100.0, 100.0, None]
    assert finals(methods[-1:], paint).rows[0].value == "diverged"
