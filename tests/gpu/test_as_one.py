"""Stages as one on a GPU, by the event loop there: each method as stacks and as CUDA graphs, and compiled stages."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pipeback
from pipeback.vectorized.making.cuda_graph import CudaGraphed
from tests.laws.as_one import S, doubles, model, same, unlike
from tests.laws.cases import CASES, allowed, pipeline, weights

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
MOMENTUM = [
    "sgd",
    "pb",
    "pipedream",
    "cerebras",
    "spectrain",
    "lwp",
    "sc",
    "gpipe-4",
    "pipedream_2bw",
    "msnag",
    "braking",
]
ADAM = ["pb", "pipeoptim", "msnag", "dc_asgd", "gap_aware", "staleness_lr"]
WAYS = [*((case, "momentum") for case in MOMENTUM), *((case, "adamw") for case in ADAM)]


def pushed(case, optimizer, build=model, pushes=(40, 1, 1, 18), clip=None, **options):
    """Losses and weights, in flight, after pushes of so many micro-batches."""
    xs, ys = (torch.cat(v).cuda() for v in zip(*doubles(sum(pushes)), strict=True))
    pipe = pipeline(build().cuda(), CASES[case](S), optimizer, micro_batch_size=3, clip_norm=clip, **options)
    losses, at = [], 0
    for count in pushes:
        end = at + 3 * count
        losses.append(pipe.push(xs[at:end], ys[at:end]).double().cpu())
        at = end
    return torch.stack(losses), weights(pipe).cpu()


@pytest.mark.parametrize(("case", "optimizer"), WAYS)
@pytest.mark.parametrize("vectorize", [True, "cuda_graph"])
def test_methods(case, optimizer, vectorize):
    if not allowed(case, optimizer):
        pytest.skip("its equations do not allow this optimizer")
    same(pushed(case, optimizer, vectorize=vectorize), pushed(case, optimizer))


@pytest.mark.parametrize("vectorize", [True, "cuda_graph", "auto"])
@pytest.mark.parametrize("build", [model, unlike])
def test_clipped(vectorize, build):
    same(pushed("pb", "momentum", build, clip=0.05, vectorize=vectorize), pushed("pb", "momentum", build, clip=0.05))


def test_auto_captures_ticks_of_long_pushes(monkeypatch):
    found, at = [], CudaGraphed.at
    monkeypatch.setattr(CudaGraphed, "at", lambda *given: found.append(at(*given)) or found[-1])
    same(pushed("cerebras", "momentum", vectorize="auto"), pushed("cerebras", "momentum"))
    assert found


@pytest.mark.parametrize("case", ["pb", "cerebras", "gpipe-4"])
def test_compiled_by_inductor(case):
    pytest.importorskip("triton")
    same(pushed(case, "momentum", compile=True), pushed(case, "momentum"), within=1e-9)


def test_compiled_whole_ticks():
    pytest.importorskip("triton")
    same(pushed("pb", "momentum", vectorize=True, compile=True), pushed("pb", "momentum"), within=1e-9)


@pytest.mark.parametrize("options", [{}, {"vectorize": True}, {"activations": "host"}], ids=str)
def test_inputs_on_the_cpu_for_a_first_stage_without_weights(options):
    def trained(where):
        torch.manual_seed(0)
        layers = [nn.Flatten(), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)]
        pipe = pipeback.Pipeline(
            nn.Sequential(*layers).double().to(where), loss=nn.functional.mse_loss, method="pb", micro_batch_size=2,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), **options,
        )  # fmt: skip
        draw = torch.Generator().manual_seed(1)
        x = torch.randn(40, 2, 4, dtype=torch.float64, generator=draw)
        y = torch.randn(40, 3, dtype=torch.float64, generator=draw)
        return pipe.push(x, y).double().cpu(), weights(pipe).cpu()

    same(trained("cuda"), trained("cpu"), within=1e-9)


class Skips(nn.Module):
    """A model that is followed, with a skip over two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = self.first(x).tanh()
        return self.last(h + self.middle(h).tanh())


@pytest.mark.parametrize("method", ["sgd", "pb"])
def test_an_example_on_the_cpu(method):
    def trained(where):
        torch.manual_seed(0)
        x, y = torch.randn(20, 8, dtype=torch.float64), torch.randn(20, 3, dtype=torch.float64)
        pipe = pipeback.Pipeline(
            Skips().double().to(where), loss=nn.functional.mse_loss, method=method, micro_batch_size=2,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), stages="layer", example=x[:2],
        )  # fmt: skip
        return pipe.push(x, y).double().cpu(), weights(pipe).cpu()

    same(trained("cuda"), trained("cpu"), within=1e-9)


def convolutions(dtype):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU()) for _ in range(6)]
    first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU())
    return nn.Sequential(first, *blocks, nn.Sequential(nn.Flatten(), nn.Linear(8 * 64, 3))).to("cuda", dtype)


@pytest.mark.parametrize("vectorize", [True, "cuda_graph"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 2])
def test_pictures_with_channels_last(size, dtype, vectorize):
    """In float32 a GPU's convolutions round factors to TF32, and no two kernels do so alike."""

    def trained(**options):
        draw = torch.Generator().manual_seed(1)
        x = torch.randn(40, 3, 8, 8, dtype=dtype, generator=draw).to("cuda")
        y = torch.randint(3, (40,), generator=draw).to("cuda")
        pipe = pipeback.Pipeline(
            convolutions(dtype), loss=nn.functional.cross_entropy, method="pb", micro_batch_size=size,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9), **options,
        )  # fmt: skip
        loss = pipe.push(x.contiguous(memory_format=torch.channels_last), y)
        return pipe, (loss.detach().cpu(), weights(pipe).cpu())

    pipe, found = trained(vectorize=vectorize)
    assert "as one" in pipe.vectorized["stages 1 … 6"]
    if dtype == torch.float64:
        same(found, trained()[1], within=1e-9)
    assert all(t.isfinite().all() for t in found)
