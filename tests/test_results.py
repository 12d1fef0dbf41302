"""Every table of docs/results is a file of docs/results/data, which says where its numbers come from."""

import csv
import json
import re

import pytest

from tests.helpers import pages

RESULTS = pages.DOCS / "results"
FILES = sorted((RESULTS / "data").rglob("*.md"))
PAGES = sorted(RESULTS.glob("*.md"))
HEAD = re.compile(
    r"```shell\n(?P<command>(pipeback|python) .+?)\n```\n\n"
    r"Measured on \d{4}-\d\d-\d\d(?: and \d{4}-\d\d-\d\d)* at commit [0-9a-f]{7,40}(?: and [0-9a-f]{7,40})* "
    r"\(version [\d.]+\), on .+ cores.*, torch [\d.]+",
    re.DOTALL,
)


def name(path):
    return path.relative_to(RESULTS).as_posix()


def table(text, head):
    """The rows of the table whose columns begin with these, by their first cell."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    start = next(n for n, row in enumerate(rows) if row[: len(head)] == head)
    found = {}
    for row in rows[start + 2 :]:
        if len(row) < 2:
            break
        found[row[0].removesuffix(" †")] = dict(zip(rows[start], row, strict=True))
    return found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_of_results_has_no_table_of_its_own(page):
    text = page.read_text("utf-8")
    assert not re.search(r"^\|", text, re.MULTILINE), f"{page.name} has a table that no command wrote"
    for target in re.findall(r"^```{include} (\S+)", text, re.MULTILINE):
        assert (RESULTS / target) in FILES, f"{page.name} shows {target}, which is not there"


@pytest.mark.parametrize("file", FILES, ids=name)
def test_a_file_of_results_says_where_its_numbers_come_from(file, tmp_path):
    pytest.importorskip("hydra")
    text = file.read_text("utf-8")
    head = HEAD.match(text)
    assert head, f"{name(file)} does not begin with its command, date, commit and machine"
    assert "dirty" not in head[0] and re.search(r"^\|", text, re.MULTILINE)
    for words in pages.commands_of(head["command"]):
        pages.check(words, tmp_path)
    shown = f"```{{include}} {name(file)}\n"
    assert any(shown in page.read_text("utf-8") for page in PAGES), f"no page shows {name(file)}"


@pytest.mark.parametrize(
    "missing",
    [
        "```shell\npipeback zoo\n```\n\n",
        " on 2026-11-23",
        " at commit 0d6f79e",
        ", on a CPU, 2 cores",
        ", torch 2.15.0",
    ],
)
def test_a_file_that_lacks_a_part_is_refused(missing):
    whole = (
        "```shell\npipeback zoo\n```\n\n"
        "Measured on 2026-11-23 at commit 0d6f79e (version 0.2.0), on a CPU, 2 cores, torch 2.15.0.\n"
    )
    assert HEAD.match(whole) and missing in whole
    assert not HEAD.match(whole.replace(missing, ""))


def test_every_other_file_of_results_says_it_too():
    for file in (RESULTS / "data").rglob("*"):
        if file.is_file() and file not in FILES:
            machine = json.loads(file.read_text("utf-8"))["machine"]
            assert all(machine[what] for what in ("command", "date", "commit", "pipeback", "machine", "torch")), file


def test_the_numbers_of_a_picture_say_where_they_come_from_and_how_far_they_spread():
    file = pages.ROOT / "recipes" / "pictures" / "stages.csv"
    lines = file.read_text("utf-8").splitlines()
    told = [line.removeprefix("# ") for line in lines if line.startswith("# ")]
    assert told[0] in (RESULTS / "zoo.md").read_text("utf-8")
    assert re.match(r"date: \d{4}-\d\d-\d\d, commit: [0-9a-f]{7,40}, pipeback: [\d.]+, machine: .+ cores", told[2])
    rows = list(csv.DictReader(lines[len(told) :]))
    assert len(rows) == 18
    for row in rows:
        assert float(row["first_quartile"]) <= float(row["seconds"]) <= float(row["third_quartile"])
    wide = sum(float(r["third_quartile"]) - float(r["first_quartile"]) > 0.1 * float(r["seconds"]) for r in rows)
    assert f"quartiles of {wide} of 18 stages lie more than 10 % of it apart" in told[3]


def test_the_readme_shows_rows_of_the_file_on_digits():
    readme = (pages.ROOT / "README.md").read_text("utf-8")
    file = (RESULTS / "data" / "digits" / "tables.md").read_text("utf-8")
    head = HEAD.match(file)
    version = re.search(r"version ([\d.]+\d)", head[0])[1]
    assert f"(`{head['command']}`, measured at version {version})" in " ".join(readme.split())
    tables = [table(file, head) for head in (["method", "update size"], ["method", "samples/s"])]
    epochs = [f"epoch {n}" for n in (1, 2, 3)]
    shown = table(readme, ["method", "D at stage 0", *epochs])
    assert len(shown) == 5
    for label, row in shown.items():
        method, _, size = label.partition(", update size ")
        known = tables[0][method] | tables[1][method]
        assert known["update size"] == (size or "1")
        assert [row[epoch] for epoch in epochs] == [known[f"accuracy % {epoch}"] for epoch in epochs]
        for column in ("D at stage 0", "weight copies", "bubble %"):
            assert row[column] == known[column], (label, column)
