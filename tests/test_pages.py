"""Every Python and shell block of docs/ runs, and every page is reached."""

import re

import pytest

import pipeback
from tests.helpers import pages

PAGES = [page for page in pages.pages() if page.startswith("docs/")]
PRELUDE = "docs/how-to/index.md"  # the lines that all pages but the tutorials begin with


def needs(page):
    """Skip where a page's packages are not installed."""
    text = (pages.ROOT / page).read_text("utf-8")
    for name in ("lightning", "transformers", "safetensors", "torchvision", "sklearn", "hydra"):
        if re.search(rf"^(import|from) {name}\b", text, re.MULTILINE):
            pytest.importorskip(name)


@pytest.mark.parametrize("page", [page for page in PAGES if pages.blocks(page, "python")])
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    needs(page)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    scope = {"__name__": "page"}
    if not page.startswith("docs/tutorials/") and page != PRELUDE:
        pages.run(PRELUDE, scope)
    if "Trainer(" in (pages.ROOT / page).read_text("utf-8"):
        quieten(monkeypatch)
    pages.run(page, scope)


@pytest.mark.parametrize("page", [page for page in pages.pages() if pages.blocks(page, "shell")])
def test_the_commands_of_a_page_parse(page, tmp_path):
    pytest.importorskip("hydra")
    needs(page)
    for block in pages.blocks(page, "python"):  # the scripts that its commands start
        if name := re.match(r"# (\w+\.py)\n", block.text):
            (tmp_path / name[1]).write_text(block.text, "utf-8")
    for words in pages.commands(page):
        pages.check(words, tmp_path)


def quieten(monkeypatch):
    """Lightning without progress bars, logs and files; a page's own arguments come first."""
    import lightning.pytorch as pl

    made = pl.Trainer
    quiet = {
        "accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False,
    }  # fmt: skip
    monkeypatch.setattr(pl, "Trainer", lambda **options: made(**quiet | options))


def test_a_change_touches_three_files_at_most():
    """As `docs/explanation/where_a_change_belongs.md` has it; `conf/` is for those who want a command, too."""
    text = (pages.DOCS / "explanation/where_a_change_belongs.md").read_text("utf-8")
    rows = [row.split(" | ") for row in text.splitlines() if row.startswith("| ")]
    assert len(rows) > 10
    for change, files in rows:
        named = set(re.findall(r"`([A-Za-z_]+(?:/[A-Za-z_]+)*\.py)`", re.sub(r"as `.*?` is", "", files)))
        assert len(named) <= 3, f"{change} touches {sorted(named)}"


DOCSTRING = """Train `model`; w_ and *all* stay as they are.

It returns nothing.
model, x: a module, and
what it gets

What is trained
model       a module, or
            several
micro_batch_size  samples

    v ← m·v + g        w_t

| K | anneal |
| d | decay  |"""
PAGE = r"""Train ``model``\ ; w\_ and \*all\* stay as they are.

It returns nothing.

``model``, ``x``: a module, and
what it gets

**What is trained**

``model``
    a module, or
    several

``micro_batch_size``
    samples


.. code-block:: text

    v ← m·v + g        w_t

.. list-table::
    :header-rows: 1

    * - K
      - anneal
    * - d
      - decay"""


def test_docstrings_are_converted_as_they_look(monkeypatch):
    monkeypatch.syspath_prepend(pages.DOCS)
    from docstrings import converted

    assert "\n".join(converted(DOCSTRING.splitlines())).strip() == PAGE


def test_the_comments_of_a_named_tuple_tell_its_fields(monkeypatch):
    monkeypatch.syspath_prepend(pages.DOCS)
    from docstrings import commented_fields

    found = dict(commented_fields(pipeback.Memory))
    assert list(found) == list(pipeback.Memory._fields)
    assert found["state"] == ["the method's own state, in copies of the weights"] and len(found["beside"]) > 1
    assert [name for name, _ in commented_fields(pipeback.pipeline.breakdown.StageRow)] == [
        "layers", "parameters", "seconds", "activations", "delay", "times", "input", "output"
    ]  # fmt: skip
    assert not commented_fields(pipeback.Record)


def test_every_method_has_a_page():
    there = {path.stem for path in (pages.DOCS / "reference" / "methods").glob("*.md")} - {"index"}
    assert there == set(pipeback.methods.available())


def first_column(page):
    """Return the names in the first column of a page's tables."""
    rows = [row for row in (pages.DOCS / page).read_text("utf-8").splitlines() if row.startswith("| `")]
    return set(re.findall(r"`(\w+)`", " ".join(row.split(" | ")[0] for row in rows)))


def test_tables_by_method_leave_none_out():
    every = pipeback.methods.available()
    assert set(every) <= first_column("how-to/activations.md")
    accumulating = {name for name in every if "micro_batches" in pipeback.methods.options(name)}
    assert accumulating <= first_column("how-to/optimizers.md")


def test_the_table_of_groups_has_every_choice():
    text = (pages.DOCS / "reference/commands.md").read_text("utf-8")
    for row in re.findall(r"^\| `(\w+)` \| (`[^|]*`) \|", text, re.MULTILINE):
        if (folder := pages.ROOT / "conf" / row[0]).is_dir():
            assert set(re.findall(r"`(\w+)`", row[1])) == {path.stem for path in folder.glob("*.yaml")}, row[0]


def test_every_page_is_in_a_table_of_contents():
    named = set()
    for page in PAGES:
        folder = (pages.ROOT / page).parent
        for tree in re.findall(r"```{toctree}\n(.*?)```", (pages.ROOT / page).read_text("utf-8"), re.DOTALL):
            entries = [line for line in tree.splitlines() if line.strip() and not line.startswith(":")]
            named |= {(folder / f"{entry}.md").resolve().relative_to(pages.ROOT).as_posix() for entry in entries}
    assert named == set(PAGES) - {"docs/index.md"}


@pytest.mark.parametrize("page", pages.pages())
def test_links_within_the_project_lead_somewhere(page):
    text = (pages.ROOT / page).read_text("utf-8")
    for target in re.findall(r"\]\(([^)#:\s]+)[^):\s]*\)", text):
        there = (pages.ROOT / page).parent / target
        assert there.exists() or "_static/pictures" in target, f"{page} links to {target}, which is not there"


@pytest.mark.parametrize(
    "page", [page for page in pages.pages() if "/explanation/" in page or "/contributing/" in page]
)
def test_the_files_that_a_page_names_are_there(page):
    text = (pages.ROOT / page).read_text("utf-8")
    for name in re.findall(r"`([a-z_]+(?:/[a-z_]+)*(?:\.py|/))`", text):
        there = (pages.ROOT / "pipeback" / name).exists() or (pages.ROOT / name).exists()
        assert there, f"{page} names {name}, which is not there"
