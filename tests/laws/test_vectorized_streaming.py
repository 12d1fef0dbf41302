"""Law: stages that run as one while their weights come from a store are the event loop with the same store, to
rounding, and hold and move what the plan says.
"""

import re
import time

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipeback
from pipeback.pipeline.stacking import Stacking
from pipeback.streaming.store import HostStore
from pipeback.tensors.flat_buffer import FlatBuffer
from pipeback.vectorized.stacks import whole_cost
from tests.helpers.choice import mostly_rare, rare
from tests.helpers.live_tensors import tensors_alive
from tests.laws.as_one import S, doubles, model, planned_and_counted, same, through, trained
from tests.laws.cases import CASES, OPTIMIZERS, SENSITIVE, STEADY, allowed, data, pipeline, weights

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")
# all but those that do their micro-batches in flushes or groups
STREAMED = [case for case in STEADY if any(CASES[case](S).delays(S)) and not CASES[case](S).fixed_groups]
USUAL = (
    "pipedream-slack2", "pipemare-t2", "spectrain-v2", "lwp-weight", "cerebras", "ef", "dc_asgd-adaptive",
    "gap_aware+msnag",
)  # fmt: skip
AHEAD = (3, 9, 1, 5, 0, 2)  # stages that are fetched ahead


def store(ahead):
    return HostStore(prefetch=ahead)


def agree(case, ahead, optimizer=None, **options):
    loop, *wanted = trained(case, optimizer, store=store(ahead), **options)
    pipe, *found = trained(case, optimizer, store=store(ahead), vectorize=True, **options)
    several = [told.startswith("as one") for name, told in pipe.vectorized.items() if name.startswith("stages")]
    assert all(several) and bool(several) == (ahead > 2)
    same(found, wanted)
    assert pipe.traffic().peak_stages <= min(ahead + 1, S)
    # sums that leave with their stage come back; how often they do depends on the order
    left = [each.traffic().gradients_out - each.traffic().sums_in for each in (pipe, loop)]
    assert left[0] == left[1]
    return pipe


@pytest.mark.parametrize("case", mostly_rare(STREAMED, *USUAL))
def test_every_method_equals_the_event_loop(case):
    agree(case, AHEAD[STREAMED.index(case) // 2 % len(AHEAD)])


@pytest.mark.soak
@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("case", STREAMED)
def test_every_method_with_every_room(case, ahead):
    agree(case, ahead)


@pytest.mark.parametrize(
    ("case", "optimizer"),
    mostly_rare(
        [(case, one) for case in ("pb", "pipedream", "lwp-weight", "ef") for one in OPTIMIZERS if allowed(case, one)],
        ("pb", "adam"), ("pipedream", "adam"),
    ),
)  # fmt: skip
def test_every_optimizer(case, optimizer):
    agree(case, 5, optimizer)


@pytest.mark.parametrize("case", mostly_rare(SENSITIVE, "eigendelay-stash"))
def test_steps_in_bases(case):
    """Of gradients whose covariances have full rank, since the last bits choose the basis of a null space."""
    found = []
    for on in (False, True):
        pipe = pipeback.Pipeline(
            model(), loss=mse_loss, optimizer=lambda params: torch.optim.AdamW(params, lr=0.01, eps=0.01),
            method=CASES[case](S), micro_batch_size=16, store=store(5), vectorize=on,
        )  # fmt: skip
        losses = [pipe.push(x, y) for x, y in doubles(50, samples=16)]
        flying = weights(pipe)
        pipe.drain()
        found.append([torch.stack([loss.double() for loss in losses]), flying, weights(pipe)])
    same(*reversed(found))
    assert any(told.startswith("as one") for told in pipe.vectorized.values())


@pytest.mark.parametrize("options", [{"clip_norm": 0.1}, rare({"compile": {"backend": "aot_eager"}})], ids=str)
def test_with_other_options(options):
    agree("cerebras", 5, **options)


def test_several_micro_batches_per_update():
    """Sums of gradients leave the device with their stages, and come back."""
    pipe = agree("pipeoptim-xpipe", 5)
    assert pipe.traffic().sums_in


@pytest.fixture
def rubbish(monkeypatch):
    """Memory on the device holds NaN until weights come."""
    fill = FlatBuffer.fill

    def filled(buffer):
        fill(buffer)
        for view in buffer.views:
            view.fill_(float("nan"))

    monkeypatch.setattr(FlatBuffer, "fill", filled)


@pytest.mark.usefixtures("rubbish")
@pytest.mark.parametrize(
    ("case", "options"),
    mostly_rare(
        [(case, options) for case in STREAMED for options in ({}, {"replicas": 2})],
        ("spectrain-v2", {}), ("pipedream", {"replicas": 2}),
    ),
    ids=str,
)  # fmt: skip
def test_other_micro_batches_come_later(case, options, monkeypatch):
    """Graphs for them are checked while some of the stages are on the device, as they are over ranks."""
    monkeypatch.setattr(Stacking, "unseen", lambda *given: [])  # else they are made before
    found = []
    for vectorize in (True, False):
        built = model()
        pipe = pipeline(built, CASES[case](S), store=store(5), micro_batch_size=3, vectorize=vectorize, **options)
        losses = []
        for n, samples in enumerate((24, 9, 24, 22)):
            if n == 2:
                pipe.wait()
                for norm in (part[1] for part in built[1:-1]):
                    norm.eps = 0.1
            losses.append(pipe.push(*(torch.cat(part)[:samples] for part in zip(*doubles(8), strict=True))))
        told = " ".join(pipe.vectorized.values())
        pipe.drain()
        found.append([torch.stack(losses), weights(pipe)])
        assert not vectorize or ("as one" in told and "stage by stage" not in told)
    same(*found)


# -- a loss that is computed outside -----------------------------------------------------------------------------------


def outside(case, vectorize, ahead=5, optimizer=None):
    optimizer = optimizer or next(name for name in ("momentum", "sgd", "adamw") if allowed(case, name))
    return pipeback.Pipeline(
        model(), loss=None, optimizer=OPTIMIZERS[optimizer], method=CASES[case](S), store=store(ahead),
        vectorize=vectorize,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("case", "ahead"),
    mostly_rare(
        [(case, ahead) for case in STREAMED for ahead in (0, 5, 9)],
        *((case, (5, 9)[n % 2]) for n, case in enumerate(USUAL) if n % 2), ("pb", 0),
    ),
)  # fmt: skip
def test_the_loss_is_computed_outside(case, ahead):
    """Also where the newest micro-batch came to the last stage before its turn."""
    found = []
    for vectorize in (True, False):
        pipe = outside(case, vectorize, ahead)
        losses = through(pipe, doubles(27))
        told = " ".join(pipe.vectorized.values())
        pipe.drain()
        found.append([losses, weights(pipe)])
        assert pipe.traffic().peak_stages <= ahead + 1
        assert not vectorize or ("as one" if ahead > 2 else "as a graph") in told
    same(*found)


@pytest.mark.parametrize(
    ("case", "saved"), mostly_rare([(c, s) for c in STREAMED for s in (True, False)], ("pb", False), ("cerebras", True))
)
def test_a_state_in_flight_whose_loss_is_outside_goes_on(case, saved):
    """Saved by stages that run as one, or by the event loop."""
    some = doubles(22)
    before, after = outside(case, saved), outside(case, True)
    through(before, some, (5, 5, 5))
    after.load_state_dict(before.state_dict())
    same(*([through(pipe, list(some), (4, 3)), weights(pipe)] for pipe in (after, before)))


# -- what is moved and held --------------------------------------------------------------------------------------------


COUNTED = [(c, a, n) for c in ("pb", "cerebras", "pipedream", "pipeoptim-xpipe") for a in (0, 3, 5) for n in (1, 4)]


@pytest.mark.parametrize(("case", "ahead", "count"), mostly_rare(COUNTED, *COUNTED[::9]))
def test_bytes_predicted_are_bytes_counted(case, ahead, count):
    pipe = pipeline(model(), CASES[case](S), micro_batch_size=3, store=store(ahead), vectorize=True)
    planned, found, whole = planned_and_counted(pipe, count)
    for name in ("weights_in", "fetches", "gradients_out", "sums_in"):
        assert round(5 * getattr(planned, name)) == getattr(found, name), name
    assert (planned.peak_weights, planned.peak_stages) == (whole.peak_bytes, whole.peak_stages)


def test_a_tick_brings_every_weight_once():
    """In the steady state: for a micro-batch, each stage is fetched once, and its gradients leave once."""
    pipe = pipeline(model(), "pb", store=store(3), vectorize=True)
    some = doubles(80)
    for x, y in some[:40]:
        pipe.push(x, y)
    before = pipe.traffic()
    for x, y in some[40:]:
        pipe.push(x, y)
    fetched, left = (getattr(pipe.traffic().since(before), name) for name in ("fetches", "gradients_out"))
    assert 40 * S <= fetched <= 42 * S  # to ask for the traffic finishes what was pushed, which breaks two ticks
    assert left == 40 * pipe.memory().weights


def test_weights_are_on_the_device_only_while_they_are_needed():
    pipe = pipeline(model(), "pb", store=store(3), vectorize=True)
    for x, y in doubles(20):
        pipe.push(x, y)
    pipe.wait()
    stages = pipe._engine.stages
    assert not any(stage.home.slot.flat.here for stage in stages)
    assert not any(stage.home.slot.flat.memory.untyped_storage().nbytes() for stage in stages)
    assert pipe.traffic().peak_bytes <= 4 * max(stage.home.slot.nbytes for stage in stages)


@pytest.mark.parametrize("case", ["pb", "pipedream", "cerebras", "msnag-stash"])
def test_the_collector_agrees_with_the_declaration(case):
    """Of a quiet pipeline, which has no weights on the device: the store's copies, states, sums and activations."""

    def build():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(48, 48) for _ in range(S)))  # weights dominate activations

    def bytes_held(**options):
        before = tensors_alive()
        pipe = pipeline(build(), CASES[case](S), **options)
        for x, y in data(40, samples=1, width=48):
            pipe.push(x, y)
        del x, y
        pipe.wait()
        time.sleep(0.1)  # the threads of the store let go of what they have handed over
        return pipe, pipe.memory(), tensors_alive() - before

    pipe, memory, found = bytes_held(store=store(5), vectorize=True)
    assert sum(name.startswith("stages") for name in pipe.vectorized) > 1
    stages = pipe._engine.stages
    copies = sum(stage.copies() * stage.bytes() for stage in stages)
    sums = sum(g.nbytes for stage in stages for g in stage.grads() if g is not None)
    declared = copies + memory.weights + int(memory.state * memory.weights) + memory.beside + sums
    assert declared <= found <= declared + memory.activations + 64 * 1024 // 8, (declared, found, memory)


# -- states ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", mostly_rare(STREAMED, "cerebras", "msnag-stash"))
def test_resumed_in_flight(case):
    """With the bits of the run that was not interrupted at the same place."""
    some = doubles(30)
    one, other, resident = (
        pipeline(model(), CASES[case](S), vectorize=True, **on) for on in ({"store": store(5)}, {"store": store(5)}, {})
    )
    for x, y in some[:11]:
        one.push(x, y)
    state = one.state_dict()
    for x, y in some[:2]:
        other.push(x, y)
    other.load_state_dict(state)
    resident.load_state_dict(state)
    for pipe in (one, other, resident):
        for x, y in some[11:]:
            pipe.push(x, y)
    wanted = weights(one)
    assert torch.equal(weights(other), wanted)
    same([weights(resident)], [wanted])
    assert other.traffic().peak_stages <= 6


@pytest.mark.parametrize("case", mostly_rare(STREAMED, "pb", "cerebras", "pipedream", "msnag-stash"))
def test_a_state_of_the_event_loop_goes_on_as_one_and_back(case):
    some = doubles(40)
    plain, loop = (pipeline(model(), CASES[case](S), store=store(5)) for _ in range(2))
    pipe = pipeline(model(), CASES[case](S), store=store(5), vectorize=True)
    for x, y in some[:11]:
        plain.push(x, y)
    pipe.load_state_dict(plain.state_dict())
    for each in (plain, pipe):
        for x, y in some[11:25]:
            each.push(x, y)
        each.drain()
    loop.load_state_dict(pipe.state_dict())
    for each in (plain, loop):
        for x, y in some[25:]:
            each.push(x, y)
    same([weights(loop)], [weights(plain)])


@pytest.mark.parametrize("case", ["pb", rare("pipedream"), rare("cerebras")])
def test_a_state_in_flight_where_stages_turn_out_to_run_one_by_one(case, monkeypatch):
    """Its graphs refer to the memory that stages share which might have run as one; later each has its own."""
    monkeypatch.setattr(whole_cost, "gain", lambda stack, under, whole: 0.5)
    some = doubles(30)
    plain, pipe = (pipeline(model(), CASES[case](S), store=store(5), vectorize=on) for on in (False, "auto"))
    for x, y in some[:11]:
        plain.push(x, y)
    pipe.load_state_dict(plain.state_dict())
    for each in (plain, pipe):
        for x, y in some[11:20]:
            each.push(x, y)
        each.drain()
        for x, y in some[20:]:
            each.push(x, y)
    assert all("stage by stage" in told for told in pipe.vectorized.values()) and pipe.vectorized
    assert torch.equal(weights(pipe), weights(plain))
    assert [stage.home.joined.count for stage in pipe._engine.stages if stage.home.joined] == [1] * (S - 1)


def test_a_state_of_more_stages_than_have_room_is_refused():
    resident = pipeline(model(), "pb", vectorize=True)
    for x, y in doubles(9):
        resident.push(x, y)
    pipe = pipeline(model(), "pb", store=store(2), vectorize=True)
    with pytest.raises(ValueError, match="5 stages .* prefetch=2; .* prefetch=4"):
        pipe.load_state_dict(resident.state_dict())


# -- what runs as one --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [None, 2])
def test_auto_leaves_flushes_to_the_event_loop(workers):
    pipe, *found = trained("gpipe-4", store=store(5), vectorize="auto", workers=workers)
    assert all("stage by stage" in told for told in pipe.vectorized.values()) and pipe.vectorized
    pipe.close()
    _, *wanted = trained("gpipe-4", store=store(5))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("count", "as_one"), [(1, False), (27, True)])
def test_auto_leaves_short_pushes_to_the_event_loop(count, as_one, monkeypatch):
    """Until a loss is read, they have as many ticks as the pipeline has stages, and each brings weights."""
    monkeypatch.setattr(whole_cost, "gain", lambda stack, under, whole: 3.0)
    pipe = pipeline(model(), "pb", store=store(5), vectorize="auto", micro_batch_size=2)
    pipe.push(*map(torch.cat, zip(*doubles(count, samples=2), strict=True)))
    told = "as one" if as_one else r"stage by stage: as one, F and B are 0.43 times as fast"
    assert all(re.match(told, words) for name, words in pipe.vectorized.items() if name != "stage 0")


def test_stages_that_are_not_alike_after_all():
    """Their weights come for each of them."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.by = nn.Linear(6, 6), next(numbers)

        def forward(self, x):
            return torch.tanh(self.by * self.linear(x))

    found = []
    for on in (False, "auto"):
        numbers = iter((1.0, 1.0, 2.0, 2.0, 1.0))
        pipe, *rest = trained("pb", build=lambda: model(make=Scaled), store=store(9), vectorize=on)
        found.append(rest)
    assert "computes something else" in str(pipe.vectorized)
    same(*found)
