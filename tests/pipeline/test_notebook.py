"""What objects show of themselves in a notebook, which waits for nothing and changes no bit."""

import doctest
import xml.etree.ElementTree as tree

import pytest
import torch
from torch import nn

import pipeback
from pipeback import notebook
from pipeback.notebook import FIRST, LAST, NUMBERS, WORDS, Drawing, table
from pipeback.runtime.ledger import Ledger


def made(method="pb", **options):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])
    return pipeback.Pipeline(
        model, loss=nn.functional.mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.01), method=method,
        micro_batch_size=2, **options,
    )  # fmt: skip


def pushed(pipe):
    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(1))
    return pipe.push(x, x)


def cells(html):
    """The rows of a table as lists of texts; html must be well-formed."""
    return [["".join(cell.itertext()) for cell in row] for row in tree.fromstring(html).iter("tr")]


def test_a_pipeline_shows_its_stages_and_what_is_in_flight():
    pipe = made()
    assert repr(pipe) == (
        "Pipeline(4 stages, PipelinedBackpropagation(slack=2), delays 6, 4, 2, 0; 0 pushed, 0 in flight)"
    )
    pushed(pipe)
    flights = [len(stage.flights) for stage in pipe._engine.stages]
    assert flights[0] > 0
    rows = cells(pipe._repr_html_())
    assert rows[0] == ["stage", "name", "module", "delay", "in flight"]
    assert rows[1:] == [[str(s), str(s), "Linear", str(6 - 2 * s), str(flights[s])] for s in range(4)]
    assert f"10 pushed, {flights[0]} in flight" in repr(pipe)
    pipe.close()
    assert repr(pipe).endswith("10 pushed, closed)") and len(cells(pipe._repr_html_())) == 5


def test_showing_a_pipeline_waits_for_nothing_and_changes_no_bit(monkeypatch):
    shown, plain = made(), made()
    with monkeypatch.context() as patch:
        patch.setattr(type(shown._engine), "wait", lambda engine: pytest.fail("it waited"))
        for pipe in (shown, plain):
            pushed(pipe)
            if pipe is shown:
                repr(pipe), pipe._repr_html_(), pipe.split._repr_html_()
            pushed(pipe)
    for pipe in (shown, plain):
        pipe.drain()
    for a, b in zip(shown.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_threads_show_one_ledger():
    with_threads, alone = made(workers=2), made()
    for pipe in (with_threads, alone):
        pushed(pipe)
        pipe.wait()
        assert isinstance(pipe.ledger, Ledger)
    assert sorted(with_threads.ledger) == sorted(alone.ledger)
    assert cells(with_threads.ledger._repr_html_()) == cells(alone.ledger._repr_html_())
    assert repr(with_threads).partition(";")[0] == repr(alone).partition(";")[0]
    with_threads.close()


def test_a_ledger_is_a_grid_of_versions():
    ledger = Ledger()
    ledger.add("F", [0, 1], [3, 3], [1, 2])
    ledger.add("B", [1], [3], [2])
    assert repr(ledger) == "Ledger(3 records, the versions of the weights that every F and B used)"
    rows = cells(ledger._repr_html_())
    assert rows[0][-1] == "3"
    assert [row[-1] for row in rows[1:]] == ["1 → …", "2 → 2"]
    assert cells(Ledger()._repr_html_()) == [["stage"]]


def test_measurements_are_tables():
    pipe = made()
    watch = pipe.watch()
    assert repr(watch) == "Watch(4 stages, the gap of 0 measured)"
    assert cells(watch._repr_html_())[1] == ["0", "–", "–", "–"]
    assert "Nothing was measured yet: push, and call watch() again." in watch._repr_html_()
    pushed(pipe)
    plan = pipe.plan()
    assert repr(plan).startswith("Plan(PipelinedBackpropagation(slack=2): 4 stages") and "\n" not in repr(plan)
    assert cells(plan._repr_html_())[1][0] == "on the device"
    assert ["weights", "672 B", "one copy of the trainable weights"] in cells(pipe.memory()._repr_html_())
    assert ["fetches", "0", "how often the weights of a stage were brought"] in cells(pipe.traffic()._repr_html_())


def test_a_split_shows_its_stages_and_draws_them():
    pytest.importorskip("matplotlib")
    pipe = made()
    assert repr(pipe.split) == "Split(4 stages by a: the children of an nn.Sequential)"
    assert cells(pipe.split._repr_html_())[1] == ["0", "0", "Linear", "42"]
    for picture in (pipe.split.draw(), pipe.draw(), pipe.draw(3)):
        assert tree.fromstring(picture._repr_svg_().encode()).tag.endswith("svg")
        assert len(repr(picture)) < 100


def test_a_drawing_is_saved(tmp_path):
    Drawing("<svg/>").save(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text() == "<svg/>"


def test_names_are_escaped_and_long_tables_cut():
    assert cells(table("<b>", ["a"], [["<script>"]])) == [["a"], ["<script>"]]
    whole = table("a", ["n", "name"], [[n, "x"] for n in range(FIRST + LAST + 1)])
    assert [row[0] for row in cells(whole)[1:]] == [str(n) for n in range(FIRST + LAST + 1)]
    long = cells(table("a", ["n", "name"], [[n, "x"] for n in range(2000)]))
    assert [row[0] for row in long[1:]] == [*map(str, range(FIRST)), "… 1,976 more", *map(str, range(1992, 2000))]


def test_columns_of_numbers_stand_to_the_right():
    rows = [["a", "1,024", "5.3 KiB", "–", "12%", "8.66 ms", "–0"], ["b", 0, "0 B", "1e-05", "3%", "12 s", "x"]]
    wanted = [WORDS, *[NUMBERS] * 5, WORDS]
    for row in tree.fromstring(table("t", list("abcdefg"), rows)).iter("tr"):
        assert [cell.get("style") for cell in row] == wanted


def test_a_breakdown_is_a_table():
    rows = made().breakdown(torch.randn(20, 6), torch.randn(20, 6))
    shown = cells(rows._repr_html_())
    assert shown[0] == ["stage", "name", "layers", "parameters", "FLOPs", "F and B", "activations", "delay"]
    assert shown[1][:5] == ["0", "0", "Linear", "42", str(rows[0].forward_flops + rows[0].backward_flops)]
    assert isinstance(rows, list) and len(rows) == 4


def test_pictures_fit_the_cell():
    assert 'style="max-width: 100%; height: auto"' in made().split.draw()._repr_svg_()


def test_the_doctests():
    assert doctest.testmod(notebook).failed == 0 < doctest.testmod(notebook).attempted
