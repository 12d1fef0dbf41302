"""`pipeback bench`: which sections run, and the code of `processes`, tiny. No times are asserted."""

import re
import sys

import pytest

from pipeback.recipes import bench
from pipeback.recipes.benches import processes
from pipeback.recipes.benches.contenders import Case


def test_sections_are_chosen_by_name(monkeypatch, capsys):
    assert bench.parsed([]) == (9, list(bench.SECTIONS))
    assert bench.parsed(["processes", "repeats=3", "memory"]) == (3, ["processes", "memory"])
    for wrong in ("process", "repeats=0", "processes=1"):
        with pytest.raises(SystemExit, match=rf"'{wrong}' is not an option; there are event_loop, .* and repeats=9"):
            bench.parsed([wrong])
    monkeypatch.setattr(sys, "argv", ["pipeback bench", "imports", "repeats=1"])
    bench.main()
    assert "import pipeback, with its Pipeline, beyond import torch" in capsys.readouterr().out


def test_processes_take_turns(capfd):
    processes.main(2, [Case("tiny", width=8, length=4, samples=2, turn=16, layers=4)])
    out = capfd.readouterr().out
    assert "4 transformer layers of width 8, sequence 4, micro-batch 2" in out
    for name in ("two plain loops", "pb, threads", "pb, gloo", "pb, shared_memory", "gpipe 8", "Schedule1F1B 4"):
        assert f"\n{name} " in out, name
    assert "over the better peer at 4" in out and "over ScheduleGPipe 8" in out
    assert re.search(r"weights that a rank holds, of 0.0 MB: \d+.\d%, \d+.\d%\n", out)
