"""Law: an update is handed the weights that its forward used, in every runtime, store and state.

The method of these tests steps along w_now − w_F, so that its weights are right only if w_F is. The reference keeps
every version: with every = 1, U(i) makes version i + 1, and F(i) ran on version max(0, i − D).
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import pipeback
from pipeback.methods.base import Chosen, Method, OptimizerLike, State, Weights, When
from pipeback.schedules.programs import flowing
from pipeback.streaming import disk_store
from pipeback.streaming.disk_store import DiskStore
from tests.laws.cases import STAGES, data, everything, network, pipeline


@dataclass(repr=False)
class Drawn(Method):
    """w ← step(w, g) − ½·(w_now − w_F), and what was handed is told to `seen`."""

    slack: int = 2
    every: int = 1

    def __post_init__(self) -> None:
        self.schedule = flowing(self.slack, every=self.every)
        self.copies = "stash"
        self.needs_used = True

    def backward_weights(self, weights: Weights, used: Weights | None, state: State, when: When) -> Chosen:
        assert used is not None
        return used

    def update(self, weights: Weights, optimizer: OptimizerLike, state: State, when: When) -> State:
        assert when.used is not None
        if not when.delay:
            assert when.used is weights  # the newest
        gap = [w - u for w, u in zip(weights, when.used, strict=True)]
        seen.append((when.stage, when.mb, [u.clone() for u in when.used]))
        optimizer.step()
        torch._foreach_add_(weights, gap, alpha=-0.5)
        return state


seen: list[tuple[int, int, list[torch.Tensor]]] = []


def run(slack: int = 2, every: int = 1, count: int = 23, **options):
    seen.clear()
    pipe = pipeline(network(), Drawn(slack, every), micro_batch_size=3, **options)
    batches = data(count)
    losses = [pipe.push(x, y).clone() for x, y in batches]
    flying, held = everything(pipe), pipe.memory().copies
    pipe.drain()
    losses += [pipe.push(x, y).clone() for x, y in batches[:4]]
    pipe.wait()
    handed = {(s, i): used for s, i, used in seen}
    result = torch.stack(losses), flying, everything(pipe)
    pipe.close()
    return result, handed, held


@pytest.mark.parametrize("slack", [0, 1, 2])
@pytest.mark.parametrize("every", [1, 3])
def test_it_is_what_the_forward_of_the_first_micro_batch_ran_on(slack, every):
    """Versions are seen from outside: the weights in flight after each push."""
    pipe = pipeline(network(), Drawn(slack, every))
    versions = [[[w.detach().clone() for w in stage.parameters()]] for stage in pipe.model]
    seen.clear()
    for x, y in data(25):
        pipe.push(x, y)
        for stage, history in zip(pipe.model, versions, strict=True):
            now = [w.detach().clone() for w in stage.parameters()]
            if any(not torch.equal(a, b) for a, b in zip(now, history[-1], strict=True)):
                history.append(now)
    ledger = {(r.stage, r.kind, r.mb): r.version for r in pipe.ledger}
    assert seen
    for s, i, used in seen:
        first = i + 1 - every
        wanted = versions[s][ledger[s, "F", first]]
        assert all(map(torch.equal, used, wanted)), (s, i)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("slack", [1, 2])
def test_it_is_the_same_in_every_runtime_and_store(slack, every, tmp_path, monkeypatch):
    monkeypatch.setattr(disk_store, "SMALL", 1)
    expected, handed, held = run(slack, every)
    for n, options in enumerate((
        {"workers": 2}, {"workers": 3}, {"debug": pipeback.Debug(order="random")},
        {"debug": pipeback.Debug(order="skewed")}, {"activations": "recompute"}, {"store": "host"},
        {"store": DiskStore(tmp_path / "a", prefetch=0, commit_every=5)}, {"store": f"disk:{tmp_path / 'b'}"},
        {"store": DiskStore(tmp_path / "c", prefetch=3, commit_every=5), "workers": 2},
    )):  # fmt: skip
        found, also, copies = run(slack, every, **options)
        graphs = 1 if "activations" in options else 3  # what is in flight is no graph there
        for part, wanted in zip(found[:graphs], expected, strict=graphs == 3):
            assert torch.equal(part, wanted), (n, options)
        assert copies == held
        assert handed.keys() == also.keys()
        assert all(all(map(torch.equal, also[key], handed[key])) for key in handed)


@pytest.mark.parametrize("at", range(9, 13))
@pytest.mark.parametrize("every", [1, 3])
def test_it_is_part_of_a_state(every, at):
    """Also where the first micro-batch of a group has gone backward and its update is not due yet."""
    batches = data(20)
    one, other = pipeline(network(), Drawn(1, every)), pipeline(network(seed=9), Drawn(1, every))
    for x, y in batches[:at]:
        one.push(x, y)
    other.load_state_dict(one.state_dict())
    for pipe in (one, other):
        for x, y in batches[at:]:
            pipe.push(x, y)
        pipe.drain()
    assert torch.equal(everything(one), everything(other))


@pytest.mark.parametrize("replicas", [2, 3])
def test_replicas_agree(replicas):
    pipe = pipeline(network(), Drawn(), micro_batch_size=3, replicas=replicas)
    for x, y in data(12, samples=3 * replicas):
        pipe.push(x, y)
    pipe.drain()
    stages = pipe._engine.holding.everywhere
    for others in zip(*stages, strict=True):
        for same in zip(*(stage.weights for stage in others), strict=True):
            assert all(torch.equal(same[0], w) for w in same[1:])


@pytest.mark.parametrize("slack", [1, 2])
def test_one_more_copy_is_held_and_none_in_the_end(slack):
    method = Drawn(slack)
    pipe = pipeline(network(), method)
    for x, y in data(30):
        pipe.push(x, y)
    held = [stage.versions.peak for stage in pipe._engine.stages]
    assert held == [method.held(s, STAGES) for s in range(STAGES)]
    assert held == [2 + D if D else 1 for D in pipe.delays]
    pipe.drain()
    assert all(stage.copies() == 1 for stage in pipe._engine.stages)


def test_a_method_that_keeps_no_versions_cannot_ask_for_them():
    method = Drawn()
    method.copies = "live"
    with pytest.raises(ValueError, match='Drawn needs the weights that F used, but its copies are "live"'):
        pipeline(network(), method)
    method.copies = "stash"
    pipeline(network(), method).push(*data(1)[0])
