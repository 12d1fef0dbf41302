"""Law: ranks whose backwards are split equal the event loop, bit for bit."""

from collections import Counter

import pytest
import torch

import pipeback
from tests.laws.cases import data, flushes, network, pipeline
from tests.processes.cases import differences, train

SPLIT = ["zb_h1-4", "zb_h2-7", "pb-late"]


@pytest.mark.parametrize(("ranks", "link"), [(2, "shared_memory"), (3, "gloo")])
@pytest.mark.filterwarnings("ignore:.*takes its statistics")
def test_losses_states_and_evaluations(crew, ranks, link):
    """With dropout and batch statistics, one micro-batch per push; states between I and W, too."""
    for case in SPLIT:
        wanted = train("drawing", case)
        for found in crew.ranks(ranks).run(train, "drawing", case, workers=pipeback.Processes(link=link)):
            assert differences(found, wanted) == [], case


def flushed(name):
    return [tensor.clone() for tensor in flushes(name, workers=pipeback.Processes(link="gloo"))]


@pytest.mark.parametrize("name", ["zb_h1", "zb_h2"])
def test_whole_flushes_and_parts_of_them(crew, name):
    """Also where a rank has several stages, which then run the program of one."""
    wanted = flushes(name)
    for ranks in (2, 3):
        for found in crew.ranks(ranks).run(flushed, name):
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def long_flush(name, link):
    """More micro-batches than a wire holds, recorded; what was done by each stage, by kind."""
    x, y = data(1, samples=60)[0]
    workers = None if link is None else pipeback.Processes(link=link)
    pipe = pipeline(network(4), name, micro_batch_size=1, workers=workers)
    pipe.record()
    losses = [pipe.push(x, y).clone() for _ in range(2)]
    done = Counter((slot.stage, slot.op.kind) for slot in pipe.recorded)
    found = losses, done, pipe.owner, pipe.unsplit
    pipe.close()
    return found


@pytest.mark.parametrize("link", ["shared_memory", "gloo"])
def test_what_two_ranks_do(crew, link):
    losses, *_ = long_flush("gpipe", None)
    for name in ("zb_h1", "zb_h2"):
        for found, done, owner, whole in crew.ranks(2).run(long_flush, name, link):
            assert found == losses and not whole
            # how many of the four stages the first rank has depends on their times; it sends no gradients of inputs
            assert set(owner) == {0, 1}
            backward = {0: {"B": 120}, 1: {"I": 120, "W": 120}}
            wanted = [backward[rank] | {"F": 120, "U": 2} for rank in owner]
            assert done == {(s, kind): n for s, kinds in enumerate(wanted) for kind, n in kinds.items()}


def copied(replicas, ranks):
    pipe = pipeline(network(), "zb_h1", micro_batch_size=2, replicas=replicas, workers=None)
    share = slice(None) if not ranks else slice(pipe.ranks.replica, None, replicas)
    losses = []
    for x, y in data(3, samples=8 * replicas):
        parts = x.chunk(replicas)[share], y.chunk(replicas)[share]
        losses.append(pipe.push(torch.cat(parts[0]), torch.cat(parts[1])).clone())
    found = torch.stack(losses), {k: v.clone() for k, v in pipe.model.state_dict().items()}
    pipe.close()
    return found


def test_replicas_over_ranks(crew):
    _, wanted = copied(2, False)
    for _, found in crew.ranks(2).run(copied, 2, True):
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
