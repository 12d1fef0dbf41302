"""The plan: what it predicts is what is counted; what does not fit is refused, and what it recommends instead fits."""

import re
from itertools import product

import pytest
import torch
from torch import nn

import pipeback
from pipeback import methods
from pipeback.plan import bandwidth
from pipeback.plan.budget import check
from pipeback.plan.dry_run import DryWorker, Load, Room, drive
from pipeback.plan.forecast import fills, foresee
from pipeback.plan.survey import survey
from pipeback.plan.training_plan import beside, plan, rows, table
from pipeback.runtime.loop import Loop
from pipeback.schedules.order import Order
from pipeback.streaming import byte_sizes, disk_store
from pipeback.streaming.disk_store import DiskStore
from pipeback.streaming.pages import PAGE
from pipeback.streaming.store import HostStore
from tests.choice import mostly_rare
from tests.laws.cases import CASES, STAGES, allowed, data, network, pipeline, weights

SAMPLES = 3


@pytest.fixture(autouse=True)
def a_short_search(monkeypatch):
    """For a window: it takes most of the time of a plan."""
    monkeypatch.setattr("pipeback.plan.training_plan.WORK", 2000)


@pytest.fixture(autouse=True)
def all_are_closed(monkeypatch):
    """Or their threads and tensors would be there in the tests that count such."""
    made, build = [], pipeback.Pipeline.__init__

    def noted(self, *args, **options):
        build(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(pipeback.Pipeline, "__init__", noted)
    yield
    for pipe in made:
        pipe.close()


def pushed(count, seed=1, width=6):
    return tuple(torch.cat(part) for part in zip(*data(count, samples=SAMPLES, width=width, seed=seed), strict=True))


def planned(pipe, count, pushes):
    """The plan of a steady pipeline, and what it has measured of so many pushes."""
    found = pipe.plan(*pushed(count), pushes=pushes)
    for n in range(fills(found.facts, count)):
        pipe.push(*pushed(count, n))
    before = pipe.traffic()
    for n in range(pushes):
        pipe.push(*pushed(count, n))
    return found, before, pipe.traffic()


def optimizer_of(case):
    return next(name for name in ("momentum", "sgd") if allowed(case, name))


# -- bytes -------------------------------------------------------------------------------------------------------------


WAYS = list(product((0, 1, 3), (1, 5)))


@pytest.mark.parametrize(
    ("case", "prefetch", "count"),
    mostly_rare(
        ((case, *way) for case in CASES for way in WAYS),
        *((case, *WAYS[n % len(WAYS)]) for n, case in enumerate(CASES)),
    ),
)
def test_bytes_predicted_are_bytes_counted(case, prefetch, count):
    """Every method: weights in, gradients out, fetches, what is on the device at most, activations."""
    store = HostStore(prefetch=prefetch)
    pipe = pipeline(network(), CASES[case](STAGES), optimizer_of(case), micro_batch_size=SAMPLES, store=store)
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


@pytest.mark.parametrize("options", [{"workers": 2}, {"workers": 3}, {"order": "upstream"}], ids=str)
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
    pipe = pipeline(network(), CASES[case](STAGES), micro_batch_size=SAMPLES, store="host", sparsity="magnitude")
    found, before, after = planned(pipe, 4, 2)
    for name in ("weights_in", "gradients_out", "sums_in"):
        assert round(2 * getattr(found.push, name)) == getattr(after, name) - getattr(before, name), name
    assert found.push.peak_weights == after.peak_bytes
    assert found.host.weights < sum(p.load.weights for p in found.facts.stages.values())


def survey_of(pipe, x, y=None):
    pipe.plan(x, y)
    return survey(pipe._holding, pipe._setting, len(x))


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
    stage = pipe._stages[0]
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
    assert bandwidth.state_sizes(pipe._stages[0]) == []
    for x, y in data(2 * STAGES):
        pipe.push(x, y)
    assert sum(bandwidth.state_sizes(pipe._stages[0])) == pipe._stages[0].bytes()


def test_host_memory_is_what_lies_there():
    """Weights, momentum, the method's Δ, PipeDream's versions; counted when trained."""
    for case, older, method in (("lwp-weight+sc", 0, 1), ("pipedream", 4, 0)):
        pipe = pipeline(network(), CASES[case](STAGES), micro_batch_size=SAMPLES, store="host")
        found = pipe.plan(*pushed(20))
        pipe.push(*pushed(20))
        one = pipe.memory().weights
        assert found.host.weights == sum(stage.home.memory.nbytes for stage in pipe._stages)
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


# -- waiting -----------------------------------------------------------------------------------------------------------


def run_dry(prefetch, pushes, count=1, method=None, rest=True, **load):
    method = method or methods.create("gpipe")
    dry = DryWorker({0: Load(10, 4, 1, **load), 1: Load(10, 4, 1, **load)}, 2, prefetch)
    order = Order(method.schedule, 2, policy="streaming", near=max(1, prefetch))
    loop = Loop(dry, order, method, at_once=True)
    for _ in range(pushes):
        drive(loop, count)
    if rest:
        dry.rest()
    return dry


def test_waiting_by_hand_with_nothing_fetched_ahead():
    # fetching   W0 ─── ·  W1 ─── ·  ·  ·  W0 ───
    #            0    3    4    7          10   13
    # computing            F0       F1 B1─        B0─          (F takes 1, B takes 2)
    #                      3  4     7 8   10      13 15
    # updating                             U1 ────── U0 ────   10 to 14 and 15 to 19
    dry = run_dry(0, 1, forward=1, backward=2, fetch=3, update=4)
    assert (dry.number.stall, dry.number.seconds) == (3 + 3 + 3 + 4, 19)
    assert (dry.number.fetches, dry.number.weights_in, dry.number.gradients_out) == (3, 30, 8)
    assert dry.most == Room(weights=10, gradients=4, activations=2)


def test_waiting_by_hand_with_one_stage_fetched_ahead():
    # fetching   W0 ─── W1 ───            stage 0 stays where it is
    #            0    3      6
    # computing       F0     F1 B1─ B0─
    #                 3  4   6  7   9  11
    # updating                      U1 ──── U0 ────    9 to 13 to 17
    dry = run_dry(1, 1, forward=1, backward=2, fetch=3, update=4)
    assert (dry.number.stall, dry.number.seconds, dry.number.fetches) == (3 + 2 + 6, 17, 2)
    # the next push begins at 11: W0 17 to 20, when U0 is done; W1 to 23; F0 at 20, F1 at 23; and ends at 23 + 5
    again = run_dry(1, 2, rest=False, forward=1, backward=2, fetch=3, update=4)
    assert (again.now, again.number.fetches, again.number.stall) == (28, 4, 3 + 2 + 9 + 2)


def test_gradients_that_leave_and_are_added():
    # F0 F0 F1 F1 B1 B1 B0 B0: the second backward of each stage adds; U1 begins 5 after B1 is done, U0 5 after B0
    dry = run_dry(1, 1, 2, forward=1, backward=2, add=7, leave=5, update=1)
    assert dry.number.seconds == 4 + (4 + 7) + (4 + 7) + 5 + 1
    assert dry.number.stall == 6


def test_activations_that_do_not_stream_in_time():
    # F F B B, 4 micro-batches of 2 stages: 3 − 1 and 5 − 2 longer than computing each time
    dry = run_dry(1, 1, 2, forward=1, backward=2, away=3, back=5)
    assert (dry.number.seconds, dry.number.stall) == (4 * 3 + 4 * 5, 4 * 2 + 4 * 3)
    assert run_dry(1, 1, 2, forward=1, backward=2, away=1, back=2).number.stall == 0


def test_a_large_batch_hides_streaming(monkeypatch):
    monkeypatch.setattr("pipeback.plan.training_plan.WORK", 40_000)
    facts = survey_of(pipeline(network(), "gpipe", micro_batch_size=SAMPLES, store="host"), *pushed(2))
    costs = {"forward": 1.0, "backward": 1.0, "fetch": 20.0, "update": 1.0, "leave": 0.0, "ask": 0.0, "add": 0.0}
    slow = {s: p._replace(load=p.load._replace(**costs)) for s, p in facts.stages.items()}
    found = plan(facts._replace(stages=slow), 2)
    low, high = found.window
    assert high is None and found.push.share > 0.05
    shares = [foresee(found.facts, m).share for m in (1, low // 2, low, 4 * low)]
    assert shares == sorted(shares, reverse=True) and shares[1] > 0.05 >= shares[2]


# -- refusing ----------------------------------------------------------------------------------------------------------


def wide(**options):
    """Stages of 64 × 64: 16,640 bytes of weights, and as many of gradients."""
    store = HostStore(**{k: options.pop(k) for k in ("prefetch", "device_memory", "host_memory") if k in options})
    return pipeline(
        network(width=64), options.pop("method", "gpipe"), store=store, **{"micro_batch_size": SAMPLES} | options
    )


def refusal(pipe, count):
    before = weights(pipe)
    with pytest.raises(ValueError) as refused:
        pipe.push(*pushed(count, width=64))
    assert torch.equal(weights(pipe), before) and not pipe.closed and not pipe.arrived
    return str(refused.value)


def test_a_budget_below_the_largest_stage_is_refused_at_once():
    with pytest.raises(ValueError, match=r"device_memory=20 kB: stage 0 \(0\) alone takes 32.5 KiB, 16.2 KiB for its"):
        wide(device_memory="20 kB")
    with pytest.raises(ValueError, match=r"at most 9.77 KiB of weights, or give .* at least 32.5 KiB \(33280\)"):
        wide(device_memory="20 kB")
    with pytest.raises(
        ValueError, match=r"host_memory=48.8 KiB: .* all 5 stages take 81.2 KiB; .*store=\"disk:FOLDER\""
    ):
        wide(host_memory=50_000)


def test_what_does_not_fit_is_refused_before_anything_is_trained():
    said = refusal(wide(device_memory="60 KiB"), 8)
    assert said.startswith("device_memory=60 KiB is too little by ")
    assert "weights 32.5 KiB (2 of 5 stages, the largest stage 0 (0) of 16.2 KiB), gradients 16.2 KiB and activ" in said
    assert "(pushes of 8 × 3 samples)" in said


def test_what_is_recommended_fits():
    for budget in (55_000, 70_000, 100_000):
        said = refusal(wide(device_memory=budget), 8)
        cures = said.partition("What fits: ")[2]
        found = dict(re.findall(r"(prefetch|micro_batch_size|device_memory of at least .*?)[= ]\(?(\d+)\)?", cures))
        least = int(re.search(r"at least .* \((\d+)\)", cures)[1])
        wide(device_memory=least).push(*pushed(8, width=64))
        assert "too little by 1 B" in refusal(wide(device_memory=least - 1), 8)
        if "prefetch" in found:
            wide(device_memory=budget, prefetch=int(found["prefetch"])).push(*pushed(8, width=64))
        if "micro_batch_size" in found:
            size = int(found["micro_batch_size"])
            wide(device_memory=budget, micro_batch_size=size).push(*pushed(8, width=64))
        fewer = re.search(r"at most (\d+) micro-batches", cures)
        if fewer:
            pipe = wide(device_memory=budget)
            pipe.push(*pushed(int(fewer[1]), width=64))
            with pytest.raises(ValueError, match="device_memory"):
                pipe.push(*pushed(int(fewer[1]) + 1, width=64))
        assert found or fewer


def test_a_larger_push_is_checked_too_and_a_smaller_one_goes_on():
    pipe = wide(device_memory="64 KiB", method="gpipe")
    pipe.push(*pushed(1, width=64))
    with pytest.raises(ValueError, match="device_memory"):
        pipe.push(*pushed(50, width=64))
    pipe.push(*pushed(1, width=64))
    assert pipe.arrived == 2


def test_the_upper_end_of_the_window_is_the_last_push_that_fits():
    for method in ("gpipe", "pb"):
        pipe = wide(device_memory="200 KiB", method=method)
        found = pipe.plan(*pushed(2, width=64))
        if method == "pb":
            assert found.fits is None  # what is in flight does not grow
            continue
        check(found.facts, found.fits)
        with pytest.raises(ValueError, match="device_memory"):
            check(found.facts, found.fits + 1)
        assert "more do not fit into 200 KiB" in str(found)


def test_memory_of_the_host():
    said = refusal(wide(host_memory="100 KiB"), 2)
    assert said.startswith("host_memory=100 KiB is too little by ") and "optimizer state 81.2 KiB" in said
    least = int(re.search(r"at least .* \((\d+)\)", said)[1])
    wide(host_memory=least).push(*pushed(2, width=64))
    assert 'store="disk:FOLDER"' in said
    assert "a method that keeps no older weights" in refusal(wide(host_memory="300 KiB", method="pipedream"), 2)


@pytest.mark.parametrize("text, size", [
    (5, 5), ("5", 5), ("1.5 GB", 1_500_000_000), ("1GiB", 2**30), (" 512 MiB ", 2**29), ("2k", 2048), ("1e3", 1000),
    ("10 B", 10), ("0.5 TB", 500_000_000_000), (2.5e9, 2_500_000_000),
])  # fmt: skip
def test_budgets_as_people_write_them(text, size):
    assert byte_sizes.parsed("host_memory", text) == size
    assert HostStore(host_memory=text).budgets == (None, size)


@pytest.mark.parametrize("text", ["", "much", "1 XB", "1,5 GB", "-1 GB", "0", 0, -3, "GB", "inf", float("nan")])
def test_budgets_that_are_none(text, tmp_path):
    for store in (HostStore, lambda **options: DiskStore(tmp_path, **options)):
        with pytest.raises(ValueError, match=r"device_memory.*(write bytes|at least 1 byte)"):
            store(device_memory=text)


def test_budgets_of_another_type():
    with pytest.raises(TypeError, match='host_memory must be bytes or a text such as "1.5 GB", not list'):
        HostStore(host_memory=[1])


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
        "weights in, a push",
        "waiting",
        "batch window",
        "written a day",
    ):
        assert any(line.startswith(name) for line in text.splitlines()), name
    assert "; the budget is 1 GB" in text
    assert [row[0] for row in rows(found)] == [line.partition("  ")[0] for line in text.splitlines()[1:]]
    exact = {
        "weights in, a push",
        "stages fetched, a push",
        "gradients out, a push",
        "stages on the device",
        "weights on the device",
    }
    compared = beside(found, before, after, 2)
    assert exact <= {name for name, predicted, measured in compared if predicted == measured}
    assert table(found, before, after, 2).splitlines()[0].split() == ["predicted", "measured"]
