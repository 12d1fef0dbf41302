"""The measured timeline of several ranks: on one clock, in one file, without a changed bit."""

import importlib
import json
import time

import pytest
import torch.distributed as dist

from pipeback import draw
from pipeback.draw import perfetto as traces
from tests.helpers.processes import fork_for_spawn
from tests.helpers.tracing import check_events
from tests.laws.cases import CASES, STAGES, data, network, pipeline, weights


def watched(path, record):
    """Train; rank 1's clock is 1000 s ahead and runs 1 % fast. What was recorded, and when the own part truly was."""
    true = time.perf_counter
    if dist.is_initialized() and dist.get_rank() == 1:
        time.perf_counter = lambda: 1.01 * true() + 1000
    try:
        pipe = pipeline(network(width=32), CASES["cerebras"](STAGES))
        batches = data(14, width=32)
        pipe.push(*batches[0])
        pipe.drain()
        if record:
            pipe.record()
        for x, y in batches[1:]:
            pipe.push(x, y)
        pipe.drain()
        written, recording, times = None, None, []
        if record:
            written = draw.trace(pipe, path, "cerebras")
            recording = draw.measured(pipe)
            for start, *_ in pipe._engine.loops[0].worker.trace:
                times.append((start - 1000) / 1.01 if time.perf_counter is not true else start)
        result = weights(pipe), pipe.owner, written, recording, times
        pipe.close()
        return result
    finally:
        time.perf_counter = true


def test_one_trace_of_two_ranks_on_one_clock(crew, tmp_path):
    path = tmp_path / "run.json"
    wanted = watched(path, False)[0]
    found = crew.ranks(2).run(watched, str(path), True)
    (_, owner, written, recording, first), (_, _, theirs, _, second) = found
    assert all((result[0] == wanted).all() for result in found)  # measuring changes no bit
    loaded = json.loads(path.read_text())
    assert loaded == written and theirs["otherData"]["name"] == "cerebras" == loaded["otherData"]["name"]
    assert [t.name.partition(" (")[0] for t in recording.tracks] == ["rank 0", "rank 1"] and set(owner) == {0, 1}
    # the method promises this bound: no test of speed
    assert 0 < recording.uncertainty < 1
    for track, times in zip(recording.tracks, (first, second), strict=True):
        for slot, moment in zip(track.slots, times, strict=True):
            assert abs(slot.start - (moment - first[0])) <= 1.02 * recording.uncertainty
    check_events(written, owner, early=1e6 * recording.uncertainty)
    assert len(recording) == 3 * STAGES * 13


def forgotten():
    pipe = pipeline(network(), "pb")
    pipe.push(*data(1)[0])
    with pytest.raises(ValueError, match=r"call pipe.record\(\) before the pushes"):
        draw.trace(pipe, "run.json")
    pipe.close()


def test_a_trace_that_was_not_recorded(crew):
    crew.ranks(2).run(forgotten)


def test_the_command_runs_and_measures(tmp_path, monkeypatch):
    fork_for_spawn(monkeypatch)
    pytest.importorskip("matplotlib")
    pytest.importorskip("hydra")
    cli = importlib.import_module("tests.recipes.cli")
    command = "draw method=gpipe:micro_batches=4 --run run.json --stages 4 --micro-batches 8 ranks=2 out=run.png"
    done = cli.pipeback(*command.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    recording = traces.read(tmp_path / "run.json")
    assert recording.name == "gpipe:micro_batches=4" and recording.micro_batches() == 8
    assert [track.name.partition(" (")[0] for track in recording.tracks] == ["rank 0", "rank 1"]
    check_events(json.loads((tmp_path / "run.json").read_text()), recording.owner, early=1e6 * recording.uncertainty)
    assert draw.summary(recording) in done.stdout and (tmp_path / "run.png").stat().st_size > 10_000
    if recording.owner == [0, 0, 1, 1]:  # stages are placed by what they took
        assert recording.unit().idle().share == pytest.approx(1 / 5, abs=1e-12)
