"""MuonAdamW is torch's Muon on matrices and torch's AdamW on the rest, bit for bit, in plain loops and in pipelines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pipeback
from pipeback.optim import MuonAdamW
from tests.laws.cases import everything

OPTIONS = {"lr": 0.01, "weight_decay": 0.1}


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh()) for _ in range(4)))


def batches(count: int) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    return [tuple(torch.randn(2, 3, 6, generator=generator)) for _ in range(count)]


def plain(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> torch.Tensor:
    for x, y in batches(20):
        model.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("muon", [True, False])
def test_it_is_both_of_torchs(muon: bool) -> None:
    mine, theirs = network(), network()
    found = plain(mine, [MuonAdamW(mine.parameters(), muon=muon, **OPTIONS)])
    matrices = [p for p in theirs.parameters() if p.dim() == 2 and muon]
    others = [p for p in theirs.parameters() if p.dim() != 2 or not muon]
    both: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, **OPTIONS)]
    if muon:
        both.append(torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **OPTIONS))
    assert torch.equal(found, plain(theirs, both))


def test_groups_keep_their_options() -> None:
    model = network()
    optimizer = MuonAdamW(
        [{"params": model[0].parameters(), "muon": False}, {"params": model[1:].parameters(), "lr": 1}]
    )
    assert [(group["muon"], group["lr"], len(group["params"])) for group in optimizer.param_groups] == [
        (False, 1e-3, 4), (True, 1, 3), (False, 1, 9),
    ]  # fmt: skip


def pipeline(method: str, seed: int = 0, **options: Any) -> pipeback.Pipeline:
    return pipeback.Pipeline(
        network(seed), loss=nn.functional.mse_loss, method=method, optimizer=lambda p: MuonAdamW(p, **OPTIONS),
        micro_batch_size=3, **options,
    )  # fmt: skip


def test_without_a_delay_it_is_the_plain_loop() -> None:
    pipe, model = pipeline("sgd"), network()
    for x, y in batches(20):
        pipe.push(x, y)
    pipe.drain()
    mine = torch.cat([p.detach().flatten() for p in pipe.model.parameters()])
    assert torch.equal(mine, plain(model, [MuonAdamW(model.parameters(), **OPTIONS)]))


def test_step_hooks_are_called_once() -> None:
    model, heard = network(), []
    optimizer = MuonAdamW(model.parameters())
    optimizer.register_step_post_hook(lambda *_: heard.append(1))
    nn.functional.mse_loss(model(torch.ones(2, 6)), torch.ones(2, 6)).backward()
    optimizer.step()
    assert heard == [1]


@pytest.mark.parametrize("method", ["pb", "pipedream", "ef"])
def test_runtimes_stores_and_states(method: str, tmp_path: Any) -> None:
    def run(**options: Any) -> torch.Tensor:
        pipe = pipeline(method, **options)
        for x, y in batches(17):
            pipe.push(x, y)
        found = everything(pipe)
        pipe.close()
        return found

    expected = run()
    for options in ({"workers": 2}, {"store": "host"}, {"store": f"disk:{tmp_path}"}):
        assert torch.equal(run(**options), expected), options
    one, other = pipeline(method), pipeline(method, seed=4)
    for x, y in batches(17)[:9]:
        one.push(x, y)
    other.load_state_dict(one.state_dict())
    for x, y in batches(17)[9:]:
        other.push(x, y)
    assert torch.equal(everything(other), expected)
