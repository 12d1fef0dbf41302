"""`pipeback bench`: which sections run, and the code of some, tiny. No times are asserted.

The table is tested in test_bench_table.py.
"""

import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy

from pipeback import methods
from pipeback.private import version
from pipeback.recipes import bench, foreign
from pipeback.recipes.benches import (
    against,
    auto,
    autocast,
    contenders,
    deep,
    event_loop,
    lightning_devices,
    processes,
    push_length,
    pushes,
    research,
    scaling,
    splitting,
    streamed_as_one,
    streamed_devices,
    turns,
    under_lightning,
    vectorized,
)
from pipeback.recipes.benches.by_hand import ByHand
from pipeback.recipes.benches.contenders import Case
from pipeback.recipes.benches.network import network, pipeline
from pipeback.recipes.benches.tasks import Network, Task
from pipeback.recipes.benches.vectorized import Linear, blocks


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    """A turn takes as long as it takes, and among the garbage of others: nothing is said here about speed."""
    monkeypatch.setattr(turns, "LEAST", 1e-6)
    monkeypatch.setattr(turns, "gc", NOTHING)


ROOT = Path(__file__).parents[2]
NOTHING = SimpleNamespace(collect=lambda: 0)


def hastily(rank, store, *given):
    """The same in a process that is new."""
    turns.LEAST, turns.gc = 1e-6, NOTHING
    return processes.measured(rank, store, *given)


def cells(out):
    """The rows of a table in Markdown."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line.startswith("|")]


def test_sections_are_chosen_by_name(monkeypatch, capsys):
    assert bench.parsed([]) == (9, [name for name in bench.SECTIONS if name not in bench.NAMED], {})
    assert bench.parsed(["processes", "repeats=3", "memory"]) == (
        3, ["processes", "memory"], {"processes": {}, "memory": {}}
    )  # fmt: skip
    for wrong in ("process", "repeats=0", "processes=1", "networks=", "network=narrow"):
        with pytest.raises(
            SystemExit,
            match=rf"'{wrong}' is not an option; there are table, .* and repeats=9, and of table networks= ",
        ):
            bench.parsed([wrong])
    assert bench.parsed(["table", "networks=narrow", "scaling", "slack=1"])[2] == {
        "table": {"networks": "narrow"}, "scaling": {"slack": "1"}
    }  # fmt: skip
    with pytest.raises(SystemExit, match="networks= is an option of table; name that too: pipeback bench table ..."):
        bench.parsed(["networks=narrow", "scaling"])
    with pytest.raises(SystemExit, match=r"there is no case 'tiny'; there are cases=large,small"):
        processes.main(1, cases="large,tiny")
    monkeypatch.setattr(sys, "argv", ["pipeback bench", "imports", "repeats=1"])
    bench.main()
    out = capsys.readouterr().out
    assert (
        out.startswith("```shell\npipeback bench imports repeats=1\n```\n\nMeasured on ") and ", load before: " in out
    )
    assert "import pipeback, with its Pipeline, beyond import torch" in out


@pytest.mark.soak
def test_processes_take_turns(capfd, monkeypatch):
    monkeypatch.setattr(processes, "on_ranks", lambda work, *given: turns.on_ranks(hastily, *given, start="forkserver"))
    monkeypatch.setattr(processes, "CASES", [Case("tiny", width=8, length=4, samples=2, turn=16, layers=4)])
    processes.main(2, fused="true")
    assert Case("tiny", 8, 4, 2, 16, fused=True).optimizer([torch.zeros(1)]).defaults["fused"]
    out = capfd.readouterr().out
    assert "4 transformer layers of width 8, sequence 4, micro-batch 2" in out
    for name in ("two plain loops", "pb, threads", "pb, gloo", "pb, shared_memory", "gpipe 8", "Schedule1F1B 4",
                 "interleaved 8", "ScheduleInterleaved1F1B 8", "zb_h1 8", "ScheduleInterleavedZeroBubble 8",
                 "zb_v 8", *(["ScheduleZBVZeroBubble 8"] if version() >= (2, 14) else [])):  # fmt: skip
        assert f"\n| {name} " in out, name
    assert all(float(row[2].split()[0]) > 0 for row in cells(out) if len(row) == 3 and row[1][:1].isdigit())
    assert "| the better peer at 4 " in out and "| the best at 8: " in out and "| ScheduleGPipe 8 " in out
    assert re.search(r"Weights that a rank holds, of 0.0 MB: \d+.\d%, \d+.\d%\.\n", out)


def test_the_power_of_a_law():
    sizes = [10, 50, 100, 500]
    assert scaling.power(sizes, [3e-4 * size for size in sizes]) == pytest.approx(1)
    assert scaling.power(sizes, [7 * size**2.5 for size in sizes]) == pytest.approx(2.5)
    assert scaling.power([1, 2, 4], [1, 4, 4]) == pytest.approx(1)  # the slope between the ends, here


@pytest.mark.soak
def test_scaling_with_few_stages(capfd, monkeypatch):
    monkeypatch.setattr(scaling, "on_ranks", lambda work, *given, ranks: work(0, "", *given))  # in this process
    for other in (deep, push_length):
        monkeypatch.setattr(other, "on_ranks", scaling.on_ranks)
    scaling.main(1, stages="4,8", methods="pb,pipedream", slack="1", micro_batches="20,40")
    out = capfd.readouterr().out
    for end in ("event loop", '`vectorize="auto"`'):
        lengths = re.findall(
            rf"\n\| {re.escape(end)} +\| +(\d+) \| +[\d.]+ \(.*?\) \| +[\d.]+ \(.*?\) \| +(\S+) \|", out
        )
        assert [length for length, _ in lengths] == ["20", "40"]
        once = re.findall(rf"\n\| {re.escape(end)} +\| +([48]) (\| +\d+\.\d\d ){{5}}\|", out)
        assert [stages for stages, _ in once] == ["4", "8"]
    assert re.search(r"\n`pb`, slack 1: power -?\d+\.\d\d", out)
    declared = {"pb": ("1.00", "1.00"), "pipedream": ("2.65", "4.75")}  # 1 + S − 1 − s, weighed by size
    by_hand = r"by hand, slack 1: power -?\d+\.\d\d\n\n.*`pb` over.*\n.*\n\| +4 \| +10 \|.*\n\| +8 \| +36 \|"
    assert re.search(by_hand, out)
    rows = re.findall(r"\n\| +(4|8) \| +([\d,]+) \| .*? … [\d.]+\) \| +([\d.]+) \| +([\d.]+) ", out)
    assert [(int(n), flying) for n, flying, *_ in rows] == [(4, "10"), (8, "36")] * 2
    assert all(copies == said for *_, copies, said in rows)
    assert [said for *_, said in rows[:2]] == list(declared["pb"])


@pytest.mark.parametrize("slack", [1, 2])
def test_a_pipeline_by_hand_trains_what_pb_does(slack):
    """So its time is that of the same work."""
    mine = ByHand(list(network(4, 8)), cross_entropy, slack)
    pipe = pipeline(methods.create("pb", slack=slack), 4, 8, micro_batch_size=1)
    x, y = torch.randn(20, 8), torch.randint(0, 10, (20,))
    mine.push(x, y)
    pipe.push(x, y)
    assert [len(flying) for flying in mine.flying] == [slack * ahead for ahead in (3, 2, 1, 0)]
    assert all(map(torch.equal, mine.params, pipe.model.parameters()))
    assert not torch.equal(mine.params[0], next(network(4, 8).parameters()))


def test_by_hand_stages_may_hand_on_several_tensors():
    """As the halves of a residual block do."""
    task = event_loop.CASES["ResNet-20, one stage per layer"][0]
    mine = ByHand(list(task.model()), task.loss, slack=1)
    pipe = contenders.build(task, methods.create("pb", slack=1))
    x, y = task.data(21)
    mine.push(x, y)
    pipe.push(x, y)
    assert all(map(torch.equal, mine.params, pipe.model.parameters()))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stages": "1,5"}, "stages=1,5: whole numbers from 2 on, like stages=16,64"),
        ({"slack": "x"}, "slack=x: whole numbers from 0 on"),
        ({"methods": "gpipe"}, "there is no 'gpipe' with a slack; there are .*pb"),
    ],
)
def test_wrong_options_of_scaling(options, words):
    with pytest.raises(SystemExit, match=words):
        scaling.main(1, **options)


def test_the_event_loop_is_measured_a_stage_a_block_and_a_layer(capsys, monkeypatch):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 32, 32)
    one, other = (event_loop.CASES[f"ResNet-20, one stage per {what}"][0].model() for what in ("block", "layer"))
    assert (len(one), len(other)) == (11, 20)
    assert torch.equal(one(x), other(x))
    task = Task(Network("tiny", "", partial(blocks, Linear, 3, 8), (8,), {}, 8), 1, 4)
    monkeypatch.setattr(event_loop, "CASES", {"three layers": (task, ("pb", "cerebras"))})
    event_loop.main(2)
    head, _, *rows = cells(capsys.readouterr().out)
    assert head[0] == "three layers"
    named = [["plain loop", "–"], ["by hand", "–"], ["`pb`", "4"], ["`cerebras`", "4"]]
    assert [row[:2] for row in rows] == named
    assert rows[0][-1] == "1.00 (1.00 … 1.00)"
    assert all(float(row[-1].split()[0]) > 0 for row in rows)


@pytest.mark.soak
def test_short_pushes_over_a_long_one(capsys, monkeypatch):
    some = (pushes.USUAL, "AdamW, `clip_norm=1.0`", "NAdam")
    monkeypatch.setattr(pushes, "OTHERS", {name: pushes.OTHERS[name] for name in some})
    pushes.main(1, [vectorized.Case("tiny", Linear, 4, (1, 8), 6)], short=2, shortest=(1, 3), lengths=(2,))
    told, rest = capsys.readouterr().out.split("Samples per second of stages as one")
    shortest, others = rest.split("Samples per second with vectorize")
    head, _, *rows = cells(others)
    assert head == ["tiny", "pushes of 2"] and len(rows) == len(pushes.OTHERS) + len(pushes.OTHER_METHODS)
    assert [row[0] for row in rows[-2:]] == ["`pipemare`, 4 per update", "`pipedream_2bw`, S per update"]
    head, _, *rows = cells(shortest)
    assert head == ["tiny", "pushes of 1", "pushes of 3"] and [row[0] for row in rows] == ["`pb`", "`cerebras`"]
    assert all(float(cell.split()[0]) >= 0 for row in rows for cell in row[1:])
    head, _, *rows = cells(told)
    assert head == ["tiny", "pushes, each loss read", "of one of 6"]
    assert [row[:2] for row in rows] == [
        [f"`{method}`, {end}", "3 × 2"] for end in ("as one", "event loop") for method in ("pb", "cerebras")
    ]
    assert all(float(row[2].split()[0]) > 0 for row in rows)


def test_cutting_and_handing_on(capsys, monkeypatch):
    """However often one micro-batch is pushed, the weights stay."""
    weight = torch.ones(3, requires_grad=True)
    optimizer, weight.grad = splitting.STILL([weight]), torch.ones(3)
    optimizer.step()
    assert torch.equal(weight, torch.ones(3)) and optimizer.state[weight]["momentum_buffer"].all()
    small = foreign.build("lstm")._replace(cuts=("layer",))
    monkeypatch.setattr(splitting, "build", lambda name: small)
    monkeypatch.setattr(splitting, "SIZES", {"tiny": (8, 1)})
    monkeypatch.setattr(splitting, "COUNT", 1)
    splitting.main(1)
    told = cells(capsys.readouterr().out)
    assert told[0][0] == "resnet50" and told[2][:2] == ["one stage per layer", "4"]
    assert told[-1][0] == "tiny" and float(told[-1][1]) > 0


@pytest.mark.soak
def test_research_by_method_over_the_plain_loop(capsys, monkeypatch):
    """Losses fall: it is the recipe's network on text, and every push trains it."""
    methods = {name: research.METHODS[name] for name in ("pb", "eigendelay", "eigendelay block=12")}
    monkeypatch.setattr(research, "METHODS", methods)
    case = research.Case(depth=1, width=8, context=4, batch=2, turn=2)
    research.main(1, case)
    head, _, *rows = cells(capsys.readouterr().out)
    assert head == ["4 stages, width 8, batch 2, AdamW", "CPU ms/update", "of plain"]
    assert [row[0] for row in rows] == ["plain loop", "`pb`, event loop", *(f"`{name}`" for name in methods)]
    assert rows[0][2] == "1.00" and all(float(row[1].split()[0]) > 0 and float(row[2]) > 0 for row in rows)
    push = research.pushed(case, "pb", vectorize=True)
    losses = torch.stack([push() for _ in range(400)])
    assert losses[-50:].mean() < losses[:50].mean() - 0.2
    turns = []
    research.train(case, "pb", False, (turns.append(None) for _ in range(2)))
    assert len(turns) == 2 and len(research.rows()) == 4


def test_auto_beside_what_it_goes_by(capsys, monkeypatch):
    monkeypatch.setattr(auto, "METHODS", ("pb", "gpipe"))
    auto.main(1, [vectorized.Case("tiny", Linear, 4, (1, 8), 8)])
    head, _, *rows = cells(capsys.readouterr().out)
    assert head == ["tiny, over the event loop", "as one", "F and B", "auto", "it chose"]
    assert [row[0] for row in rows] == ["`pb`", "`gpipe`"]
    assert all(re.fullmatch(r"[\d.]+ \([\d.]+ … [\d.]+\)", row[n]) for row in rows for n in (1, 3))
    assert all(float(row[2]) > 0 and row[4].startswith(("as one", "stage by stage")) for row in rows)


@pytest.mark.soak
@pytest.mark.parametrize("several", [False, True])
def test_a_tree_against_itself(several, capsys, monkeypatch):
    task = Task(Network("tiny", "", partial(blocks, Linear, 3, 8), (8,), {}, 8), 1, 4)
    monkeypatch.setattr(event_loop, "CASES", {"three layers": (task, ("pb",))})
    monkeypatch.setattr(vectorized, "CASES", [vectorized.Case("tiny", Linear, 2, (1, 8), 4)])
    sections = ["event_loop", *["vectorized"] * several]
    monkeypatch.setattr(sys, "argv", ["pipeback bench", *sections, f"against={ROOT}", "repeats=1"])
    bench.main()
    head, _, *rows = cells(capsys.readouterr().out)
    assert head == ["section", "network", "method", "before / now", "quartiles", "wall clock"]
    assert [row[0] for row in rows] == ["event_loop", *["vectorized"] * 5 * several, "imports", "imports", "median"]
    assert rows[0][2] == "`pb`" and rows[-2][2] == "`import pipeback`"
    assert not several or rows[1][2] == "pb, event loop"
    assert all(float(row[3]) > 0 and re.fullmatch(r"[\d.]+ … [\d.]+", row[4]) for row in rows)


@pytest.mark.soak
def test_what_is_compared_under_lightning_trains_turn_by_turn():
    """In this process: the batches of all turns are trained."""
    seen = []
    under_lightning.train("pb", False, (seen.append(None) for _ in range(2)))
    assert len(seen) == 2
    assert len(under_lightning.rows()) == 8


def test_stages_of_a_store_run_as_one_or_one_by_one(capsys):
    streamed_as_one.pushes(1, [vectorized.Case("tiny", Linear, 6, (1, 8), 4)], [("host", 3), ("disk", 3)])
    head, _, *rows = cells(capsys.readouterr().out)
    assert head == ["tiny", "ms/micro-batch", "of resident"]
    assert [row[0] for row in rows][:5] == [
        "`pb`, resident",
        "`pb`, host, `prefetch=3`",
        "`pb`, host, `prefetch=3`, as one",
        "`pb`, disk, `prefetch=3`",
        "`pb`, disk, `prefetch=3`, as one",
    ]
    assert len(rows) == 10 and all(float(row[1]) > 0 for row in rows)
    assert rows[0][2] == rows[5][2] == "1.00 (1.00 … 1.00)"
    with pytest.raises(SystemExit, match="store='floppy' is unknown; there are host, disk"):
        streamed_as_one.main(1, store="floppy")


def test_autocast(capsys, monkeypatch):
    autocast.pushes(1, [vectorized.Case("tiny", Linear, 6, (1, 8), 4)])
    head, _, *rows = cells(capsys.readouterr().out)
    assert head == ["tiny", "ms/micro-batch", "of the plain loop"] and rows[0][2] == "1.00 (1.00 … 1.00)"
    assert len(rows) == 5 and all(float(row[1]) > 0 for row in rows)
    tiny = under_lightning.NARROW._replace(build=partial(network, 5), stages=5)
    for where in (under_lightning, lightning_devices, autocast):
        monkeypatch.setattr(where, "ONES", (tiny,))
    monkeypatch.setattr(under_lightning, "COUNT", 1)
    monkeypatch.setattr(lightning_devices, "BATCHES", 3)
    autocast.fits(1, [0])
    _, _, row = cells(capsys.readouterr().out)
    assert row[0] == '`"auto"`, over stages one by one' and float(row[1].split()[0]) > 0


def test_fits_whose_stages_come_from_a_store(capsys, monkeypatch):
    tiny = under_lightning.NARROW._replace(build=partial(network, 5), stages=5)
    for where in (under_lightning, lightning_devices, streamed_as_one):
        monkeypatch.setattr(where, "ONES", (tiny,))
    monkeypatch.setattr(under_lightning, "COUNT", 1)
    monkeypatch.setattr(lightning_devices, "BATCHES", 3)
    streamed_as_one.fits(1, [0], [("disk", 3)])
    _, _, *rows = cells(capsys.readouterr().out)
    assert [row[0] for row in rows] == [
        "resident",
        "resident, as one",
        "disk, `prefetch=3`",
        "disk, `prefetch=3`, as one",
    ]
    assert rows[0][1] == "1.00 (1.00 … 1.00)"


@pytest.mark.soak
def test_fits_of_threads(capsys, monkeypatch):
    tiny = under_lightning.NARROW._replace(build=partial(network, 5), stages=5)
    for where in (under_lightning, lightning_devices):
        monkeypatch.setattr(where, "ONES", (tiny,))
    monkeypatch.setattr(under_lightning, "COUNT", 1)
    monkeypatch.setattr(lightning_devices, "BATCHES", 3)
    monkeypatch.setattr(lightning_devices, "CASES", (0,))
    lightning_devices.compare([fit for fit in streamed_devices.FITS if fit.devices == 1], 1)
    _, _, *rows = cells(capsys.readouterr().out)
    assert [row[0] for row in rows] == [
        "two threads, over one device", "one device, as one, over one device", "two threads, as one, over one device",
        "two threads, as one, over one device, as one",
    ]  # fmt: skip
    assert all(float(row[1].split()[0]) > 0 for row in rows)


def test_a_tree_that_is_none(tmp_path):
    with pytest.raises(SystemExit, match="there is no pipeback/__init__.py in it; .* git worktree add --detach"):
        against.main(1, {}, str(tmp_path))


def test_what_bounds_lightning_is_all_that_a_batch_takes_at_least():
    case = under_lightning.NARROW._replace(build=partial(network, 4), stages=4)
    *parts, bound = (float(cell.split()[0]) for cell in under_lightning.bounds(case, 1))
    assert len(parts) == 3 and all(part >= 0 for part in parts)
    assert bound == pytest.approx(1 / sum(parts), rel=0.1)
