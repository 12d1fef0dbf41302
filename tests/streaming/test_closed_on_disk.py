"""A pipeline with a disk store that an error has closed says how to go on, and that works as it is written."""

import pytest
import torch
from torch import nn

import pipeback
from pipeback.errors import StageError


class Fails(torch.autograd.Function):
    """Its backward fails once it has been called so many times."""

    left = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Fails.left -= 1
        if not Fails.left:
            raise ValueError("stop")
        return grad


class Failing(nn.Linear):
    def forward(self, x):
        return Fails.apply(super().forward(x))


def build(folder):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Failing(6, 6), nn.Linear(6, 6)).double()
    return pipeback.Pipeline(
        model, loss=nn.functional.mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), method="pb",
        micro_batch_size=1, store=pipeback.DiskStore(folder, commit_every=4),
    )  # fmt: skip


def trained(pipe, count):
    for n in range(pipe.pushes, count):
        pipe.push(torch.full((4, 6), n / 8.0).double(), torch.ones(4, 6).double())
    return {name: value.clone() for name, value in pipe.model.state_dict().items()}


def test_built_anew_it_goes_on(tmp_path):
    wanted = trained(build(tmp_path / "whole"), 5)
    pipe = build(tmp_path / "own")
    trained(pipe, 2)
    Fails.left = 2  # not before: the rehearsal runs backwards, too, as often as its measurement takes
    with pytest.raises(StageError, match="the backward failed: stop"):
        trained(pipe, 5)
    with pytest.raises(
        RuntimeError, match=r"or close the pipeline with pipe.close\(\) and build the model.*anew"
    ) as told:
        trained(pipe, 5)
    assert "take_back" not in str(told.value).partition("could not be taken back")[2]
    pipe.close()
    pipe = build(tmp_path / "own")
    assert pipe.pushes == 2
    found = trained(pipe, 5)
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())
    pipe.close()
