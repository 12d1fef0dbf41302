"""Law: runtimes agree, bit for bit: the event loop and any number of threads."""

from itertools import product

import pytest
import torch
from torch import nn

import pipeback
from pipeback import methods
from pipeback.schedules.placement import Placed, unwaited
from pipeback.schedules.worker_programs import interleaved, looped_bfs, zb_v
from tests.helpers.choice import diagonal, mostly_rare
from tests.laws.cases import CASES, EACH, FEW, STAGES, data, everything, flushes, network, pipeline, placeable


@pytest.mark.parametrize(
    ("case", "every"), mostly_rare(product(CASES, (False, True)), *((case, case in FEW) for case in EACH))
)
def test_threads_equal_the_event_loop(case, every):
    batches = data(19)

    def run(workers):
        pipe = pipeline(network(), CASES[case](STAGES), workers=workers)
        losses = [pipe.push(x, y) for x, y in batches]
        flying = everything(pipe)
        pipe.drain()
        losses += [pipe.push(x, y) for x, y in batches[:4]]
        result = torch.stack([loss.clone() for loss in losses]), flying, everything(pipe)
        pipe.close()
        return result

    expected = run(None)
    for workers in [n for n in ((1, 2, 4) if every else (2,)) if placeable(case, n)]:
        for found, wanted in zip(run(workers), expected, strict=True):
            assert torch.equal(found, wanted), f"{workers} workers differ from the event loop"


@pytest.mark.parametrize("case", FEW)
def test_autocast_reaches_the_threads(case):
    """And leaves them with the push: the last micro-batches run outside of it."""
    batches = data(9)

    def run(workers, casts=True):
        pipe = pipeline(network(), CASES[case](STAGES), workers=workers)
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            losses = [pipe.push(x, y) for x, y in batches[:6]]
        losses += [pipe.push(x, y) for x, y in batches[6:]]
        result = torch.stack([loss.clone() for loss in losses]), everything(pipe)
        pipe.close()
        return result

    expected = run(None)
    assert not torch.equal(expected[0], run(None, casts=False)[0])
    for found, wanted in zip(run(2), expected, strict=True):
        assert torch.equal(found, wanted)


def drawing(width=6):
    """Dropout in every stage, batch statistics in two."""
    torch.manual_seed(3)
    return nn.Sequential(
        *[
            nn.Sequential(
                nn.Linear(width, width), nn.BatchNorm1d(width) if s % 2 else nn.LayerNorm(width), nn.Dropout(0.3)
            )
            for s in range(STAGES)
        ]
    )


@pytest.mark.filterwarnings("ignore:.*takes its statistics")
@pytest.mark.parametrize(
    ("case", "activations"), diagonal(["pb", "cerebras", "pipedream", "gpipe-4"], ["device", "host", "recompute"])
)
def test_random_layers_and_buffers_agree_too(case, activations):
    batches = data(17, samples=8)

    def run(**options):
        torch.manual_seed(7)  # the streams of the stages come from (seed, stage), not from who draws first
        pipe = pipeline(drawing(), CASES[case](STAGES), activations=activations, **options)
        losses = torch.stack([pipe.push(x, y).clone() for x, y in batches])
        result = losses, everything(pipe)
        pipe.close()
        return result

    expected = run()
    for options in ({"workers": 2}, {"workers": 3}, {"debug": pipeback.Debug(order="random")}):
        for found, wanted in zip(run(**options), expected, strict=True):
            assert torch.equal(found, wanted), f"{options} differs"


def test_random_layers_leave_the_callers_generator_alone():
    torch.manual_seed(11)
    before = torch.get_rng_state()
    pipe = pipeline(drawing(), "pb")
    torch.set_rng_state(before)
    for x, y in data(3, samples=16):
        pipe.push(x, y)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["one_f_one_b", "interleaved", "looped_bfs", "zb_v"])
def test_whole_flushes_and_parts_of_them_agree(name):
    """Interleaved 1F1B, looped BFS and ZB-V have on one worker, and within a flush, what 1F1B, GPipe and ZB-H1 have."""
    within = {"looped_bfs": "gpipe", "zb_v": "zb_h1"}
    expected = flushes(within.get(name, "one_f_one_b"))
    for workers in (None, 2, 3) if name == "one_f_one_b" else (None, 2):
        for n, (found, wanted) in enumerate(zip(flushes(name, workers=workers), expected, strict=True)):
            assert torch.equal(found, wanted), f"{workers} workers differ from the event loop at {n}"


@pytest.mark.parametrize(("pushed", "ahead"), [(4, 2), (2, 4), (8, 2)])
def test_the_forwards_of_a_whole_flush_run_ahead_by_workers(pushed, ahead):
    """Of eight stages on two workers, the first four have as many micro-batches in flight as one of two stages."""
    method = methods.create("one_f_one_b", micro_batches=4)
    pipe = pipeline(network(8), method, micro_batch_size=3, workers=2)
    pipe.record()
    for _ in range(8 // pushed):
        x, y = (torch.cat(some) for some in zip(*data(pushed), strict=True))
        pipe.push(x, y)
    pipe.wait()
    kinds = [slot.op.kind for slot in pipe.recorded if slot.stage == 0]
    most = max(kinds[:n].count("F") - kinds[:n].count("B") for n in range(len(kinds)))
    pipe.close()
    assert most == ahead


@pytest.mark.parametrize("pushed", [4, 6, 7, 2, 1])
@pytest.mark.parametrize("name", ["interleaved", "looped_bfs", "zb_v"])
def test_each_worker_does_its_chunks_in_the_published_order(name, pushed):
    """Eight stages in four parts on two threads; three pushes, each a flush of any length."""
    programs = {"interleaved": interleaved, "looped_bfs": looped_bfs, "zb_v": zb_v}
    x, y = (torch.cat(some) for some in zip(*data(3 * pushed), strict=True))
    expected = pipeline(network(8), "gpipe", micro_batch_size=3)
    pipe = pipeline(network(8), name, micro_batch_size=3, workers=2)
    pipe.record()
    for a, b in zip(x.split(3 * pushed), y.split(3 * pushed), strict=True):
        assert torch.equal(pipe.push(a, b), expected.push(a, b))
    pipe.wait()
    placement = pipe._engine.holding.placement()
    placed = unwaited(Placed(programs[name](pushed), placement))  # nobody waits for the first part
    for worker, track in enumerate(pipe.recorded.tracks):
        assert [(slot.stage, slot.op) for slot in track.slots] == list(placed.until(worker, 3 * pushed))
    assert torch.equal(everything(pipe), everything(expected))
    pipe.close()
