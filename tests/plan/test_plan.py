"""The plan: what it predicts is what is counted; what does not fit is refused, and what it recommends instead fits."""

from itertools import product

import pytest
import torch
from torch import nn

import pipeback
from pipeback.plan import bandwidth
from pipeback.plan.forecast import fills
from pipeback.plan.training_plan import beside, rows, table
from pipeback.streaming import disk_store
from pipeback.streaming.disk_store import DiskStore
from pipeback.streaming.pages import PAGE
from pipeback.streaming.store import HostStore
from tests.helpers.choice import mostly_rare
from tests.laws.cases import CASES, FEW, LATE, STAGES, data, network, pipeline, suited, weights
from tests.plan.planned import SAMPLES, pushed


def planned(pipe, count, pushes):
    """The plan of a steady pipeline, and what it has measured of so many pushes."""
    found = pipe.plan(*pushed(count), pushes=pushes)
    for n in range(fills(found.facts, count)):
        pipe.push(*pushed(count, n))
    before = pipe.traffic()
    for n in range(pushes):
        pipe.push(*pushed(count, n))
    return found, before, pipe.traffic()


# -- bytes -------------------------------------------------------------------------------------------------------------


WAYS = list(product((0, 1, 3), (1, 5)))


@pytest.mark.parametrize(
    ("case", "prefetch", "count"),
    mostly_rare(
        ((case, *way) for case in CASES for way in WAYS),
        *((case, *WAYS[n % len(WAYS)]) for n, case in enumerate(FEW)),
    ),
)
def test_bytes_predicted_are_bytes_counted(case, prefetch, count):
    """Every method: weights in, gradients out, fetches, what is on the device at most, activations."""
    store = HostStore(prefetch=prefetch)
    pipe = pipeline(network(), CASES[case](STAGES), suited(case), micro_batch_size=SAMPLES, store=store)
    found, before, after = planned(pipe, count, 3)
    for name in ("weights_in", "fetches", "gradients_out", "sums_in"):
        expected, counted = 3 * getattr(found.push, name), getattr(after, name) - getattr(before, name)
        assert round(expected) == counted, name
    assert (found.push.peak_weights, found.push.peak_stages) == (after.peak_bytes, after.peak_stages)
    each = {s: p.load.activations for s, p in found.facts.stages.items()}
    held = sum(each[s] * flights for s, flights in found.push.peak_flights.items())
    assert held == pipe.memory().activations
    assert found.device.activations <= held


@pytest.mark.parametrize("case", ["gpipe-4", "pb", "pipedream"])
def test_bytes_of_a_model_with_stages_that_have_no_weights(case):
    model = nn.Sequential(*[layer for block in network(4) for layer in block], nn.Identity())
    pipe = pipeline(model, CASES[case](9), micro_batch_size=SAMPLES, store=HostStore(prefetch=2))
    found, before, after = planned(pipe, 5, 3)
    for name in ("weights_in", "fetches", "gradients_out", "sums_in"):
        assert round(3 * getattr(found.push, name)) == getattr(after, name) - getattr(before, name), name
    assert (found.push.peak_weights, found.push.peak_stages) == (after.peak_bytes, after.peak_stages)


@pytest.mark.parametrize(
    "options", [{"workers": 2}, {"workers": 3}, {"debug": pipeback.Debug(order="upstream")}], ids=str
)
@pytest.mark.parametrize("case", ["pb", "gpipe-4", "pipedream"])
def test_bytes_of_threads_and_other_orders(case, options):
    pipe = pipeline(network(), CASES[case](STAGES), micro_batch_size=SAMPLES, store="host", **options)
    found, before, after = planned(pipe, 4, 2)
    assert 2 * found.push.weights_in == after.weights_in - before.weights_in
    assert 2 * found.push.gradients_out == after.gradients_out - before.gradients_out
    assert found.push.peak_weights == after.peak_bytes


@pytest.mark.parametrize("kept", ["recompute", "host"])
def test_activations_that_are_kept_elsewhere(kept):
    pipe = pipeline(network(), "gpipe", micro_batch_size=SAMPLES, store="host", activations=kept)
    found, _, _ = planned(pipe, 4, 2)
    memory = pipe.memory()
    assert found.host.activations == memory.host
    held = sum(found.facts.stages[s].load.activations * n for s, n in found.push.peak_flights.items())
    assert held + max(p.load.repeat for p in found.facts.stages.values()) == memory.activations


@pytest.mark.parametrize("case", ["gpipe-4", "pb", "cerebras", "pipedream"])
def test_bytes_of_sparse_weights(case):
    """Survivors and their index; dense weights and gradients on the device."""
    pipe = pipeline(
        network(), CASES[case](STAGES), micro_batch_size=SAMPLES, store=pipeback.Streaming("host", sparsity="magnitude")
    )
    found, before, after = planned(pipe, 4, 2)
    for name in ("weights_in", "gradients_out", "sums_in"):
        assert round(2 * getattr(found.push, name)) == getattr(after, name) - getattr(before, name), name
    assert found.push.peak_weights == after.peak_bytes
    assert found.host.weights < sum(p.load.weights for p in found.facts.stages.values())


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_bytes_written_to_files(optimizer, tmp_path, monkeypatch):
    """Of an update: the stage's weights and optimizer state. Of the files: two versions, in whole pages."""
    monkeypatch.setattr(disk_store, "SMALL", 1)
    pipe = pipeline(network(), "gpipe", optimizer, micro_batch_size=SAMPLES, store=DiskStore(tmp_path))
    found, before, after = planned(pipe, 4, 3)
    assert 3 * found.push.written == after.written - before.written
    stage = found.facts.stages[0]
    # a weight of 6×6 and a bias of 6, each at a line of 64 bytes
    assert stage.load.weights == 192 + 64 and stage.trainable == 144 + 24
    assert stage.optimizer == {"sgd": 0, "momentum": 168, "adam": 2 * 168 + 2 * 4}[optimizer]
    regions = 1 + {"sgd": 0, "momentum": 2, "adam": 6}[optimizer]
    assert stage.pages == regions * PAGE
    assert found.disk == 2 * STAGES * regions * PAGE
    assert sum(file.stat().st_size for file in tmp_path.glob("*.pages")) <= found.disk
    assert found.day == pytest.approx(found.push.written / found.push.seconds * 86400)


def test_files_grow_to_two_versions(tmp_path):
    """Wide enough that whole pages hardly round."""
    pipe = pipeline(network(width=64), "gpipe", store=DiskStore(tmp_path), micro_batch_size=SAMPLES)
    x, y = pushed(4, width=64)
    found = pipe.plan(x, y)
    for _ in range(4):
        pipe.push(x, y)
    size = sum(file.stat().st_size for file in tmp_path.glob("*.pages"))
    assert 0.9 * found.disk <= size <= found.disk


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "NAdam", "Adagrad", "RMSprop", "Adafactor", "Rprop"])
def test_what_an_optimizer_keeps_is_found_before_its_first_step(name):
    pipe = pipeline_of(getattr(torch.optim, name))
    stage = pipe._engine.stages[0]
    expected = bandwidth.state_sizes(stage)
    for x, y in data(2 * STAGES):
        pipe.push(x, y)
    pipe.drain()
    kept = [v for own in stage.optimizer.state.values() for v in own.values() if isinstance(v, torch.Tensor)]
    assert expected == [v.numel() * v.element_size() for v in kept] == bandwidth.state_sizes(stage)


def pipeline_of(kind, **options):
    return pipeback.Pipeline(network(), loss=nn.functional.mse_loss, optimizer=kind, method="pb", **options)


def test_an_optimizer_that_takes_no_such_step_is_counted_later():
    class Particular(torch.optim.SGD):
        def step(self, closure=None):
            assert not any(p.is_meta for group in self.param_groups for p in group["params"])
            return super().step(closure)

    pipe = pipeline_of(lambda params: Particular(params, lr=0.1, momentum=0.9))
    assert bandwidth.state_sizes(pipe._engine.stages[0]) == []
    for x, y in data(2 * STAGES):
        pipe.push(x, y)
    assert sum(bandwidth.state_sizes(pipe._engine.stages[0])) == pipe._engine.stages[0].bytes()


def test_host_memory_is_what_lies_there():
    """Weights, momentum, the method's Δ, PipeDream's versions; counted when trained."""
    for case, older, method in (("lwp-weight+sc", 0, 1), ("pipedream", 4, 0)):
        pipe = pipeline(network(), CASES[case](STAGES), micro_batch_size=SAMPLES, store="host")
        found = pipe.plan(*pushed(20))
        pipe.push(*pushed(20))
        one = pipe.memory().weights
        assert found.host.weights == sum(stage.home.flat.memory.nbytes for stage in pipe._engine.stages)
        assert found.host.optimizer == one and found.host.method == method * one
        # D = 4, 3, 2, 1, 0 older versions
        assert found.host.older == sum(range(older + 1)) * one // STAGES
        assert pipe.memory().copies == 1 + found.host.older / one


def test_passes():
    """A flush brings all weights twice, but for what is still there; gradients leave once. Flowing: at every update."""
    pipe = pipeline(network(), "gpipe", micro_batch_size=SAMPLES, store="host")
    found = pipe.plan(*pushed(8))
    # of 2 · 5, the last two stages forward are the first two backward, and the first two the first of the next push
    assert (found.passes, found.gradient_passes) == ((2 * STAGES - 2) / STAGES, 1)
    pipe = pipeline(network(), "pb", micro_batch_size=SAMPLES, store="host")
    found = pipe.plan(*pushed(8))
    assert found.passes >= 8 and found.gradient_passes == 8
    found = pipeline(network(), "pb", micro_batch_size=SAMPLES).plan(*pushed(8))
    assert (found.passes, found.push.stall, found.host.total, found.disk) == (0, 0, 0, 0)


# -- looking at it -----------------------------------------------------------------------------------------------------


def test_a_plan_changes_nothing():
    """Asked before, between and after pushes, of another size too: the same bits."""
    silent, pipe = (pipeline(network(), "pb", micro_batch_size=SAMPLES, store="host") for _ in range(2))
    with pytest.raises(ValueError, match=r"plan: nothing was pushed yet; give it a push: pipe.plan\(x, y\)"):
        pipe.plan()
    pipe.plan(*pushed(3))
    for n in range(4):
        silent.push(*pushed(3, n))
        pipe.push(*pushed(3, n))
        assert pipe.plan().micro_batches == 3 and pipe.plan(*pushed(2)).micro_batches == 2
    assert torch.equal(weights(silent), weights(pipe))


def test_what_is_printed(tmp_path):
    pipe = pipeline(network(), "pb", micro_batch_size=SAMPLES, store=DiskStore(tmp_path, device_memory="1 GB"))
    found, before, after = planned(pipe, 4, 2)
    text = str(found)
    assert text.startswith(
        "PipelinedBackpropagation(slack=2): 5 stages, weights in files, 1 stage fetched ahead; pushes of 4 × 3"
    )
    for name in (
        "on the device",
        "in host memory",
        "in files",
        "weights in per push",
        "waiting",
        "batch window",
        "written per day",
    ):
        assert any(line.startswith(name) for line in text.splitlines()), name
    assert "; the budget is 1 GB" in text
    assert [row[0] for row in rows(found)] == [line.partition("  ")[0] for line in text.splitlines()[1:]]
    exact = {
        "weights in per push",
        "stages fetched per push",
        "gradients out per push",
        "stages on the device",
        "weights on the device",
    }
    compared = beside(found, before, after, 2)
    assert exact <= {name for name, predicted, measured in compared if predicted == measured}
    assert table(found, before, after, 2).splitlines()[0].split() == ["predicted", "measured"]


@pytest.mark.parametrize("case", ["zb_h1-4", "zb_h2-7", "pb-late"])
def test_activations_where_backwards_are_split(case):
    """A micro-batch is held from F to W; beside its graph, W waits with the gradients that came to it."""
    pipe = pipeline(network(), (CASES | LATE)[case](STAGES), micro_batch_size=SAMPLES)
    found, _, _ = planned(pipe, 7, 4)
    stages = pipe._engine.stages
    assert found.push.peak_flights == {stage.index: stage.peak_flights for stage in stages}
    each = {s: p.load.activations for s, p in found.facts.stages.items()}
    held = sum(each[s] * flights for s, flights in found.push.peak_flights.items())
    waiting = sum(stage.gradients.split.bytes * stage.gradients.split.peak for stage in stages)
    shared = sum(stage.learnt.handed_bytes * stage.peak_flights for stage in stages[1:])
    assert held <= pipe.memory().activations == held + waiting + shared
