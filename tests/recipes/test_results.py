"""`pipeback results`: the best rate of each method is found, tables say what the file says, and pictures show it."""

import math
from pathlib import Path

import pytest

pytest.importorskip("hydra")
pytest.importorskip("matplotlib")

from pipeback.recipes import measured, results
from pipeback.recipes.sweeps import joined, pictures, summary, table
from pipeback.recipes.sweeps.table import Results, Row
from tests.recipes.cli import pipeback

ROOT = Path(__file__).parents[2]
FACTS = {"date": "2026-01-02", "commit": "abc1234", "pipeback": "0.2.0", "machine": "a CPU, 2 cores, Linux x86_64"}


def row(method, rate, seed, loss, slow=1.0, state="finished", held=1.25, **options):
    given = {**{key.replace("_", "."): str(value) for key, value in options.items()}, "optimizer.lr": rate}
    points = {50: loss + 2, 100: loss + 1} if math.isfinite(loss) else {}
    measures = {"accuracy": 0.5, "loss": loss} if math.isfinite(loss) else {}
    return Row(method, given, seed, state, 200, measures, loss, slow, held, points)


ROWS = [
    row("sgd", "0.1", 0, 2.0), row("sgd", "0.1", 1, 2.2), row("sgd", "0.2", 0, 2.4), row("sgd", "0.2", 1, 2.4),
    row("pb", "0.1", 0, 3.0, 2.0), row("pb", "0.1", 1, 3.2, 4.0), row("pb", "0.2", 0, 2.9, 1.9),  # one seed at .2
    row("ef", "0.1", 0, math.nan, math.nan, "diverged"), row("ef", "0.1", 1, math.nan, math.nan, "diverged"),
    row("msnag", "0.1", 0, 2.5, 1.5), row("msnag", "0.1", 1, 2.5, math.inf),
    row("msnag", "0.2", 0, 1.0, 1.0), row("msnag", "0.2", 1, math.nan, math.nan, "diverged"),
]  # fmt: skip
SWEEP = Results("pipeback sweep experiment=digits rates=[0.1,0.2]", "digits", FACTS, table.notes("sgd"), ROWS)


@pytest.fixture
def file(tmp_path):
    table.save(tmp_path / "results.csv", SWEEP)
    return tmp_path / "results.csv"


def test_a_file_is_read_as_it_was_written(file):
    found = table.load(file)
    assert found.command == SWEEP.command and found.facts == FACTS and found.notes == SWEEP.notes
    assert found.experiment == "digits" and str(found.rows) == str(ROWS)  # nan is not itself


def test_the_best_rate_is_that_of_the_mean_over_all_seeds():
    (setting,) = summary.settings(SWEEP)
    best = {tried.method: tried for tried in setting.tried}
    assert {name: tried.rate for name, tried in best.items()} == {
        "sgd": "0.1",
        "pb": "0.1",
        "ef": "0.1",
        "msnag": "0.1",
    }
    assert [row.train_loss for row in best["pb"].best] == [3.0, 3.2]  # the rate with one seed is not compared
    assert best["pb"].slow_down == 3.0 and best["msnag"].slow_down == math.inf and best["sgd"].at_edge
    assert [tried.method for tried in setting.tried] == ["sgd", "pb", "msnag", "ef"]  # by slow-down, then by loss


def test_the_table_says_what_the_file_says():
    (sheet,) = summary.sheets(SWEEP)
    assert sheet.title == "digits"
    rows = {cells[0]: dict(zip(sheet.head, cells, strict=True)) for cells in sheet.rows}
    assert rows["sgd"]["best rate"] == "0.1 *" and "* the least or the largest one tried" in sheet.notes
    assert rows["pb"]["slow-down"] == "3.00 (2.00 to 4.00)" and rows["pb"]["training loss"] == "3.100 ±0.141"
    assert rows["msnag"]["slow-down"] == "∞ (1.50 to ∞)" and rows["msnag"]["held-out accuracy %"] == "50.0 ±0.0"
    assert (
        rows["ef"]["training loss"] == "diverged" and rows["ef"]["slow-down"] == "–" and rows["ef"]["diverged"] == "2"
    )
    assert all(cells["seeds"] == "2" for cells in rows.values())


def test_times_of_a_pipeline_are_told_where_they_are_known(tmp_path):
    """Of updates one after the other, over four stages, and of those of a full pipeline."""
    timed = [one._replace(time=4.0 if one.method == "sgd" else 1.0) for one in ROWS]
    table.save(tmp_path / "timed.csv", SWEEP._replace(rows=timed))
    found = table.load(tmp_path / "timed.csv")
    assert str(found.rows) == str(timed)
    (sheet,) = summary.sheets(found)
    rows = {cells[0]: dict(zip(sheet.head, cells, strict=True)) for cells in sheet.rows}
    speeds = {name: cells["pipeline speed-up"] for name, cells in rows.items()}
    assert speeds == {"sgd": "1.00", "pb": "1.50 (1.00 to 2.00)", "msnag": "1.33 (0.00 to 2.67)", "ef": "–"}
    assert "The pipeline speed-up is the time of sgd" in sheet.notes
    labels = [ax.get_xlabel() for ax in pictures.draw(found).axes]
    assert labels[1] == "time with a worker per stage" and len(labels) == 4
    over_updates, over_time = ([line.get_xdata() for line in ax.get_lines()] for ax in pictures.draw(found).axes[:2])
    assert [list(x * 4) for x in over_updates[:1]] == [list(x) for x in over_time[:1]]
    (plain,) = summary.sheets(SWEEP)
    assert "pipeline speed-up" not in plain.head and "pipeline speed-up" not in plain.notes
    assert len(pictures.draw(SWEEP).axes) == 3


def test_short_runs_have_no_curves_and_are_told_so():
    short = SWEEP._replace(rows=[one._replace(points={}, updates=9) for one in ROWS])
    first, *others = pictures.draw(short).axes
    assert [text.get_text() for text in first.texts] == ["No finished run has 50 updates,\nwith which a curve begins."]
    assert not first.axison and len(others) == 2 and all(ax.axison for ax in others)


def test_a_run_that_ends_above_the_first_loss_of_the_reference_has_no_slow_down():
    """Nor a pipeline speed-up, and the words below the table say so; those of other tables do not."""
    above = [
        one._replace(time=1.0, slow_down=math.nan if one.method in ("pb", "msnag") else one.slow_down) for one in ROWS
    ]
    (sheet,) = summary.sheets(SWEEP._replace(rows=above))
    rows = {cells[0]: dict(zip(sheet.head, cells, strict=True)) for cells in sheet.rows}
    assert {name: cells["slow-down"] for name, cells in rows.items()} == {
        "sgd": "1.00", "pb": "–", "msnag": "–", "ef": "–",
    }  # fmt: skip
    told = "A run that ends above the first training loss of sgd, a mean of up to 50 updates, has no slow-down"
    assert told in sheet.notes and "pipeline speed-up" not in sheet.head
    (plain,) = summary.sheets(SWEEP)
    assert told not in plain.notes


def test_without_a_logged_loss_there_is_no_best_rate():
    """What a run that logs none has is a held-out loss alone; one that diverged is none of these."""
    none = [one._replace(points={}, updates=0, train_loss=math.nan, slow_down=math.nan) for one in ROWS]
    (sheet,) = summary.sheets(SWEEP._replace(rows=none))
    rows = {cells[0]: dict(zip(sheet.head, cells, strict=True)) for cells in sheet.rows}
    assert {cells["best rate"] for cells in rows.values()} == {"–"}
    assert rows["sgd"]["training loss"] == "–" and rows["ef"]["training loss"] == "diverged"
    assert "give trainer.log_every_n_steps=1" in sheet.notes and "* the least" not in sheet.notes
    told = [[text.get_text() for text in ax.texts] for ax in pictures.draw(SWEEP._replace(rows=none)).axes]
    assert told[-1] == ["No finished run has logged\na training loss."] and all(told)
    some = [other if one.options["optimizer.lr"] == "0.1" else one for one, other in zip(ROWS, none, strict=True)]
    (setting,) = summary.settings(SWEEP._replace(rows=some))
    assert {tried.method: tried.rate for tried in setting.tried if tried.rated} == {
        "sgd": "0.2",
        "pb": "0.2",
        "msnag": "0.2",
    }


@pytest.mark.parametrize(
    ("name", "stages", "batch"),
    [
        ("delay_lm", 32, 8),
        ("delay_lm_turned", 32, 8),
        ("translation_seeds", 8, 64),
        ("fashion_mnist_epoch_methods", 20, 128),
        ("cifar10_epoch", 20, 128),
        ("cifar10_four", 20, 128),
        ("delay_lm_seeds", 32, 8),
        ("delay_lm_texts", 32, 8),
    ],
)
def test_times_of_measured_sweeps_are_those_of_their_schedules(name, stages, batch):
    """Without delay one stage works at a time; all others, once the pipeline is full. A batch counts as an update."""
    for row in table.read(measured.text(name), name).rows:
        if row.method == "sgd":
            assert row.time == stages * batch
        else:
            assert batch < row.time < 1.02 * batch, row.method


def test_a_short_run_has_means_of_fewer_updates():
    (short,) = summary.sheets(SWEEP._replace(rows=[one._replace(updates=16) for one in ROWS]))
    (long,) = summary.sheets(SWEEP)
    assert "means of at most 50 updates" in short.notes and "means of 50 updates" in long.notes


def test_every_choice_of_options_is_a_table_of_its_own():
    rows = [row(m, "0.1", 0, 2.0, model_width=w, model_depth=3) for w in (48, 96) for m in ("sgd", "pb")]
    found = summary.sheets(SWEEP._replace(rows=rows))
    assert [sheet.title for sheet in found] == ["width 48, depth 3", "width 96, depth 3"]
    assert all([cells[0] for cells in sheet.rows] == ["sgd", "pb"] for sheet in found)
    assert "diverged" not in found[0].head


def test_text_and_pictures_are_written(file, tmp_path):
    done = pipeback("results", file.parent, f"out={tmp_path}/t.md,{tmp_path}/p.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "t.md").read_text("utf-8")
    assert text.startswith(
        f"```shell\n{SWEEP.command}\n```\n\nMeasured on 2026-01-02 at commit abc1234 (version 0.2.0)"
    )
    assert "13 runs." in text and "| pb " in text and "3.00 (2.00 to 4.00)" in text
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG") and "written: " in done.stdout
    assert "msnag" in done.stdout and SWEEP.command in done.stdout and "a CPU, 2 cores" in done.stdout


def test_endings_in_capitals(file, tmp_path):
    done = pipeback("results", file, "out=t.MD,s.CSV,p.PNG", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "t.MD").read_text("utf-8").startswith("```shell")
    assert len(table.read((tmp_path / "s.CSV").read_text("utf-8"), "s.CSV").rows) == len(SWEEP.rows)
    assert (tmp_path / "p.PNG").read_bytes().startswith(b"\x89PNG")


def test_the_picture_shows_what_the_file_says():
    figure = pictures.draw(SWEEP)
    losses, slow, rates = figure.axes
    colours = {label.get_text(): label.get_color() for label in slow.get_yticklabels()}
    assert list(colours) == ["ef", "msnag", "pb", "sgd"] and len(set(colours.values())) == 4
    curves = {line.get_color(): list(zip(*line.get_data(), strict=True)) for line in losses.lines}
    assert curves[colours["pb"]] == [(50, pytest.approx(5.1)), (100, pytest.approx(4.1)), (200, pytest.approx(3.1))]
    assert colours["ef"] not in curves
    told = [text.get_text() for text in slow.texts]
    assert told == ["diverged", "3.00", "1.00"]  # the median of msnag is infinite: its dot of one seed stands alone
    assert [tick.get_text() for tick in rates.get_xticklabels()] == ["0.1", "0.2"]
    rings = [line for line in rates.lines if line.get_markerfacecolor() == "none"]
    best = {line.get_markeredgecolor(): line.get_xdata()[0] for line in rings}
    assert best[colours["sgd"]] == 0.1


def test_a_sweep_of_one_rate_has_no_panel_of_rates():
    rows = [row(method, "0.1", seed, 2.0) for method in ("sgd", "pb") for seed in (0, 1)]
    assert len(pictures.draw(SWEEP._replace(rows=rows)).axes) == 2


def test_names_are_listed_and_shown(tmp_path):
    listed = pipeback("results", cwd=tmp_path)
    assert listed.returncode == 0 and measured.names()
    for name in measured.names():
        assert name in listed.stdout
        assert pipeback("results", name, cwd=tmp_path).returncode == 0


@pytest.mark.parametrize("name", measured.names())
def test_what_came_with_pipeback_is_a_few_kilobytes_and_says_where_it_was_measured(name):
    found = results.found(name)
    assert len(measured.text(name).encode()) < 64_000
    assert found.command.startswith(("pipeback sweep ", "pipeback bench ")) and {
        "date",
        "commit",
        "machine",
        "torch",
    } <= set(found.facts)
    assert "/home" not in found.command and "/work" not in found.command and "dirty" not in found.facts["commit"]


@pytest.mark.parametrize("name", measured.names())
def test_the_page_is_generated_from_the_file(name):
    """`pipeback results NAME out=docs/results/data/NAME/tables.md` writes it."""
    page = ROOT / "docs" / "results" / "data" / name / "tables.md"
    assert page.read_text("utf-8") == results.text(results.found(name))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "'nowhere' is neither a results.csv of `pipeback sweep`, nor its folder, nor a known"),
        (["{name}x"], "did you mean '{name}'?"),
        (["a", "b"], "'a' is neither a results.csv"),
        (["out=a.png"], "out=a.png: of which sweep? `pipeback results` lists those that came with pipeback"),
        (["{name}", "out=a.doc"], "out=a.doc must end in one of .md"),
        (["{name}", "outt=a.png"], "'outt=a.png' is not an option; write out=FILE, for example out=results.png"),
        (["{name}", "--quick"], "'--quick' is not an option"),
        (["other.csv"], "other.csv is no file of `pipeback sweep`"),
        (["empty.csv"], "empty.csv: no run of it has ended yet"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_gives_one_line(arguments, message, tmp_path):
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    table.save(tmp_path / "empty.csv", SWEEP._replace(rows=[]))
    name = measured.names()[0]
    done = pipeback("results", *(word.format(name=name) for word in arguments), cwd=tmp_path)
    assert done.returncode == 1 and message.format(name=name) in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_sweeps_of_two_commits_are_joined_and_each_run_keeps_its_commit(file, tmp_path):
    more = [row("sgd", "0.1", 2, 2.6), row("pb", "0.1", 2, 3.4, 5.0)]
    facts = {**FACTS, "date": "2026-01-03", "commit": "def5678"}
    table.save(tmp_path / "more.csv", SWEEP._replace(command="pipeback sweep seed=2", facts=facts, rows=more))
    done = pipeback("results", file, "more.csv", "out=all.csv,all.md", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = table.load(tmp_path / "all.csv")
    assert [row.commit for row in found.rows] == ["abc1234"] * 13 + ["def5678"] * 2
    assert str([row._replace(commit="") for row in found.rows]) == str(ROWS + more)
    assert found.facts["commit"] == "abc1234 and def5678" and found.facts["machine"] == FACTS["machine"]
    assert found.command == f"{SWEEP.command}; pipeback sweep seed=2" and found.notes[-1] == table.SEVERAL
    (sheet,) = summary.sheets(found)
    rows = {cells[0]: dict(zip(sheet.head, cells, strict=True)) for cells in sheet.rows}
    assert rows["pb"]["slow-down"] == "4.00 (2.00 to 5.00)" and rows["pb"]["seeds"] == "3"
    assert "on 2026-01-02 and 2026-01-03 at commit abc1234 and def5678" in (tmp_path / "all.md").read_text("utf-8")
    again = joined.joined({"all": found, "third": SWEEP._replace(rows=[row("pb", "0.1", 3, 3.0, 3.0)])})
    assert again.facts["commit"] == "abc1234 and def5678" and again.notes.count(table.SEVERAL) == 1
    assert [row.commit for row in again.rows] == [*(row.commit for row in found.rows), "abc1234"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experiment": "mnist"}, "first is of digits, second of mnist; one alone"),
        ({"rows": [row("pb", "0.1", 7, 3.0, model_width=3)]}, "first varies optimizer.lr, second varies model.width"),
        ({"notes": table.notes("pb")}, "over those of sgd in first, of pb in second; give one reference="),
        ({"rows": [row("pb", "0.1", 1, 3.0)]}, "first and second both have the run pb lr 0.1 seed 1; leave it out"),
        (
            {"rows": [row("sgd", "0.2", 7, 2.0)]},
            r"best rate of sgd is 0.1 in first and 0.2 in second.*rates=\{sgd:\[0.1\]\}",
        ),
    ],
)
def test_sweeps_that_cannot_be_compared_are_not_joined(change, message):
    with pytest.raises(ValueError, match=message):
        joined.joined({"first": SWEEP, "second": SWEEP._replace(**{"rows": [row("pb", "0.1", 7, 3.0)], **change})})


def test_what_is_no_sweep_is_not_joined(file, tmp_path):
    done = pipeback("results", file, "stability", cwd=tmp_path)
    assert done.returncode == 1 and "stability is no sweep; name it alone" in done.stderr
    done = pipeback("results", "stability", "out=all.csv", cwd=tmp_path)
    assert done.returncode == 1 and "out=all.csv: only sweeps are written as .csv" in done.stderr
