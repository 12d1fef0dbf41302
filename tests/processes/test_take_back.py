"""Law: over processes, too, after a push that fails everything is as in a run that never had it, bit for bit, on every
rank (`Debug(take_back=N)`); and every rank is told once, with the same numbers."""

import random
import time

import pytest
import torch

import pipeback
from tests.helpers.choice import mostly_rare, rare
from tests.laws.cases import CASES, STAGES, data, everything, placeable
from tests.laws.test_take_back import bad, made

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")
TIMEOUT = 20.0


def trained(pipe, pushes, rank, waits=False):
    """Push all, each rank in its own time; the losses, and the numbers that were told."""
    pause = random.Random(rank)
    losses, told = [], []
    for x, y in pushes:
        if not waits and pause.random() < 0.3:
            time.sleep(0.02 * pause.random())
        try:
            losses.append(pipe.push(x, y))
            if waits:
                pipe.wait()
        except pipeback.PushLeftOut as error:
            told += error.pushes
            if error.loss is not None:
                losses.append(error.loss)
    while True:
        try:
            pipe.wait()
            break
        except pipeback.PushLeftOut as error:
            told += error.pushes
    known = []
    for loss in losses:
        try:
            known.append(float(loss))
        except pipeback.PushLeftOut:
            known.append(None)
    return known, told


def hurt(rank, case, at, backward, gone, count, link="auto", waits=False, **options):
    workers = pipeback.Processes(timeout=TIMEOUT, link=link)
    pipe = made(case, at, backward, workers=workers, **options)
    good = data(count, 8)
    losses, told = trained(pipe, [bad(at) if n in gone else push for n, push in enumerate(good)], rank, waits)
    flying, plain = everything(pipe), pipe.state_dict()["plain"]
    counted = pipe.arrived, pipe.pushes
    pipe.drain()
    end = everything(pipe)
    pipe.close()
    return [loss for loss in losses if loss is not None], told, flying, plain, counted, end


def unhurt(case, at, backward, gone, count, **options):
    pipe = made(case, at, backward, **options)
    losses = [pipe.push(*push) for n, push in enumerate(data(count, 8)) if n not in gone]
    losses = [float(loss) for loss in losses]
    flying, plain = everything(pipe), pipe.state_dict()["plain"]
    counted = pipe.arrived, pipe.pushes
    pipe.drain()
    return losses, [], flying, plain, counted, everything(pipe)


def compared(crew, ranks, case, at, backward, gone=(5, 12), count=26, link="auto", waits=False, **options):
    crew = crew.ranks(ranks)
    wanted = unhurt(case, at, backward, gone, count, **{**options, "every": None, "workers": ranks})
    found = crew.run(hurt, case, at, backward, gone, count, link, waits, each=range(ranks), **options)
    numbers = found[0][1]
    assert len(numbers) == len(gone)
    for rank, (losses, told, flying, plain, counted, end) in enumerate(found):
        assert told == numbers, (rank, told, numbers)
        assert losses == wanted[0], rank
        assert torch.equal(flying, wanted[2]), rank
        assert counted == wanted[4]
        for key in ("loops", "groups", "current", "first", "pushes", "arrived", "stages"):
            assert plain[key] == wanted[3][key], key
        assert torch.equal(end, wanted[5]), rank


def places(case):
    """Where it fails, and how often a state is kept: another choice for every case."""
    n = list(CASES).index(case)
    at, backward = ((0, True), (2, True), (None, False), (STAGES - 1, True), (1, False))[n % 5]
    return at, backward, (1, 3, 7)[n % 3]


USUAL = ("gpipe-4", "pb", "pipedream", "cerebras", "zb_v", "pipedream_2bw")


@pytest.mark.parametrize("case", mostly_rare(USUAL, "gpipe-4", "cerebras", "zb_v", "pipedream_2bw"))
def test_two_ranks(crew, case):
    at, backward, every = places(case)
    compared(crew, 2, case, at, backward, gone=(5,), count=16, every=every)


@pytest.mark.parametrize(("ranks", "case", "link"), [
    rare(ranks, case, link) for ranks in (2, 3, 4) for link in ("shared_memory", "gloo") for case in CASES
])  # fmt: skip
def test_every_method_and_link(crew, ranks, case, link):
    if not placeable(case, ranks):
        pytest.skip("more parts than stages")
    at, backward, every = places(case)
    compared(crew, ranks, case, at, backward, every=every, link=link)


@pytest.mark.parametrize("case", ["pb", rare("cerebras"), rare("one_f_one_b-3"), rare("zb_v")])
def test_who_waits_after_each_push(crew, case):
    at, backward, every = places(case)
    compared(crew, 2, case, at, backward, every=every, waits=True)


@pytest.mark.parametrize("link", ["shared_memory", rare("gloo")])
def test_several_at_once_and_one_after_the_other(crew, link):
    compared(crew, 2, "pb", 0, True, gone=(4, 5, 13), every=4, link=link)


@pytest.mark.soak
def test_many_at_once(crew):
    compared(crew, 2, "pb", 0, True, gone=(4, 5, 6, 13), every=4)
    compared(crew, 2, "cerebras", None, False, gone=(1, 2, 3), every=4)
    compared(crew, 3, "pb", 2, False, gone=(4, 5, 7, 8), every=3)


@pytest.mark.parametrize(
    "options",
    [
        {"store": "host"},
        {"activations": "recompute"},
        rare({"activations": "host"}),
        {"micro_batch_size": pipeback.MicroBatches(3, weights="samples")},
        {"optimizer": "adamw"},
        rare({"clip_norm": 0.1}),
        rare({"store": pipeback.Streaming("host", sparsity="set"), "case": "pipedream"}),
    ],
    ids=str,
)
def test_options(crew, options):
    options = dict(options)
    compared(crew, 2, options.pop("case", "pb"), 0, True, every=3, **options)


# -- replicas ----------------------------------------------------------------------------------------------------------


def share(value, replica, replicas):
    return value.chunk(replicas)[replica]


def of_a_replica(rank, ranks, replicas, case, gone, count, link, **options):
    """Every replica pushes its own share; what is bad in one is left out in all."""
    replica = rank // (ranks // replicas)
    workers = pipeback.Processes(timeout=TIMEOUT, link=link)
    pipe = made(case, 1, True, workers=workers, replicas=replicas, **options)
    pushes = [tuple(share(value, replica, replicas) for value in push) for push in data(count, 8)]
    worse = tuple(share(value, replica, replicas) for value in bad(1))
    pushes = [worse if n in gone and n % replicas == replica else push for n, push in enumerate(pushes)]
    _, told = trained(pipe, pushes, rank)
    flying = everything(pipe)
    pipe.drain()
    end = everything(pipe)
    pipe.close()
    return told, flying, end


@pytest.mark.parametrize(("ranks", "replicas", "case", "link"), [
    (2, 2, "pb", "shared_memory"), (4, 2, "gpipe-4", "gloo"), rare(4, 2, "cerebras", "shared_memory"),
    *(rare(ranks, replicas, case, link) for ranks, replicas in ((2, 2), (4, 2), (3, 3))
      for case in ("pb", "pipedream", "zb_h1-4", "pipedream_2bw") for link in ("shared_memory", "gloo")),
])  # fmt: skip
def test_replicas(crew, ranks, replicas, case, link):
    gone, count = (5, 12), 26
    pipe = made(case, 1, True, every=None, replicas=replicas, workers=ranks // replicas)
    for n, push in enumerate(data(count, 8)):
        if n not in gone:
            pipe.push(*push)
    flying = everything(pipe)
    pipe.drain()
    end = everything(pipe)
    pipe.close()
    found = crew.ranks(ranks).run(of_a_replica, ranks, replicas, case, gone, count, link, each=range(ranks))
    for told, *states in found:
        assert told == found[0][0] and len(told) == 2
        assert torch.equal(states[0], flying) and torch.equal(states[1], end)
