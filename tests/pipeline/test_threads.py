"""Losses that nobody waits for, workers in threads, and pipelines that are closed."""

import gc
import threading
import time

import pytest
import torch
from torch import nn

import pipeback
from pipeback.stages import rehearsal
from tests.laws.cases import data, network, pipeline, weights


class Slow(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.linear, self.seconds = nn.Linear(6, 6), seconds

    def forward(self, x):
        time.sleep(self.seconds)
        return self.linear(x)


def test_lazy_losses():
    pipe = pipeline([nn.Linear(6, 6), Slow(0.05), nn.Linear(6, 6)], "pb", workers=2)
    pipe.push(*data(1)[0])  # the rehearsal is behind us
    x, y = data(2)[1]
    begin = time.perf_counter()
    losses = [pipe.push(x, y) for _ in range(4)]
    sent = time.perf_counter() - begin
    assert isinstance(losses[0], torch.Tensor) and losses[0].shape == ()
    values = [float(loss) for loss in losses]
    read = time.perf_counter() - begin
    assert sent < read / 2  # push did not wait for the forwards, reading did
    assert values == [loss.item() for loss in losses]
    assert float(sum(losses)) == pytest.approx(sum(values))
    assert torch.stack(losses).tolist() == values
    assert f"{losses[0]:.4f}" == f"{values[0]:.4f}" and f"{values[0]:.4f}" in repr(losses[0])
    assert (losses[0] + 1).item() == pytest.approx(values[0] + 1)
    assert losses[0] == losses[0] and bool(losses[0] < values[0] + 1)
    assert losses[0].dtype == torch.float32 and losses[0].detach().numpy().shape == ()
    assert type(losses[0] * 2) is torch.Tensor
    pipe.close()


def test_threads_stop_with_their_pipeline():
    gc.collect()  # pipelines of other tests, with their threads
    before = threading.active_count()
    pipe = pipeline(network(), "pb", workers=3)
    for x, y in data(5):
        pipe.push(x, y)
    assert threading.active_count() == before + 3
    del pipe
    gc.collect()
    for _ in range(100):
        if threading.active_count() == before:
            break
        time.sleep(0.05)
    assert threading.active_count() == before


def test_a_failed_worker_fails_the_losses_that_wait():
    class Bomb(nn.Module):
        def forward(self, x):
            if bool((x > 1e6).any()):
                raise RuntimeError("bang")
            return x

    pipe = pipeline([nn.Linear(6, 6), nn.Identity(), Bomb(), nn.Linear(6, 6)], "pb", workers=2)
    pipe.push(*data(1)[0])
    loss = pipe.push(torch.full((3, 6), 1e9), torch.zeros(3, 6))
    with pytest.raises(pipeback.StageError, match=r"stage 2 \(2\), micro-batch 1: the forward failed: bang"):
        float(loss)


def test_a_closed_pipeline_stands_still_and_its_losses_say_so():
    pipe = pipeline([nn.Linear(6, 6), Slow(0.02), nn.Linear(6, 6)], "pb", workers=2)
    losses = [pipe.push(x, y) for x, y in data(6)]
    pipe.close()
    frozen = torch.cat([p.detach().flatten().clone() for p in pipe._engine.model.parameters()])
    time.sleep(0.2)
    assert torch.equal(frozen, torch.cat([p.detach().flatten() for p in pipe._engine.model.parameters()]))
    with pytest.raises(RuntimeError, match="closed before this loss was computed"):
        float(losses[-1])


@pytest.mark.filterwarnings("ignore:.*takes its statistics")
def test_a_short_batch_is_looked_at_without_disturbing_the_workers():
    def run(workers):
        torch.manual_seed(0)
        model = [nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)]
        pipe = pipeline(model, "pb", workers=workers)
        for n in (20, 20, 20, 19, 18, 17, 16, 8, 4):
            pipe.push(*data(1, samples=n)[0])
        result = weights(pipe)
        pipe.close()
        return result

    assert torch.equal(run(None), run(2))


def test_several_threads_may_push_and_look():
    pipe = pipeline(network(), "pb")
    pipe.push(*data(1)[0])
    failed = []

    def work(n):
        try:
            for x, y in data(15, seed=n):
                pipe.push(x, y)
                pipe.state_dict()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    pipe.drain()
    assert sum(r.kind == "B" for r in pipe.ledger) == 5 * 46


@pytest.mark.parametrize("disturbed", [0, 3, 7])
def test_layers_that_are_alike_are_shared_out_evenly_on_a_busy_machine(disturbed, monkeypatch):
    measure = rehearsal.measure

    def measured(stage, *given):
        measure(stage, *given)
        return 3.0 if stage.index == disturbed else 1.0

    monkeypatch.setattr(rehearsal, "measure", measured)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(8)))
    pipe = pipeback.Pipeline(
        model, loss=nn.functional.mse_loss, optimizer=lambda w: torch.optim.SGD(w, lr=0.1), method="pb", workers=2,
        micro_batch_size=4,
    )  # fmt: skip
    pipe.push(*torch.randn(2, 4, 6))
    assert pipe.owner == [0] * 4 + [1] * 4
    pipe.close()


class Elsewhere(nn.Module):
    """Its forward calls its layer with other tensors; when it is asked to, it stays there for a while."""

    def __init__(self):
        super().__init__()
        self.layer, self.asked, self.inside = Held(6, 6), threading.Event(), threading.Event()
        self.layer.around = self.stay

    def stay(self):
        if self.asked.is_set():
            self.inside.set()
            time.sleep(0.3)

    def forward(self, x):
        return torch.func.functional_call(self.layer, {"weight": self.layer.weight * 0.5}, (x,))


class Held(nn.Linear):
    def forward(self, x):
        self.around()
        return super().forward(x)


def test_a_forward_may_call_its_layer_with_other_tensors():
    found = []
    for options in ({}, {"workers": 2}):
        torch.manual_seed(0)
        model = nn.Sequential(Elsewhere(), nn.Linear(6, 6)).double()
        pipe = pipeline(model, "gpipe", **options)
        first, *others = data(4, dtype=torch.float64)
        pipe.push(*first)
        if options:
            model[0].asked.set()
            pipe.push(*others[0])
            assert model[0].inside.wait(60)
            model[0].asked.clear()
        else:
            pipe.push(*others[0])
        for batch in others[1:]:
            pipe.push(*batch)
        pipe.drain()
        found.append(weights(pipe))
        pipe.close()
    assert torch.equal(*found)
