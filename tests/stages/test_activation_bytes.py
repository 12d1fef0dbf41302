"""The bytes of activations that are stated are those that are held."""

import gc
import weakref
from itertools import product

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import pipeback
from pipeback.runtime import stage_executor
from pipeback.stages import offload
from pipeback.stages.flight import Root, grown
from pipeback.stages.recomputed_functions import Afresh
from pipeback.stages.saved_graph import saved
from pipeback.stages.stage import Stage
from tests.helpers.choice import mostly_rare
from tests.laws.cases import CASES, OPTIMIZERS, STAGES, data, network, pipeline
from tests.stages.keeping import KINDS, equal, poor, train


def size(tensors, weights=()):
    """Bytes of the memory under the tensors, each memory once."""
    known = {w.untyped_storage().data_ptr() for w in weights}
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(number for pointer, number in found.items() if pointer not in known)


def held(stage, flight, roots=()):
    """What is kept on the device for a backward: by walking the flight, and the graph where it is there."""
    kept = [*flight.leaves, *(t for _, t, _ in saved(list(roots)))]
    if stage.keeping is None:
        kept += [t for _, t, _ in saved(grown(flight.output))]
    else:
        kept += [flight.target] if stage.judges else []
        kept += [] if flight.again is None else flight.again.buffers.values()
        hollow = flight.output is None or isinstance(flight.output, Root)
        assert hollow or flight.output.nbytes == 4, "the output's memory is kept"
    return size(kept, stage.params)


@pytest.fixture
def copies(monkeypatch):
    """Every copy in host memory that is still there: graphs hold them, where nobody can look."""
    alive = weakref.WeakSet()

    class Remembered(offload._Away):
        __slots__ = ("__weakref__",)

        def __init__(self, *arguments):
            super().__init__(*arguments)
            alive.add(self)

    monkeypatch.setattr(offload, "_Away", Remembered)
    return alive


def layered():
    """What saves views, the same tensor twice, masks and statistics."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.3)),
        nn.Sequential(nn.Linear(6, 12), nn.GLU(), nn.LayerNorm(6)),
        nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.SiLU()),
        nn.Sequential(nn.Linear(6, 6), nn.Sigmoid(), nn.Softmax(-1)),
        nn.Linear(6, 6),
    )


@poor
@pytest.mark.parametrize(
    ("activations", "case"),
    mostly_rare(
        product(KINDS, ["pb", "pipedream", "gpipe-4", "one_f_one_b-3"]),
        ("device", "pb"), ("device", "gpipe-4"), ("host", "pipedream"), ("host", "gpipe-4"), ("recompute", "pb"),
        ("recompute", "one_f_one_b-3"),
    ),
)  # fmt: skip
def test_bytes_stated_are_bytes_held(activations, case, copies, monkeypatch):
    """After every push; and in every backward, when a repeat holds most."""
    pipe = pipeline(layered(), CASES[case](STAGES), activations=activations)
    stages, peak, now = pipe._engine.stages, 0, []

    def begin(stage, mb, grad, roots, seeds):
        now[:] = [(stage, stage.flights[mb])]
        return begin_backward(stage, mb, grad, roots, seeds)

    def measured(roots, seeds, leaves, every):
        nonlocal peak
        waiting = sum(held(stage, flight) for stage in stages for flight in stage.flights.values())
        if activations == "recompute":
            stage, graph = now[0][0], held(*now[0], roots)
            assert graph == stage.learnt.activation_bytes + stage.learnt.repeat_bytes
            peak = max(peak, waiting + graph)
        differentiate(roots, seeds, leaves, every)

    begin_backward, differentiate = Stage.begin_backward, stage_executor.differentiate
    monkeypatch.setattr(Stage, "begin_backward", begin)
    monkeypatch.setattr(stage_executor, "differentiate", measured)
    for x, y in data(14, samples=8):
        pipe.push(x, y)
        for stage in stages:
            assert sum(held(stage, f) for f in stage.flights.values()) == stage.learnt.activation_bytes * len(
                stage.flights
            )
            if activations == "recompute":
                streams = [f.again.stream for f in stage.flights.values() if f.again.stream is not None]
                assert sum(stream.nbytes for stream in streams) == stage.learnt.host_bytes * len(stage.flights)
        if activations == "host":
            gc.collect()
            found = sum(copy.elements.untyped_storage().nbytes() for copy in copies)
            assert found == sum(stage.learnt.host_bytes * len(stage.flights) for stage in stages)
        peak = max(peak, sum(held(stage, flight) for stage in stages for flight in stage.flights.values()))
    memory = pipe.memory()
    assert memory.activations >= peak
    assert memory.host == sum(stage.learnt.host_bytes * stage.peak_flights for stage in stages)


@pytest.mark.parametrize("autocast", [False, True])
def test_functions_of_the_weights_that_are_recomputed_are_not_copied(autocast, copies):
    """A normed weight is a function of others, and so is its cast: in host memory are what the activations take."""
    bytes_of = []
    for norm in (lambda layer: layer, nn.utils.parametrizations.weight_norm):
        model = nn.Sequential(*[nn.Sequential(norm(nn.Linear(6, 6)), nn.Tanh()) for _ in range(4)])
        pipe = pipeline(model, "pb", activations="host")
        for x, y in data(9):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                pipe.push(x, y)
        gc.collect()
        stages = pipe._engine.stages
        found = sum(copy.elements.untyped_storage().nbytes() for copy in copies)
        assert found == sum(stage.learnt.host_bytes * len(stage.flights) for stage in stages) > 0
        bytes_of.append([stage.learnt.host_bytes for stage in stages[:-1]])  # B of the last runs on the weights of F
        pipe.drain()
        del pipe, stages
    assert bytes_of[0] == bytes_of[1]


def test_the_peak_stated_is_the_peak_held():
    """One stage, where nothing else can be at its peak at another time."""
    stated = {}
    for kind in KINDS:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)]))
        pipe = pipeline(model, CASES["gpipe-4"](1), activations=kind)
        for x, y in data(8, samples=8):
            pipe.push(x, y)
        stated[kind] = pipe.memory()[3:5]
    one = 8 * 6 * 4  # bytes of an activation: the input, four tanh, and what mse_loss saves: the target beside the last
    assert stated == {
        "device": (4 * 6 * one, 0),
        "host": (4 * 2 * one, 4 * 4 * one),
        "recompute": (4 * 2 * one + 4 * one, 0),
    }


def test_recomputing_many_stages_holds_the_graph_of_one():
    model = [nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(6)]) for _ in range(STAGES)]
    pipe = pipeline(nn.Sequential(*model), "pb", activations="recompute")
    for x, y in data(14, samples=8):
        pipe.push(x, y)
    one = 8 * 6 * 4
    flights = sum(d + 1 for d in pipe.delays)
    assert pipe.memory().activations == (flights + 1) * one + 6 * one  # inputs, the target, the graph of a stage


class Shares(nn.Module):
    """Saves one tensor at three nodes, and a transposed weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x):
        y = x @ self.weight.t()
        self.y = y.untyped_storage()
        return torch.exp(y * y) * y + y.sin()


def test_what_is_copied(copies):
    """Never a weight; a tensor once; and its memory on the device is given back."""
    stage = Stage(0, 2, Shares(), "0", pipeback.methods.create("sgd"), OPTIMIZERS["sgd"])
    stage.keeping = offload.HostActivations()
    freed = []
    stage.module.register_forward_hook(lambda module, given, output: freed.append(StorageWeakRef(module.y)))
    x = torch.randn(8, 64)
    output = stage.forward(0, x)
    assert torch.equal(output, stage.module(x))
    # y is saved by the square, the product and the sine; the exponential once by itself and by the product
    assert [copy.form.shape for copy in copies] == [(8, 64), (8, 64)]
    assert stage.keeping.copied == 2 * 8 * 64 * 4
    del stage.module.y
    assert freed[0].expired() and not StorageWeakRef(x.untyped_storage()).expired()
    del output
    stage.backward(0, torch.ones(8, 64))
    gc.collect()
    assert not copies


def test_memory_of_the_same_address_is_not_the_same_tensor():
    """What F frees is taken again while F still runs."""

    class Frees(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.ModuleList(nn.Linear(32, 32) for _ in range(12))

        def forward(self, x):
            for linear in self.inner:
                x = torch.sin(linear(x))
            return x

    def run(kind):
        torch.manual_seed(1)
        return train(nn.Sequential(Frees(), nn.Linear(32, 32)), "pb", data(6, width=32), activations=kind)

    assert equal(run("host"), run("device"))


@pytest.mark.parametrize("options", [{}, {"workers": 2}], ids=str)
def test_a_pipeline_dropped_in_flight_is_freed(options):
    pipe = pipeline(network(), "pb", activations="host", **options)
    for x, y in data(12):
        pipe.push(x, y)
    stages = [weakref.ref(stage) for stage in pipe._engine.stages]
    if options:
        pipe.close()
    del pipe
    gc.collect()
    assert [stage for stage in stages if stage() is not None] == []


class Shifted(nn.Linear):
    """Computes with a function of its weight, which B computes anew."""

    def forward(self, x):
        return nn.functional.linear(x, 1 + self.weight, self.bias)


def test_so_is_one_that_computes_functions_of_its_weights_anew():
    pipe = pipeline(nn.Sequential(*[Shifted(6, 6) for _ in range(3)]), "pb")
    for x, y in data(4):
        pipe.push(x, y)
    stages = [weakref.ref(stage) for stage in pipe._engine.stages]
    assert isinstance(stages[1]().call, Afresh) and stages[1]().flights
    del pipe
    gc.collect()
    assert [stage for stage in stages if stage() is not None] == []
