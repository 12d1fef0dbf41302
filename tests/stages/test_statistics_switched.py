"""A batch norm whose running statistics are switched off and on again while micro-batches are in flight."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipeback
from tests.stages.keeping import equal, poor

DATA = list(zip(*torch.randn(2, 10, 6, 4, generator=torch.Generator().manual_seed(1)), strict=True))
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def network(tracks):
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4, track_running_stats=tracks)
    return nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def built(model, activations):
    optimizer = lambda params: torch.optim.SGD(params, lr=0.05)  # noqa: E731
    return pipeback.Pipeline(model, loss=mse_loss, optimizer=optimizer, method="pipedream", activations=activations)


def switch(norm):
    norm.track_running_stats = not norm.track_running_stats
    values = torch.zeros(4), torch.ones(4), torch.tensor(0)
    for name, value in zip(STATISTICS, values, strict=True):
        setattr(norm, name, value if norm.track_running_stats else None)


def trained(activations, tracks, saved=()):
    pipe = built(network(tracks), activations)
    losses = []
    for n, (x, y) in enumerate(DATA):
        if n in (3, 6, 8):
            switch(pipe.model[1])
        losses.append(pipe.push(x, y).clone())
        if n in saved:
            state, before = pipe.state_dict(), pipe.model[1]
            pipe.close()
            pipe = built(network(before.track_running_stats), activations)
            pipe.load_state_dict(state)
    pipe.drain()
    left = [torch.zeros(()) if (b := getattr(pipe.model[1], name)) is None else b for name in STATISTICS]
    return [*losses, *pipe.model.parameters(), *left]


@poor
@pytest.mark.parametrize("saved", [(), (3,), (6,)])
@pytest.mark.parametrize("tracks", [True, False])
def test_recomputing_changes_no_bit(tracks, saved):
    assert equal(trained("recompute", tracks, saved), trained("device", tracks))
