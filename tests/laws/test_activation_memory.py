"""What is held for backwards is what is stated, byte for byte, for every method: of the memory that torch has made
during forwards, what is still there after a push, whoever holds it.
"""

import gc
from itertools import accumulate

import pytest
import torch
from torch import nn

from pipeback import methods
from pipeback.schedules.programs import flowing
from pipeback.schedules.split import splits
from pipeback.schedules.timeline import in_flight
from pipeback.stages.stage import Stage
from tests.helpers.choice import mostly_rare
from tests.helpers.live_storages import LiveStorages
from tests.laws.cases import CASES, STAGES, data, network, pipeline, suited

COUNT = 16


class Skip(nn.Module):
    """Hands on its first input beside what it computes, so that one memory lies in the flights of several stages."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, given):
        x, first = given if isinstance(given, tuple) else (given, given)
        return torch.relu(self.linear(x)), first


class Product(nn.Module):
    def forward(self, given):
        return given[0] * given[1]


def saves_results():
    """Some stages save what they hand on, as relu and tanh do, and others do not, as linear layers."""
    torch.manual_seed(0)
    ends = [nn.ReLU, nn.Tanh, nn.Identity, nn.Sigmoid]
    return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), end()) for end in ends], nn.Linear(6, 6))


def hands_on():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), Skip(), Skip(), Skip(), Product())


def normed():
    """Weights are functions of others, which most methods compute anew in B."""
    torch.manual_seed(0)
    norm = nn.utils.parametrizations.weight_norm
    return nn.Sequential(*[nn.Sequential(norm(nn.Linear(6, 6)), nn.Tanh()) for _ in range(4)], nn.Linear(6, 6))


MODELS = {"network": network, "saves results": saves_results, "hands on": hands_on, "normed": normed}


@pytest.fixture
def made(monkeypatch):
    """The memory that forwards make. What is older is left out when garbage is collected, which is done often."""
    live, forward = LiveStorages(), Stage.forward
    gc.collect()
    gc.freeze()

    def watched(stage, mb, x, target=None):
        with live:
            return forward(stage, mb, x, target)

    monkeypatch.setattr(Stage, "forward", watched)
    return live


def stated(pipe):
    """The bytes of activations, computed as for `Pipeline.memory`, but for those in flight now."""
    stages = pipe._engine.stages
    held = [len(stage.flights) + len(stage.gradients.split.waiting) for stage in stages]
    return [stage.added_bytes(stages[n - 1] if n else None) * held[n] for n, stage in enumerate(stages)]


# by default, plain PB with every model, and every method with one of them, in turn
USUAL = [(case, [*MODELS][n % len(MODELS)]) for n, case in enumerate(CASES)] + [("pb", model) for model in MODELS]


@pytest.mark.parametrize(("case", "model"), mostly_rare([(c, m) for c in CASES for m in MODELS], *USUAL))
def test_what_is_held_is_what_is_stated(case, model, made):
    pipe = pipeline(MODELS[model](), CASES[case](STAGES), suited(case))
    stages, peak = pipe._engine.stages, 0
    for x, y in data(COUNT):
        pipe.push(x, y)
        given = x.nbytes * len(stages[0].flights) + y.nbytes * len(stages[-1].flights)  # which the user has made
        held = made.alive()
        names = {made.made_by(key): n for key, n in held.items()}
        if splits(pipe.method.schedule):  # of what stages share, and of what a graph saves, I needs more than W
            assert sum(held.values()) <= sum(stated(pipe)), names
        else:
            assert sum(held.values()) == sum(stated(pipe)) - given, names
        peak = max(peak, sum(stated(pipe)))
    assert pipe.memory().activations >= peak


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("case", ["pb", "pipedream", "gpipe-4"])
def test_once_full_the_peak_is_what_is_counted(case, model, made, monkeypatch):
    """Right before each wave of backwards, when every stage holds most."""
    pipe = pipeline(MODELS[model](), CASES[case](STAGES))
    stages, found = pipe._engine.stages, [0]
    begin = Stage.begin_backward

    def looked(stage, *rest):
        given = x.nbytes * len(stages[0].flights) + y.nbytes * len(stages[-1].flights)
        losses = 4  # bytes: the loss that was reported, which the user gets
        found.append(sum(made.alive().values()) + given - losses)
        return begin(stage, *rest)

    monkeypatch.setattr(Stage, "begin_backward", looked)
    for x, y in data(COUNT):
        pipe.push(x, y)
    assert max(found) == pipe.memory().activations


@pytest.mark.parametrize("workers", [2, 4])
def test_a_v_evens_out_the_activations_of_workers(workers):
    """PB: micro-batches in flight at the peak, over both stages of a worker, as its operations come."""
    stages = 2 * workers
    pipe = pipeline(network(stages), methods.create("pb", placement="v"), workers=workers)
    pipe.record()
    for x, y in data(3 * stages):
        pipe.push(x, y)
    pipe.wait()
    for track in pipe.recorded.tracks:
        assert max(accumulate({"F": 1, "B": -1, "U": 0}[slot.op.kind] for slot in track.slots)) == 2 * stages
    pipe.close()
    each = in_flight(flowing(2), stages)
    apart = [sum(each[2 * worker : 2 * worker + 2]) for worker in range(workers)]  # of neighbours
    assert apart[0] == 4 * stages - 4 and apart[-1] == 4
