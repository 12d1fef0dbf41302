"""`pipeback bench table`, tiny: what it runs, its file, and the page that says what the file says. No times."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pipeback.recipes.benches import peaks, results, table, turns
from pipeback.recipes.benches.contenders import apart, plain
from pipeback.recipes.benches.tasks import NETWORKS, Network, Task, images, tasks
from pipeback.recipes.benches.vectorized import Linear, blocks

TINY = Network("tiny", "4 layers of width 8", partial(blocks, Linear, 4, 8), (8,), {2: 8})


def some(rates):
    rows = [
        results.Row(name, label, workers, 1, list(numbers), [20.4, 3.0], note)
        for name, label, workers, numbers, note in rates
    ]
    case = results.Case("tiny", "4 layers of width 8", 5, 388, 1, 8, rows)
    machine = {"command": "pipeback bench", "date": "2020-01-01", "commit": "0123abc", "machine": "a CPU, 2 cores"}
    return results.Results(machine, 3, 1.0, [case])


LATER = {"cerebras_auto"}  # rows that were added after the committed run

FOUND = some([
    ("plain", "plain loop", 1, (100.0, 200.0, 50.0), ""),
    ("apart", "stages apart", 1, (50.0, 100.0, 50.0), ""),
    ("ranks", "`pb`, 2 ranks", 2, (90.0, 100.0, 100.0), ""),
    ("vectorized", "`pb`, `vectorize=True`", 1, (), "no stages are alike"),
])  # fmt: skip


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    """A turn takes as long as it takes, and among the garbage of others: nothing is said here about speed."""
    monkeypatch.setattr(turns, "LEAST", 1e-6)
    monkeypatch.setattr(turns, "gc", SimpleNamespace(collect=lambda: 0))


def here(work, *given, ranks, start=""):
    """Instead of new processes."""
    assert ranks == 1
    return work(0, "", *given)


def test_the_table_and_its_file(tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(NETWORKS, "tiny", TINY)
    monkeypatch.setattr(table, "on_ranks", here)
    path = tmp_path / "found.json"
    table.main(1, networks="tiny", contenders="pb,vectorized", out=str(path))
    out = capfd.readouterr().out
    for label in ("plain loop", "stages apart", "pb, event loop", "pb, vectorize=True"):
        assert f"\n{label} " in out, label
    known = json.loads(path.read_text("utf-8"))
    assert {"command", "date", "commit", "machine", "threads", "torch", "python", "load"} <= set(known["machine"])
    assert known["repeats"] == 1 and known["seconds"] > 0
    (case,) = known["cases"]
    assert (case["network"], case["stages"], case["micro_batch"], case["turn"]) == ("tiny", 5, 2, 8)
    assert [row["name"] for row in case["rows"]] == ["plain", "apart", "pb", "vectorized"]
    assert all(row["update"] == 2 and len(row["peak_mb"]) == len(row["held_mb"]) == 1 for row in case["rows"])
    assert [[mb is None for mb in row["declared_mb"]] for row in case["rows"]] == [[True], [True], [False], [False]]
    assert all(len(row["rates"]) == 1 and row["rates"][0] > 0 for row in case["rows"])
    table.main(1, read=str(path))
    assert capfd.readouterr().out.strip() in out  # the same, from the file


@pytest.mark.soak
def test_ranks_are_in_the_table_beside_the_others():
    """With processes of their own."""
    (case,) = table.measured([Task(TINY, 2, 8)], ["torch_1f1b"], 1).cases
    assert [row.name for row in case.rows] == ["plain", "apart", "torch_1f1b"]
    assert [row.update for row in case.rows] == [2, 2, 16]
    assert [len(row.peak_mb) for row in case.rows] == [1, 1, 2]
    assert all(len(row.rates) == 1 and row.rates[0] > 0 for row in case.rows)


def test_what_cannot_be_trained_so_says_why(monkeypatch):
    monkeypatch.setattr(table, "on_ranks", here)
    draws = lambda: nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)) for _ in range(3)))  # noqa: E731
    unlike = Network("draws", "", draws, (8,), {1: 2}, compiles=False)
    (case,) = table.measured([Task(unlike, 1, 2)], ["vectorized", "compiled"], 1).cases
    assert [(row.name, bool(row.rates)) for row in case.rows[2:]] == [("vectorized", False), ("compiled", False)]
    assert "no stages can run as one" in case.row("vectorized").note
    assert case.row("compiled").note == table.NEVER and case.row("compiled").peak_mb == []


def test_the_tables_say_what_the_file_says():
    assert results.TABLES.read_text("utf-8") == results.tables(results.load(results.FILE))


def test_the_committed_file_has_everything():
    found = results.load(results.FILE)
    assert [(case.network, case.micro_batch) for case in found.cases] == [
        (task.network.name, task.samples) for task in tasks(list(NETWORKS))
    ]
    for case in found.cases:
        names = [row.name for row in case.rows]
        assert names == [name for name in table.ENTRIES if name in names]
        assert set(table.ENTRIES) - set(names) <= LATER
        for row in case.rows:
            assert len(row.rates) == (0 if row.note else found.repeats) and bool(row.peak_mb) != bool(row.note)


def test_ratios_are_of_the_same_round():
    (case,) = FOUND.cases
    ranks = case.row("ranks")
    assert case.ratios(ranks, "plain") == [0.9, 0.5, 2.0]
    assert case.ratios(ranks, "apart") == [0.9, 0.5, 1.0]  # of two workers
    assert results.cells(case, ranks) == ["100.0", "0.90 (0.50 … 2.00)", "0.90 (0.50 … 1.00)", "20 + 3", "–", "–", "1"]
    assert results.cells(case, case.row("vectorized"))[:3] == [results.NONE] * 3
    text, tables = results.text(FOUND), " ".join(results.tables(FOUND).split())  # however wide its columns are
    for told in (text, tables):
        assert "Measured on 2020-01-01 at commit 0123abc, on a CPU, 2 cores." in told and "3 interleaved turns" in told
    assert "pb, vectorize=True: no stages are alike" in text
    assert "| `pb`, 2 ranks | 0.90 (0.50 … 2.00) |" in tables
    assert "| `pb`, 2 ranks | 100.0 | 0.90 (0.50 … 2.00) | 0.90 (0.50 … 1.00) | 20 + 3 | – | – | 1 |" in tables
    assert "`pb`, `vectorize=True`: no stages are alike." in tables


def test_goals_are_ratios_of_the_same_round_over_the_better_of_several():
    found = some([
        ("plain", "plain loop", 1, (1.0, 1.0), ""),
        ("apart", "stages apart", 1, (1.0, 1.0), ""),
        ("auto", "auto", 1, (4.0, 2.0), ""),
        ("ranks", "`pb`, 2 ranks", 2, (6.0, 8.0), ""),
        ("torch_gpipe", "torch's gpipe", 2, (5.0, 2.0), ""),
        ("torch_1f1b", "torch's 1f1b", 2, (4.0, 4.0), ""),
        ("ranks_auto", "as one, 2 ranks", 2, (6.0, 4.0), ""),
        ("cerebras_auto", "cerebras", 1, (), "cannot"),
    ])  # fmt: skip
    (case,) = found.cases
    reached = {goal.name: case.reached(goal) for goal in results.GOALS}
    assert reached == {"auto": [], "cerebras_auto": [], "ranks": [1.5, 2.0], "ranks_auto": [1.5, 2.0]}
    told = results.goals(found)
    assert "| 1.75 (1.50 … 2.00) |" in told and "plain loop fused" not in told and "1.05" in told
    assert told in results.text(found) and told in results.tables(found)


def test_what_is_declared_is_all_that_the_pipeline_counts():
    """With momentum; a strip of small weights has their gradients beside."""
    contender = table.ENTRIES["pb"].build(Task(TINY, 2, 8), 0, [])
    contender.run()
    memory = contender.pipe.memory()
    weights = sum(p.nbytes for p in contender.pipe.model.parameters())
    assert memory.copies == 1 and not memory.state
    assert table.declared(contender.pipe) == 2 * weights + memory.activations + memory.beside


def test_with_fused_optimizers_and_as_a_page(tmp_path, monkeypatch):
    """The plain loop is fused, too."""
    monkeypatch.setitem(NETWORKS, "tiny", TINY)
    monkeypatch.setattr(table, "on_ranks", here)
    seen = []
    monkeypatch.setattr(table, "side_by_side", lambda rank, store, task, *_: seen.append(task.fused) or ({}, {}))
    table.main(1, networks="tiny", contenders="pb", fused="true")
    assert seen == [True] and Task(TINY, 2, 8, True).optimizer([torch.zeros(1)]).defaults["fused"]
    results.save(FOUND, tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text("utf-8") == results.tables(FOUND)


def test_the_files_of_the_page_are_written_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FILE", tmp_path / "speed" / "table.json")
    monkeypatch.setattr(results, "TABLES", tmp_path / "speed" / "table.md")
    results.save(FOUND, tmp_path / "found.json")
    assert results.load(tmp_path / "found.json") == FOUND
    table.main(1, read=str(tmp_path / "found.json"), page="true")
    assert results.load(results.FILE) == FOUND and results.TABLES.read_text("utf-8") == results.tables(FOUND)
    monkeypatch.setattr(results, "FILE", tmp_path / "nowhere" / "speed" / "table.json")
    with pytest.raises(SystemExit, match="there is no folder .*nowhere; run it where pipeback is developed"):
        results.publish(FOUND)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"networks": "resnet"}, "networks=resnet: there is no 'resnet'; there are resnet20, vgg16, "),
        ({"contenders": "pb,nobody"}, "there is no 'nobody'; there are plain, fused, apart, pb, "),
        ({"page": "yes"}, "page=yes: true or false"),
        ({"page": "true", "networks": "narrow"}, "page=true is for the whole table"),
        ({"fused": "1"}, "fused=1: true or false"),
        ({"page": "true", "fused": "true"}, "page=true is for the whole table"),
        ({"read": "x.json", "fused": "true"}, "read= measures nothing; leave networks=, contenders= and fused= out"),
        ({"out": "nowhere/y.json"}, "there is no folder nowhere; make it first"),
        ({"read": "nowhere.json"}, "read=nowhere.json: No such file"),
        ({"read": results.__file__}, "is no file of `pipeback bench table out=`"),
    ],
)
def test_wrong_options(options, words):
    with pytest.raises(SystemExit, match=words):
        table.main(1, **options)


def test_stages_apart_do_the_arithmetic_of_the_plain_loop(monkeypatch):
    """Bit for bit, also where a tuple crosses a boundary."""
    for network in (TINY, Network("small", "", images("resnet20", width=4), (3, 8, 8), {2: 8}, 10)):
        models: list[nn.Module] = []
        made = Task.model
        monkeypatch.setattr(
            Task, "model", lambda task, made=made, models=models: models.append(made(task)) or models[-1]
        )
        for contender in (plain, apart):
            contender(Task(network, 2, 8), 3).run()
        monkeypatch.undo()
        ours, theirs = (list(model.parameters()) for model in models)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        begin = list(Task(network, 2, 8).model().parameters())
        assert not torch.equal(begin[0], ours[0])


def test_the_peak_is_what_a_piece_of_work_held():
    found = peaks.peak(lambda: torch.ones(8_000_000))
    if found is None:
        pytest.skip("the system does not tell")
    _, use = peaks.used(lambda: torch.ones(8_000_000).sum())
    assert use.held < 16 < use.peak  # what was freed is returned
    assert 31 <= found < 64  # 32 MB of floats; the kernel counts resident pages in batches per processor
