"""Activations: on the device, in host memory, or recomputed. Bits, bytes, and what a module may do by the way."""

import gc
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import pipeback
from tests.helpers.choice import mostly_rare
from tests.laws.cases import CASES, FEW, OPTIMIZERS, STAGES, data, everything, network, pipeline
from tests.processes.cases import drawing
from tests.stages.keeping import KINDS, equal, poor, train

# B runs on the very weights that F ran on
ALIKE = [case for case in CASES if case.split("-")[0] in ("sgd", "gpipe", "one_f_one_b", "pipedream", "pipedream_2bw")]
ALIKE.append("spectrain-v2")


@poor
@pytest.mark.parametrize("case", mostly_rare(CASES, *FEW))
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
        size = pipeback.MicroBatches(4, weights="samples")
        return train(drawing(), "pipedream", batches, activations=kind, micro_batch_size=size, clip_norm=0.5, **options)

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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", ["pb", "pipedream", "gpipe-4"])
def test_on_a_gpu(case):
    """The same bits, and less of the GPU's memory while micro-batches wait."""

    def run(kind):
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.manual_seed(0)
        model = nn.Sequential(
            *[nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Dropout(0.2), nn.Linear(512, 512)) for _ in range(4)]
        ).cuda()
        torch.manual_seed(7)
        pipe = pipeline(model, CASES[case](4), activations=kind)
        batches = [(x.cuda(), y.cuda()) for x, y in data(12, samples=256, width=512)]
        losses = [pipe.push(x, y).clone() for x, y in batches]
        torch.cuda.synchronize()
        waiting = torch.cuda.memory_allocated() - before
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
