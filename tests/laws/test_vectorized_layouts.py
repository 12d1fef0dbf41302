"""Law: graphs get tensors that lie in memory as those for which they were traced and checked, however inputs lie.

A GPU's group norm takes no others, and a product of float32 numbers may round its factors there.
"""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import pipeback
from pipeback.tensors import accelerators
from pipeback.vectorized.making import fastest_way, verify
from pipeback.vectorized.stacks import fit_stacks, whole_cost
from tests.helpers.choice import diagonal
from tests.laws.as_one import same
from tests.laws.cases import weights

aten = torch.ops.aten


class Strict(TorchDispatchMode):
    """Group norms as a GPU has them: the forward refuses what is not contiguous, the backward misreads it."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (aten.native_group_norm.default, aten.native_group_norm_backward.default):
            count = 2 if "backward" in str(function) else 1
            if not all(t.is_contiguous() for t in args[:count]):
                raise RuntimeError("Expected X.is_contiguous(memory_format) to be true, but got false.")
        return function(*args, **(kwargs or {}))


def convolution(channels, width, stride=1):
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, stride, padding=1, dtype=torch.float64),
        nn.GroupNorm(2, width, dtype=torch.float64),
        nn.ReLU(),
    )


class LastOfAll(nn.Module):
    """Its output has channels last, and it is no graph, since it draws random numbers."""

    def forward(self, x):
        return (x + 0 * torch.rand(())).contiguous(memory_format=torch.channels_last)


def pictures(between):
    torch.manual_seed(0)
    head = nn.Sequential(nn.Flatten(), nn.Linear(8 * 16, 3, dtype=torch.float64))
    middle = [LastOfAll()] if between else []
    blocks = [convolution(8, 8) for _ in range(3)]
    return nn.Sequential(convolution(4, 8, 2), *middle, *blocks, head)


def trained(between, size, **options):
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(40, 4, 8, 8, dtype=torch.float64, generator=draw).contiguous(memory_format=torch.channels_last)
    y = torch.randint(3, (40,), generator=draw)
    pipe = pipeback.Pipeline(
        pictures(between), loss=nn.functional.cross_entropy, method="pb", micro_batch_size=size,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), **options,
    )  # fmt: skip
    first = pipe.push(x[: 2 * size], y[: 2 * size])
    with Strict() if options else torch.enable_grad():
        second = pipe.push(x[2 * size :], y[2 * size :])
        single = pipe.push(x[:size], y[:size])
        return pipe, torch.stack([first.detach(), second.detach(), single.detach()]), weights(pipe)


@pytest.mark.parametrize(("between", "size"), diagonal([True, False], [1, 2]))
def test_inputs_with_channels_last(between, size, monkeypatch):
    monkeypatch.setattr(fastest_way, "away", lambda device: True)  # the CPU chooses channels last where that is faster
    _, *wanted = trained(between, size)
    pipe, *found = trained(between, size, vectorize=True)
    assert any(told.startswith("as one") for told in pipe.vectorized.values())
    same(found, wanted)


def noting(seen):
    """A layer that notes how products of float32 numbers are to be rounded, where nobody looks for what it reads."""

    class Precise(nn.Linear):
        def forward(self, x):
            seen.append(torch.backends.mkldnn.matmul.fp32_precision)
            return super().forward(x)

    return Precise


def test_checks_round_no_factors_and_training_does(monkeypatch):
    """Else stages would seem to compute something else than their graphs, whose kernels round otherwise."""
    seen: dict[str, list[str]] = {"checked": [], "trained": []}

    def noted(check, *given):
        seen["checked"].append(torch.backends.mkldnn.matmul.fp32_precision)
        return check(*given)

    for name in ("_prove", "judged_alike"):
        check = verify.in_full_precision(partial(noted, getattr(verify, name).__wrapped__))
        monkeypatch.setattr(verify, name, check)
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        kind = noting(seen["trained"])
        model = nn.Sequential(*[kind(6, 6) for _ in range(4)], nn.Linear(6, 6))
        pipe = pipeback.Pipeline(
            model, loss=nn.functional.mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), method="pb",
            micro_batch_size=1, vectorize=True,
        )  # fmt: skip
        pipe.push(torch.randn(30, 6), torch.randn(30, 6))
        now = torch.backends.mkldnn.matmul.fp32_precision
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"
    assert set(seen["checked"]) == {"ieee"} and seen["trained"][-1] == now == "bf16"


def test_what_rounds_nothing_stays_as_it_was():
    with accelerators.full_precision(torch.device("cpu")):
        assert torch.backends.mkldnn.conv.fp32_precision == "none"


class Scaled(nn.Linear):
    """The same layer, but for a constant."""

    factor = 1.0

    def forward(self, x):
        return self.factor * super().forward(x)


@pytest.mark.parametrize(("apart", "as_one"), [(0.0, True), (1e-6, False)])
def test_kernels_that_add_in_any_order(apart, as_one, monkeypatch):
    """Their last bits are others at every call, which tells no stages apart; a constant does."""
    calls, computed = iter(range(1, 10_000)), verify._computed

    def noisy(*given):
        noise = 1 + 1e-15 * (next(calls) % 5)
        return [t if t is None else t * noise for t in computed(*given)]

    monkeypatch.setattr(verify, "_computed", noisy)
    torch.manual_seed(0)
    layers = [Scaled(6, 6, dtype=torch.float64) for _ in range(2)]
    layers[0].factor += apart
    model = nn.Sequential(*layers, nn.Linear(6, 6, dtype=torch.float64))
    pipe = pipeback.Pipeline(
        model, loss=nn.functional.mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), method="pb",
        micro_batch_size=1, vectorize="auto",
    )  # fmt: skip
    pipe.push(torch.randn(9, 6, dtype=torch.float64), torch.randn(9, 6, dtype=torch.float64))
    assert ("as one" in " ".join(pipe.vectorized.values())) == as_one


# -- single stages with channels last ----------------------------------------------------------------------------------


class Laying(TorchDispatchMode):
    """Counts copies of pictures."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        copies = function in (aten.clone.default, aten.copy_.default, aten.cat.default)
        self.count += copies and isinstance(args[0], torch.Tensor) and args[0].dim() == 4
        return function(*args, **(kwargs or {}))


def unlike(dropped=False):
    torch.manual_seed(0)
    blocks = [convolution(a, b) for a, b in zip((4, 8, 12, 16), (8, 12, 16, 8), strict=True)]
    if dropped:
        blocks.insert(2, nn.Dropout2d(0.5))
    return nn.Sequential(*blocks, nn.Sequential(nn.Flatten(), nn.Linear(8 * 64, 3, dtype=torch.float64)))


def pushed(net, monkeypatch, **options):
    """Push micro-batches to stages for which channels last are measured to be fastest; return the copies, too."""
    monkeypatch.setattr(fastest_way, "seconds", lambda calls, device: [2.0, 1.0, 3.0][: len(calls)])
    draw = torch.Generator().manual_seed(1)
    x, y = (
        torch.randn(40, 4, 8, 8, dtype=torch.float64, generator=draw),
        torch.randint(3, (40,), generator=draw),
    )
    pipe = pipeback.Pipeline(
        net, loss=nn.functional.cross_entropy, method="pb", micro_batch_size=2,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), **options,
    )  # fmt: skip
    first, mode = pipe.push(x, y).item(), Laying()
    with mode:
        second = pipe.push(x, y).item()
    return pipe, [torch.tensor([first, second]), weights(pipe)], mode.count


def lasts(pipe):
    return [stage.stack is not None and stage.stack.maker.way.last for stage in pipe._engine.stages]


def test_what_goes_from_one_to_another_is_not_copied(monkeypatch):
    _, wanted, _ = pushed(unlike(), monkeypatch)
    pipe, found, copies = pushed(unlike(), monkeypatch, vectorize=True)
    assert lasts(pipe) == [True, True, True, True, False]
    same(found, wanted)
    assert copies == 4 * 20  # per micro-batch: where the first of these stages begins, and the last one ends


@pytest.mark.parametrize(("takes", "last"), [(0.0, True), (9.0, False)])
def test_what_is_copied_where_other_stages_begin_counts(takes, last, monkeypatch):
    """A stage of random numbers, which takes and gives contiguous pictures, is among them."""
    monkeypatch.setattr(fit_stacks, "change_seconds", lambda kind, device: takes)
    pipe, *_ = pushed(unlike(dropped=True), monkeypatch, vectorize=True)
    assert lasts(pipe) == [last, last, False, last, last, False]


def test_stages_that_run_one_by_one_get_their_weights_as_they_were(monkeypatch):
    monkeypatch.setattr(whole_cost, "gain", lambda stack, under, whole: 0.5)
    pipe, *_ = pushed(unlike(), monkeypatch, vectorize="auto")
    assert not any(lasts(pipe)) and all(stage.stack is None for stage in pipe._engine.stages)
    assert all(p.is_contiguous() for p in pipe.model.parameters())


def test_the_event_loop_is_timed_on_weights_as_it_has_them(monkeypatch):
    seen, before = [], whole_cost.lay_contiguously
    monkeypatch.setattr(
        whole_cost, "lay_contiguously",
        lambda stages: (seen.extend(p.is_contiguous() for s in stages for p in s.module.parameters()), before(stages)),
    )  # fmt: skip
    pushed(unlike(), monkeypatch, vectorize="auto")
    assert seen and all(seen)
