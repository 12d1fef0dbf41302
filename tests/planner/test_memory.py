"""Bytes of options: parts add up, and methods and schedules differ as they should."""

from dataclasses import replace

import pytest

from pipeback.planner import Model, devices
from pipeback.planner.constants import constants
from pipeback.planner.costs import Costs
from pipeback.planner.memory import footprint
from pipeback.planner.options import Option
from pipeback.planner.precisions import precision
from pipeback.planner.techniques import technique
from pipeback.planner.timing import loads

MODEL = Model.gpt(16, 1024, 16, context=512, tied=False)
COSTS = Costs(devices("16xA100"), constants())


def of(method, numbers="mixed", **more):
    option = Option(technique(method), **{"pipeline": 4, "micro_batches": 8, **more})
    return footprint(option, loads(option, MODEL, COSTS), precision(numbers))


@pytest.mark.parametrize("numbers, each", [("mixed", 18), ("float", 16)])
def test_states_are_so_many_bytes_per_parameter(numbers, each):
    found = of("one_f_one_b", numbers)
    states = sum(some.weights + some.gradients + some.optimizer for some in found.devices)
    assert states == pytest.approx(MODEL.parameters * each)


def test_replicas_share_the_optimizer_out():
    """6 + 12/d bytes per parameter, as Megatron-LM's distributed optimizer has."""
    found = of("one_f_one_b", data=4, shard="optimizer").devices
    states = sum(some.weights + some.gradients + some.optimizer for some in found)
    assert states == pytest.approx(MODEL.parameters * (6 + 12 / 4))


def test_in_flight():
    first = {name: of(name).devices[0].activations for name in ("gpipe", "one_f_one_b", "pb", "zb_h1", "zb_h2")}
    one = first["one_f_one_b"] / 4
    assert first["gpipe"] == pytest.approx(8 * one) and first["pb"] == pytest.approx(7 * one)
    assert first["zb_h1"] == pytest.approx(4 * one) and first["zb_h2"] == pytest.approx(7 * one)
    last = {name: of(name).devices[-1].activations for name in ("one_f_one_b", "zb_h2")}
    assert last["zb_h2"] == pytest.approx(last["one_f_one_b"] * (1 + 6 * 32 / 34))


def test_workers_of_several_stages():
    """ZB-V holds as many micro-batches at every worker as 1F1B at the first; looped BFS holds as GPipe does."""
    flying = [of("zb_v", chunks=2).devices[w].activations for w in range(4)]
    one = of("one_f_one_b").devices[1].activations / 3  # of a worker whose layers are all alike
    assert flying[1:] == pytest.approx([4 * one] * 3, rel=0.06) and max(flying[1:]) <= 4 * one
    assert of("looped_bfs", chunks=2).devices[1].activations == pytest.approx(of("gpipe").devices[1].activations)
    for name in ("zb_v", "looped_bfs"):  # each worker has the weights of its own stages, and all are somewhere
        found = of(name, chunks=2)
        states = sum(some.weights + some.gradients + some.optimizer for some in found.devices)
        assert states == pytest.approx(MODEL.parameters * 18)
    # the first worker has both the embedding and the head
    weights = [[some.weights for some in of(name, chunks=2).devices] for name in ("zb_v", "looped_bfs")]
    assert weights[0][0] > weights[1][0] and weights[0][-1] < weights[1][-1]


def test_zb_v_has_two_stages_per_worker():
    option = Option(technique("zb_v"), pipeline=4, micro_batches=8)
    with pytest.raises(ValueError, match="zb_v has two stages per worker, not 1; give chunks=2"):
        option.check(MODEL, devices("4xA100"))
    replace(option, chunks=2).check(MODEL, devices("4xA100"))


def test_older_versions_and_states():
    weights = of("pb").devices[0].weights
    held = {name: of(name).devices[0].older / weights for name in ("pb", "pipedream", "pipedream_2bw", "pipemare")}
    assert held == {"pb": 0, "pipedream": 3, "pipedream_2bw": 1, "pipemare": 1}
    assert of("pipemare").devices[0].state == pytest.approx(2 * weights)  # one copy as the optimizer steps it


def test_recomputation_keeps_less():
    sizes = [of("gpipe", recompute=way).fullest.activations for way in ("none", "selective", "full")]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 3 * sizes[2]


def test_a_store_has_the_rest():
    host = of("gpipe", pipeline=1, store="host")
    assert host.host == pytest.approx(18 * MODEL.parameters)
    assert host.fullest.total < of("gpipe", pipeline=1).fullest.total - 16 * MODEL.parameters
    disk = of("gpipe", pipeline=1, store="disk")
    assert disk.disk == pytest.approx(2 * 14 * MODEL.parameters) and disk.host < 0.7 * host.host
    shared = of("gpipe", pipeline=1, data=8, shard="all").fullest
    states = shared.weights + shared.optimizer + 4 * MODEL.parameters / 8
    assert states == pytest.approx(18 * MODEL.parameters / 8)


def test_a_tied_weight_is_on_both_ends():
    tied = replace(MODEL, tied=True)
    option = Option(technique("one_f_one_b"), pipeline=4, micro_batches=8)
    ends = [sum(load.parameters for load in loads(option, model, COSTS)) for model in (MODEL, tied)]
    assert ends[1] - ends[0] == MODEL.layers[0].parameters
