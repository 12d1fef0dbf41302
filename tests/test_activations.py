"""Activations: on the device, in host memory, or recomputed. Bits, bytes, and what a module may do by the way."""

import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import pipeback
from pipeback import errors
from pipeback.runtime import worker
from pipeback.stages import offload
from pipeback.stages.saved_graph import saved
from pipeback.stages.stage import Stage, grown
from tests.collecting import frozen
from tests.laws.cases import CASES, OPTIMIZERS, STAGES, data, everything, network, pipeline
from tests.processes.cases import drawing

KINDS = ("device", "host", "recompute")
# B runs on the very weights that F ran on
ALIKE = [case for case in CASES if case.split("-")[0] in ("sgd", "gpipe", "one_f_one_b", "pipedream", "pipedream_2bw")]
ALIKE.append("spectrain-v2")
poor = pytest.mark.filterwarnings("ignore:.*takes its statistics")


def train(model, case, batches, **options):
    """Losses, and all that is held after a drain."""
    torch.manual_seed(7)
    pipe = pipeline(model, CASES[case](STAGES) if case in CASES else case, **options)
    losses = torch.stack([pipe.push(x, y).clone() for x, y in batches])
    pipe.drain()
    result = losses, everything(pipe)
    pipe.close()
    return result


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# -- bits --------------------------------------------------------------------------------------------------------------


@poor
@pytest.mark.parametrize("case", CASES)
def test_host_memory_changes_no_bit(case):
    for model in (network, drawing):
        wanted = train(model(), case, data(15, samples=8))
        assert equal(train(model(), case, data(15, samples=8), activations="host"), wanted)


@poor
@pytest.mark.parametrize("case", ALIKE)
def test_recomputing_on_the_weights_of_f_changes_no_bit(case):
    for model in (network, drawing):
        wanted = train(model(), case, data(15, samples=8))
        assert equal(train(model(), case, data(15, samples=8), activations="recompute"), wanted)


def test_recomputing_on_newer_weights_is_another_training():
    found = [train(network(), "pb", data(15), activations=kind) for kind in ("device", "recompute")]
    assert torch.equal(found[0][0][:2], found[1][0][:2]) and not torch.equal(found[0][1], found[1][1])


@poor
@pytest.mark.parametrize("activations", ["host", "recompute"])
def test_replicas_and_short_micro_batches(activations):
    """Weights by samples, clipping, two replicas in threads."""
    batches = data(6, samples=12)

    def run(kind, **options):
        return train(drawing(), "pipedream", batches, activations=kind, micro_batch_size=4, weights="samples",
                     clip_norm=0.5, **options)  # fmt: skip

    assert equal(run(activations), run("device"))
    assert equal(run(activations, replicas=2), run("device", replicas=2))
    assert equal(run(activations, replicas=2, workers=2), run("device", replicas=2))


@pytest.mark.parametrize("activations", KINDS)
@pytest.mark.parametrize("case", ["sgd", "pb", "pipedream", "spectrain"])
def test_a_loss_computed_outside(case, activations):
    """As a push, where a micro-batch that falls leaves no trace."""
    batches = data(14)
    inside = pipeline(network(), CASES[case](STAGES), activations=activations)
    outside = pipeback.Pipeline(
        network(), loss=None, optimizer=OPTIMIZERS["momentum"], method=CASES[case](STAGES), activations=activations
    )
    for n, (x, y) in enumerate(batches):
        output = outside.forward(x)
        if n == 5:
            outside.forget()
            continue
        mse_loss(output, y).backward()
        outside.backward(output.grad)
        outside.step()
        inside.push(x, y)
    inside.drain(), outside.drain()
    assert torch.equal(everything(inside), everything(outside))


class Follows(nn.Module):
    """Reads a buffer, keeps it for the backward, and then replaces it and changes another in place."""

    def __init__(self, width=6):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.register_buffer("mean", torch.ones(width))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        scale = 1 + self.calls / 10
        y = torch.tanh(self.inner(x)) * self.mean * scale
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        self.calls += 1
        return y


@pytest.mark.parametrize("case", ["gpipe-4", "pipedream"])
@pytest.mark.parametrize("activations", ["host", "recompute"])
def test_buffers_that_the_output_depends_on(case, activations):
    """The repeat finds them as F did, and leaves them alone."""

    def run(kind):
        torch.manual_seed(1)
        model = nn.Sequential(*[Follows() for _ in range(STAGES)])
        return train(model, case, data(15), activations=kind), [stage.calls.item() for stage in model]

    (found, calls), (wanted, others) = run(activations), run("device")
    assert calls == others == [15.0] * STAGES
    assert equal(found, wanted)


def test_training_mode_is_that_of_f():
    """Who looks at the model between two pushes may leave it in evaluation mode."""

    def run(kind):
        torch.manual_seed(7)
        pipe = pipeline(nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4)) for _ in range(3)]),
                        "pipedream", activations=kind)  # fmt: skip
        for x, y in data(8):
            pipe.push(x, y)
        pipe.model.eval()
        pipe.drain()
        assert not any(module.training for module in pipe.model.modules())
        return [everything(pipe)]

    assert equal(run("recompute"), run("device"))


def test_autocast_is_that_of_f():
    def run(kind, inside, load=False):
        pipe = pipeline(network(3, 16), "pipedream", activations=kind)
        for n, (x, y) in enumerate(data(9, width=16)):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=n % 2 == 0 or inside):
                pipe.push(x, y)
                if n == 6 and load:
                    pipe.load_state_dict(pipe.state_dict())
        pipe.drain()
        return [everything(pipe)]

    for inside in (True, False):
        assert equal(run("recompute", inside), run("device", inside))
        assert equal(run("recompute", inside, load=True), run("device", inside))


class Changing(nn.Module):
    """Works in place on its input, and gives a tuple with an integer part; then takes one."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, value):
        x, number = value if isinstance(value, tuple) else (value, torch.arange(value.shape[0]))
        x += number[:, None] / 100
        return self.inner(torch.nn.functional.silu(x)).t().contiguous().t(), number + 1


class First(nn.Module):
    def forward(self, value):
        return value[0] * 2


@pytest.mark.parametrize("activations", ["host", "recompute"])
def test_inputs_changed_in_place_tuples_and_other_strides(activations):
    def run(kind, **options):
        torch.manual_seed(1)
        return train(nn.Sequential(*[Changing() for _ in range(4)], First()), "pipedream", data(12),
                     activations=kind, **options)  # fmt: skip

    for options in ({}, {"workers": 2}):
        assert equal(run(activations, **options), run("device"))


class Frugal(nn.Module):
    """Checkpoints a part of itself."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Tanh())
        self.outer = nn.Linear(6, 6)

    def forward(self, x):
        return self.outer(checkpoint(self.inner, self.outer(x), use_reentrant=False))


@pytest.mark.parametrize("activations", ["host", "recompute"])
def test_modules_that_checkpoint_themselves(activations):
    def run(kind):
        torch.manual_seed(1)
        return train(nn.Sequential(*[Frugal() for _ in range(3)]), "pipedream", data(12), activations=kind)

    assert equal(run(activations), run("device"))


# -- what is said ------------------------------------------------------------------------------------------------------


def test_an_unknown_kind():
    with pytest.raises(ValueError, match="activations must be one of device, recompute, host, but is 'disk'"):
        pipeline(network(), "pb", activations="disk")


def test_functions_of_the_weights():
    """A graph that waits for its backward has them made anew, unless it waits in host memory; one that is made for the
    backward needs no more."""
    normed = lambda: nn.Sequential(*[nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)) for _ in range(3)])  # noqa: E731
    with pytest.raises(ValueError, match="saves a function of the weights"):
        pipeline(normed(), "pb", activations="host").push(*data(1)[0])
    for kind in ("device", "recompute"):
        pipe = pipeline(normed(), "pb", activations=kind)
        assert all(torch.isfinite(pipe.push(x, y)) for x, y in data(12))


class Fails(nn.Module):
    """In the backward's own forward."""

    def __init__(self, after):
        super().__init__()
        self.inner, self.calls, self.after = nn.Linear(6, 6), 0, after

    def forward(self, x):
        self.calls += torch.is_grad_enabled()
        if self.calls > self.after:
            raise ArithmeticError("once too often")
        return self.inner(x)


def test_a_repeat_that_fails_names_stage_and_micro_batch():
    module = Fails(10**9)
    pipe = pipeline(nn.Sequential(nn.Linear(6, 6), module, nn.Linear(6, 6)), "pb", activations="recompute")
    pipe.push(*data(1)[0])
    module.after = module.calls + 2
    with pytest.raises(errors.StageError, match=r"stage 1 \(1\), micro-batch \d+: the backward failed: once too often"):
        for x, y in data(9):
            pipe.push(x, y)
    assert pipe.closed


@pytest.mark.parametrize("activations", KINDS)
@pytest.mark.parametrize("what", [0, 1])
def test_changes_of_what_the_backward_needs_are_noticed(activations, what):
    pipe = pipeline(network(), CASES["gpipe-4"](STAGES), activations=activations)
    batches = data(4)
    with pytest.raises(RuntimeError, match="stage 0.*in.?place" if not what else "stage 4.*in.?place"):
        for n in range(4):
            pipe.push(*batches[n])
            batches[0][what].add_(1)


@pytest.mark.parametrize("activations", KINDS)
def test_a_loss_that_is_not_finite_names_the_stage(activations):
    pipe = pipeline(network(), "pb", activations=activations, check_finite=True)
    batches = data(4)
    pipe.push(*batches[0])
    with torch.no_grad():
        pipe.model[2][0].weight.fill_(float("nan"))
    with pytest.raises(errors.StageError, match="stage 2 .*the output is not finite"):
        pipe.push(*batches[1])


@pytest.mark.parametrize("activations", KINDS)
def test_hooks_run_as_often_as_the_forward(activations):
    seen = []
    model = network(3)
    pipe = pipeline(model, "sgd", activations=activations)
    x, y = data(1)[0]
    pipe.push(x, y)
    model[0].register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    for _ in range(3):
        pipe.push(x, y)
    assert seen == ([False, True] * 3 if activations == "recompute" else [True] * 3)


@pytest.mark.parametrize("activations", ["host", "recompute"])
def test_record_and_watch_change_no_bit(activations):
    def run(look):
        pipe = pipeline(network(), "cerebras", activations=activations)
        if look:
            pipe.record()
            watch = pipe.watch()
        for n, (x, y) in enumerate(data(16)):
            if look and n % 4 == 0:
                watch.follow()
            pipe.push(x, y)
        if look:
            assert all(gap >= 0 for gap in watch.gap)
            assert sum(1 for _ in pipe.recorded) == len(pipe.ledger) + sum(stage.version for stage in pipe._stages)
        return [everything(pipe)]

    assert equal(run(True), run(False))


# -- bytes -------------------------------------------------------------------------------------------------------------


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
        assert flight.output is None or flight.output.untyped_storage().nbytes() <= 4, "the output's memory is kept"
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
    with frozen():
        yield alive


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
@pytest.mark.parametrize("case", ["pb", "pipedream", "gpipe-4", "one_f_one_b-3"])
@pytest.mark.parametrize("activations", KINDS)
def test_bytes_stated_are_bytes_held(activations, case, copies, monkeypatch):
    """After every push; and in every backward, when a repeat holds most."""
    pipe = pipeline(layered(), CASES[case](STAGES), activations=activations)
    stages, peak, now = pipe._stages, 0, []

    def begin(stage, mb, grad, roots, seeds):
        now[:] = [(stage, stage.flights[mb])]
        return begin_backward(stage, mb, grad, roots, seeds)

    def measured(roots, seeds, leaves, every):
        nonlocal peak
        waiting = sum(held(stage, flight) for stage in stages for flight in stage.flights.values())
        if activations == "recompute":
            stage, graph = now[0][0], held(*now[0], roots)
            assert graph == stage.activation_bytes + stage.repeat_bytes
            peak = max(peak, waiting + graph)
        differentiate(roots, seeds, leaves, every)

    begin_backward, differentiate = Stage.begin_backward, worker.differentiate
    monkeypatch.setattr(Stage, "begin_backward", begin)
    monkeypatch.setattr(worker, "differentiate", measured)
    for x, y in data(14, samples=8):
        pipe.push(x, y)
        for stage in stages:
            assert sum(held(stage, f) for f in stage.flights.values()) == stage.activation_bytes * len(stage.flights)
            if activations == "recompute":
                streams = [f.again.stream for f in stage.flights.values() if f.again.stream is not None]
                assert sum(stream.nbytes for stream in streams) == stage.host_bytes * len(stage.flights)
        if activations == "host":
            gc.collect()
            found = sum(copy.elements.untyped_storage().nbytes() for copy in copies)
            assert found == sum(stage.host_bytes * len(stage.flights) for stage in stages)
        peak = max(peak, sum(held(stage, flight) for stage in stages for flight in stage.flights.values()))
    memory = pipe.memory()
    assert memory.activations >= peak
    assert memory.host == sum(stage.host_bytes * stage.peak_flights for stage in stages)


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


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", ["pb", "pipedream", "gpipe-4"])
def test_on_a_gpu(case):
    """The same bits, and less of the GPU's memory while micro-batches wait."""

    def run(kind):
        torch.manual_seed(0)
        model = nn.Sequential(
            *[nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Dropout(0.2), nn.Linear(512, 512)) for _ in range(4)]
        ).cuda()
        torch.manual_seed(7)
        pipe = pipeline(model, CASES[case](4), activations=kind)
        batches = [(x.cuda(), y.cuda()) for x, y in data(12, samples=256, width=512)]
        losses = [pipe.push(x, y).clone() for x, y in batches]
        torch.cuda.synchronize()
        waiting = torch.cuda.memory_allocated()
        pipe.load_state_dict(pipe.state_dict())
        pipe.drain()
        result = torch.stack(losses).cpu(), everything(pipe).cpu()
        return result, waiting

    (wanted, most), (host, less), (again, least) = (run(kind) for kind in KINDS)
    assert equal(host, wanted)
    if case != "pb":
        assert equal(again, wanted)
    if case == "pb":
        assert less < most and least < most


@pytest.mark.parametrize("options", [{}, {"workers": 2}], ids=str)
def test_a_pipeline_dropped_in_flight_is_freed(options):
    pipe = pipeline(network(), "pb", activations="host", **options)
    for x, y in data(12):
        pipe.push(x, y)
    stages = [weakref.ref(stage) for stage in pipe._stages]
    if options:
        pipe.close()
    del pipe
    gc.collect()
    assert [stage for stage in stages if stage() is not None] == []


@pytest.mark.parametrize("saved", [False, True])
def test_what_is_done_again_has_the_numbers_of_its_forward(saved):
    """A dropout's probability, a slope: they may be set while micro-batches are in flight."""

    def trained(activations, saved=False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.1), nn.Dropout(0.0), nn.Linear(8, 6), nn.LeakyReLU(0.1))
        build = lambda: pipeback.Pipeline(  # noqa: E731
            model, loss=nn.functional.mse_loss, optimizer=partial(torch.optim.SGD, lr=0.1), method="pb",
            micro_batch_size=2, activations=activations,
        )  # fmt: skip
        pipe, losses = build(), []
        for n, slope in enumerate((0.1, 0.1, 0.7, 0.7, 0.2)):
            model[1].negative_slope = model[4].negative_slope = slope
            model[2].p = 0.5 if n > 2 else 0.0
            if saved and n == 3:
                state = pipe.state_dict()
                pipe = build()
                pipe.load_state_dict(state)
            losses.append(pipe.push(torch.randn(4, 6), torch.randn(4, 6)))
        pipe.drain()
        return torch.stack([loss.detach() for loss in losses]), torch.nn.utils.parameters_to_vector(model.parameters())

    for found, wanted in zip(trained("recompute", saved), trained("device"), strict=True):
        assert torch.equal(found, wanted)
