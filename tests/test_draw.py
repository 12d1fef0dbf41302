"""Grids, pictures and the trace of a real run."""

import json
from itertools import pairwise

import matplotlib
import pytest

from pipeback import draw
from pipeback.events import Op
from pipeback.schedules import fill_drain, flowing
from pipeback.timeline import timeline
from tests.laws.cases import CASES, STAGES, data, network, pipeline, weights

matplotlib.use("Agg")
from matplotlib import pyplot as plt


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_picture_has_a_box_an_operation(ending, tmp_path):
    ax = draw.picture(timeline(flowing(2), 4, 8), title="PB")
    assert len(ax.patches) == 2 * 4 * 8
    assert {text.get_text() for text in ax.texts} == {str(i) for i in range(8)}
    ax.figure.savefig(tmp_path / f"pb.{ending}")
    assert (tmp_path / f"pb.{ending}").stat().st_size > 3000
    plt.close("all")


def test_schedules_on_one_axis(tmp_path):
    figure = draw.compare({"GPipe": fill_drain(4), "PB": flowing(2)}, 4, 20, until=30)
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    assert titles[0].startswith("GPipe") and titles[1].startswith("PB")
    plt.close("all")


def test_nothing_to_draw_is_said():
    with pytest.raises(ValueError, match="nothing to draw"):
        draw.picture([])
    pipe = pipeline(network(), "pb")
    pipe.push(*data(1)[0])
    with pytest.raises(ValueError, match=r"call pipe.record\(\) before the pushes"):
        draw.measured(pipe)


@pytest.mark.parametrize("workers", [None, 2])
def test_the_trace_of_a_real_run(workers, tmp_path):
    """Every operation of the run is in it once, with its time, on the track of its worker, in an order data allows."""
    silent, pipe = (pipeline(network(), CASES["cerebras"](STAGES), workers=w) for w in (None, workers))
    pipe.record()
    for x, y in data(12):
        silent.push(x, y)
        pipe.push(x, y)
    silent.drain()
    pipe.drain()
    assert (weights(silent) == weights(pipe)).all()  # measuring changes no bit
    written = draw.trace(pipe, tmp_path / "run.json")
    loaded = json.loads((tmp_path / "run.json").read_text())
    assert loaded == written and loaded["otherData"]["stages"] == STAGES
    events = [e for e in loaded["traceEvents"] if e["ph"] == "X"]
    owner = pipe.owner
    starts = {(e["args"]["operation"], e["args"]["stage"], e["args"]["micro-batch"]): e["ts"] for e in events}
    assert len(events) == len(starts) == 3 * STAGES * 12
    for e in events:
        assert e["tid"] == owner[e["args"]["stage"]] and e["dur"] > 0 and e["ts"] >= 0
        kind, s, i = e["args"]["operation"], e["args"]["stage"], e["args"]["micro-batch"]
        if kind == "forward" and s:
            assert starts["forward", s - 1, i] <= e["ts"]  # its end is noted after the message has left
        if kind == "backward" and s < STAGES - 1:
            assert starts["backward", s + 1, i] <= e["ts"]
    for worker in set(owner):
        mine = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["tid"] == worker)
        assert all(a[1] <= b[0] + 1e-3 for a, b in pairwise(mine))
    assert 0 <= loaded["otherData"]["bubble"] < 1
    assert draw.measured(pipe)[0].op == Op("F", 0)
    pipe.close()
