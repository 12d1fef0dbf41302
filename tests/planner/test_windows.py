"""Windows: the edges are where computing takes as long as moving, and where the bytes of an option fill the device."""

from dataclasses import replace

import pytest

from pipeback.planner import Model
from pipeback.planner.constants import best_for
from pipeback.planner.costs import Costs
from pipeback.planner.hardware import Cluster, Link, device
from pipeback.planner.memory import MARGIN, footprint
from pipeback.planner.options import Option
from pipeback.planner.precisions import precision
from pipeback.planner.techniques import technique
from pipeback.planner.timing import loads
from pipeback.planner.windows import lines, window

MODEL = Model.named("gpt:13b")
H100 = device("H100")


def edges(found):
    return {edge.name: edge.tokens for edge in found.lows}


def test_the_lower_edge_is_peak_over_link_for_weights_of_two_bytes():
    """T = β/2 · F/W with the FLOP per second that is reached; attention takes a little more."""
    wafer = device("CS-2")
    found = window(MODEL, wafer)
    assert found.low.name == "forward"
    assert found.low.tokens == pytest.approx(found.reached / wafer.host.speed, rel=0.05)
    assert found.low.tokens < wafer.intensity, "no device reaches its peak"


@pytest.mark.parametrize("name", ["H100", "GH200", "CS-2"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_computing_takes_as_long_as_moving_at_the_edge(name, recompute):
    found = window(MODEL, device(name), recompute=recompute, store="disk")
    for phase, tokens in {**edges(found), "": found.low.tokens}.items():
        points = lines(found, points=2000, phase=phase)
        crossing = next(point.tokens for point in points if point.computing >= point.moving)
        assert crossing == pytest.approx(max(tokens, points[0].tokens), rel=0.01)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_the_upper_edge_is_where_the_bytes_of_an_option_fill_the_device(recompute, prefetch):
    found = window(MODEL, H100, recompute=recompute, prefetch=prefetch)
    most = int(found.high.tokens / MODEL.context)

    def bytes_of(micro_batches):
        one = Option(technique("gpipe"), micro_batches=micro_batches, recompute=recompute, store="host",
                     prefetch=prefetch)  # fmt: skip
        costs = Costs(Cluster(H100), best_for("H100", "none"))
        return footprint(one, loads(one, MODEL, costs), precision("mixed")).fullest.total

    assert bytes_of(most) <= H100.memory * (1 - MARGIN) < bytes_of(most + 1)


def test_every_edge_follows_what_moves_it():
    before = edges(window(MODEL, H100, store="disk"))
    assert before.keys() == {"forward", "backward", "optimizer", "disk"}
    fast = edges(window(MODEL, replace(H100, host=Link(2 * H100.host.speed)), store="disk"))
    assert fast["forward"] == pytest.approx(before["forward"] / 2, rel=0.05)
    assert fast["optimizer"] == before["optimizer"] and fast["disk"] == before["disk"]
    slow = edges(window(MODEL, replace(H100, disk_read=1e9, disk_write=1e9), store="disk"))
    assert slow["disk"] / before["disk"] == pytest.approx(2 / (1e9 / H100.disk_read + 1e9 / H100.disk_write), rel=0.05)
    larger = replace(H100, memory=H100.memory + 20e9)
    few, more = window(MODEL, H100).high, window(MODEL, larger).high
    inputs = sum(layer.entry for layer in MODEL.layers) / MODEL.context
    assert more.tokens - few.tokens == pytest.approx(20e9 * (1 - MARGIN) / inputs, rel=1e-6)


def test_an_empty_window_says_so():
    found = window(MODEL, H100, recompute="none")
    assert not found.open and "the window is empty" in str(found)
    assert window(MODEL, H100).open and "the window is open" in str(window(MODEL, H100))
    assert "memory" in str(found) and "kB of activations per token" in str(found)


def test_a_model_that_fills_the_device_alone_has_no_upper_edge():
    assert window(Model.named("gpt:1t"), replace(H100, memory=5e9)).high.tokens == 0
