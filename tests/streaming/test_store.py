"""Stores: what their users see of the weights, what travels, and what is refused."""

import gc
import threading

import pytest
import torch
from torch import nn

import pipeback
from pipeback.streaming import disk_store
from pipeback.streaming.store import HostStore
from tests.laws.cases import CASES, STAGES, data, everything, network, pipeline, weights


def pushed(pipe, count=8, samples=3):
    batches = data(count, samples=samples)
    return pipe.push(*(torch.cat(part) for part in zip(*batches, strict=True)))


def streamed(store="host", method="gpipe", model=None, **options):
    return pipeline(model or network(), method, micro_batch_size=3, store=store, **options)


def test_the_module_shows_the_weights_of_a_host_store():
    model = network()
    pipe, wanted = streamed(model=model), pipeline(network(), "gpipe", micro_batch_size=3)
    pushed(pipe), pushed(wanted)
    pipe.wait()
    assert pipe.model is model
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), wanted.model.parameters(), strict=True))


def test_weights_that_somebody_writes_are_trained_on():
    pipe, wanted = streamed(), pipeline(network(), "gpipe", micro_batch_size=3)
    for each in (pipe, wanted):
        pushed(each)
        each.wait()
        with torch.no_grad():
            for p in each.model.parameters():
                p.mul_(0.5)
        pushed(each)
    assert torch.equal(weights(pipe), weights(wanted))


def test_weights_that_somebody_moves_are_noticed():
    pipe = streamed()
    pushed(pipe)
    pipe.model.double()
    with pytest.raises(RuntimeError, match="was moved, cast or replaced; copy values into the weights in place"):
        pushed(pipe)


def test_on_disk_the_module_shows_nothing_and_model_is_a_copy(tmp_path):
    model = network()
    pipe = streamed(f"disk:{tmp_path}", model=model)
    pushed(pipe)
    assert all(bool(p.isnan().all()) for p in model.parameters())
    assert pipe.model is not model and bool(weights(pipe).isfinite().all())


def test_fused_is_torchs_fused_optimizer():
    adamw = lambda p: torch.optim.AdamW(p, lr=0.01)  # noqa: E731
    options = {"loss": nn.functional.mse_loss, "method": "gpipe", "micro_batch_size": 3}
    pipe = pipeback.Pipeline(network(), optimizer=adamw, store=HostStore(fused=True), **options)
    model = network()
    plain = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    for n in range(5):
        x, y = data(1, samples=12, seed=n)[0]
        pipe.push(x, y)
        parts = [nn.functional.mse_loss(model(a), b) for a, b in zip(x.split(3), y.split(3), strict=True)]
        plain.zero_grad()
        for part in parts:
            part.backward()
        for p in model.parameters():
            p.grad /= 4
        plain.step()
    assert torch.equal(weights(pipe), torch.cat([v.flatten().double() for v in model.state_dict().values()]))


def test_fused_where_there_is_none():
    with pytest.raises(ValueError, match="fused=True: RMSprop of stage 0 .* has no fused implementation"):
        pipeback.Pipeline(
            network(), loss=nn.functional.mse_loss, optimizer=torch.optim.RMSprop, method="gpipe",
            store=HostStore(fused=True),
        )  # fmt: skip


@pytest.mark.parametrize("case", ["gpipe", "one_f_one_b"])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_flush_in_one_push_is_two_weight_passes_and_one_gradient_pass(case, prefetch):
    pipe = streamed(HostStore(prefetch=prefetch), CASES[case](STAGES))
    pushed(pipe)
    pipe.wait()
    before = pipe.traffic()
    for _ in range(3):
        pushed(pipe)
    pipe.wait()
    found = pipe.traffic().since(before)
    held = sum(stage.home.slot.nbytes for stage in pipe._engine.stages)  # with the gaps between tensors
    assert 0 < found.weights_in <= 3 * 2 * held and found.sums_in == 0
    assert found.gradients_out == 3 * pipe.memory().weights
    assert found.peak_stages <= prefetch + 1 and found.peak_bytes <= (prefetch + 1) * max(
        stage.home.slot.nbytes for stage in pipe._engine.stages
    )


def test_a_stage_is_fetched_while_the_one_before_it_computes():
    """The first stage goes on when the fetch of the second has begun."""
    begun, found = threading.Event(), []

    class Tells(HostStore):
        def read(self, stage, slot):
            if stage.index == 1:
                begun.set()
            return super().read(stage, slot)

    model = network()
    pipe = streamed(Tells(), model=model)
    pushed(pipe)
    pipe.wait()
    begun.clear()
    model[0].register_forward_hook(lambda *_: found.append(all(found) and begun.wait(20)))
    pushed(pipe)
    assert found and all(found)


def test_an_update_is_made_while_other_stages_compute():
    """The first step, that of the last stage, ends when the backward of the stage before it has begun."""
    begun, found = threading.Event(), []

    class Waits(torch.optim.SGD):
        def step(self, closure=None):
            if armed and not found:
                found.append(begun.wait(20))
            return super().step(closure)

    model, armed = network(), False
    pipe = pipeback.Pipeline(
        model, loss=nn.functional.mse_loss, optimizer=lambda params: Waits(params, lr=0.1), method="gpipe",
        micro_batch_size=3, store="host",
    )  # fmt: skip
    pushed(pipe)
    pipe.wait()
    begun.clear()
    model[-2].register_full_backward_pre_hook(lambda *_: begun.set())
    armed = True
    pushed(pipe)
    pipe.wait()
    assert found == [True]


@pytest.mark.parametrize("store", ["host", "disk"])
def test_nothing_is_left_behind(store, tmp_path):
    gc.collect()
    before = threading.active_count()
    pipe = streamed("host" if store == "host" else f"disk:{tmp_path}", "pb")
    pushed(pipe)
    assert threading.active_count() == before + 2
    pipe.close()
    assert threading.active_count() == before
    pipe = streamed("host" if store == "host" else f"disk:{tmp_path / 'b'}", "pb")
    pushed(pipe)
    del pipe
    gc.collect()
    assert threading.active_count() == before
    if store == "disk":
        streamed(f"disk:{tmp_path / 'b'}", "pb").close()  # nobody holds the folder


def test_an_error_of_an_update_is_raised_and_closes_the_pipeline(monkeypatch):
    pipe = streamed(method="pb")
    pushed(pipe)
    pipe.wait()

    def fail(*given, **named):
        raise RuntimeError("no room")

    monkeypatch.setattr("pipeback.stages.joint_optimizer.sgd_step", fail)
    with pytest.raises(pipeback.StageError, match=r"stage \d \(\d\), micro-batch \d+: the update failed: no room"):
        pushed(pipe)
        pipe.wait()
    with pytest.raises(RuntimeError, match="the pipeline is closed"):
        pushed(pipe)


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_state_reopens_what_an_error_has_closed(kind, tmp_path, monkeypatch):
    """Nothing of what lay on the device, or was half done, is taken for the loaded weights."""
    monkeypatch.setattr(disk_store, "SMALL", 1)
    store = "host" if kind == "host" else f"disk:{tmp_path}"
    pipe, wanted = streamed(store, "pb"), streamed(None, "pb", network(seed=9))
    for each in (pipe, wanted):
        pushed(each)
    state = wanted.state_dict()  # other weights, of versions that are on the device when the error comes
    with monkeypatch.context() as patch:
        patch.setattr("pipeback.stages.joint_optimizer.sgd_step", lambda joint: 1 / 0)
        with pytest.raises(pipeback.StageError, match="the update failed: division by zero"):
            pushed(pipe, 1)
            pipe.wait()
    pipe.load_state_dict(state)
    for each in (pipe, wanted):
        pushed(each)
    assert torch.equal(everything(pipe), everything(wanted))


def test_a_closed_pipeline_shows_the_newest_weights():
    pipe, wanted = streamed(method="pb"), streamed(None, "pb")
    for each in (pipe, wanted):
        pushed(each)
    model, other = wanted.model, pipe._engine.model
    pipe.close()
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))


def test_a_closed_disk_store_is_not_opened_again(tmp_path):
    pipe = streamed(f"disk:{tmp_path}")
    pushed(pipe)
    state = pipe.state_dict()
    pipe.close()
    for opens in (lambda: pipe.load_state_dict(state), pipe.shown().__enter__, pipe.shown(changes=True).__enter__):
        with pytest.raises(RuntimeError, match="the store was closed with the pipeline; build a new Pipeline"):
            opens()


def test_a_closed_pipeline_leaves_its_store_to_the_next(tmp_path):
    store = pipeback.DiskStore(tmp_path)
    first = streamed(store)
    pushed(first)
    state = first.state_dict()
    first.close()
    second = streamed(store)
    pushed(second)
    for opens in (lambda: first.load_state_dict(state), first.shown().__enter__):
        with pytest.raises(RuntimeError, match="the store was closed with the pipeline; build a new Pipeline"):
            opens()
    pushed(second)
    second.close()


def test_frozen_weights_travel_and_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_store, "SMALL", 1)

    def model():
        found = network()
        for p in (*found[1].parameters(), found[3][0].bias):
            p.requires_grad_(False)
        return found

    wanted = pipeline(model(), "pipedream", "adam", micro_batch_size=3)
    pushed(wanted, 12)
    for store in ("host", f"disk:{tmp_path}"):
        pipe = streamed(store, "pipedream", model(), optimizer="adam")
        pushed(pipe, 12)
        assert torch.equal(everything(pipe), everything(wanted)), store
        pipe.close()


@pytest.mark.parametrize("thread", ["_fetching", "_updates"])
def test_the_garbage_collector_may_run_in_its_threads(thread):
    pipe = pipeline(network(4), "pb", store="host")
    for x, y in data(5):
        pipe.push(x, y)
    pipe.wait()
    residence = pipe._engine.runtime.loop.worker.residence
    pool = residence._fetching if thread == "_fetching" else residence._updates._thread
    pool.submit(residence.close).result(10)
    pipe.close()
