"""Replica sync: what a thread does amid an update is not taken for the user's writing, and goes on in any case."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pipeback.pipeline.replica_sync import ReplicaSync
from pipeback.private import keep_versions
from tests.helpers.gated import Gated
from tests.laws.cases import data, pipeline, weights

HOME, NONE = SimpleNamespace(slot=None), SimpleNamespace(state={})


def sync():
    norms = [nn.BatchNorm1d(3) for _ in range(2)]
    found = ReplicaSync([[SimpleNamespace(module=norm, weights=[], home=HOME, optimizer=NONE)] for norm in norms])
    found.follow(lambda: None, lambda: None)
    norms[1].running_mean.fill_(7.0)  # statistics of its own
    return found, *norms


@pytest.mark.parametrize("users", [False, True])
def test_a_version_that_is_another_for_a_moment_copies_nothing(users):
    follower, own, twin = sync()
    amid, done = keep_versions((own.weight,)), []
    with torch.no_grad():
        own.weight.mul_(2.0)

    def join():
        done.append("join")
        if not users:  # the update ends, which puts the version back
            amid.__exit__(None, None, None)

    assert follower.due
    follower.follow(join, lambda: done.append("go on"))
    assert done == ["join", "go on"] and not follower.due
    assert torch.equal(own.weight, twin.weight) == users
    assert (twin.running_mean[0] == 7.0) != users


def written(gated):
    gated.gate.mul_(0.5)


def replaced(gated):
    gated.gate = gated.gate * 0.5


@pytest.mark.parametrize("when", [0, 5])
@pytest.mark.parametrize("change", [written, replaced])
@pytest.mark.parametrize("options", [{}, {"store": "host"}, {"vectorize": "auto"}], ids=str)
def test_a_buffer_that_the_user_sets_is_that_of_every_replica(options, change, when):
    """Two halves that are the same batch: what one pipeline does of it."""
    found = []
    for replicas in (None, 2):
        torch.manual_seed(0)
        model = nn.Sequential(*(Gated() for _ in range(3))).double()
        pipe = pipeline(model, "pb", replicas=replicas, **(options if replicas else {}))
        for n, (x, y) in enumerate(data(12, dtype=torch.float64)):
            if n in (when, 8):
                pipe.drain()
                change(model[1])
            pipe.push(*((x, y) if replicas is None else (torch.cat([x, x]), torch.cat([y, y]))))
        pipe.drain()
        found.append(weights(pipe))
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)
