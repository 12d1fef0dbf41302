"""Checkpoints of several ranks: each writes its own stages, and a fault of one is raised by all."""

import errno
import threading
import time
from itertools import pairwise

import pytest
import torch

from pipeback import checkpoint
from pipeback.checkpoint import save_and_load
from pipeback.checkpoint.save_and_load import CheckpointError
from pipeback.errors import RankError
from pipeback.streaming import sealed_file
from tests.checkpoint.saved import Held, names, same

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")


class Table:
    """Ranks that are threads of this process."""

    several, replica, timeout = True, 0, 1.0

    def __init__(self, index, count, shared):
        self.index = self.rank = self.place = index
        self.count, self.shared = count, shared

    def gather(self, value, what):
        values, barrier = self.shared
        values[self.index] = value
        try:
            barrier.wait(10)
            found = list(values)
            barrier.wait(10)
        except threading.BrokenBarrierError:
            raise RankError("rank 1 (HOST, process 1): it has ended", 1) from None
        return found


def on_ranks(count, call):
    """What `call(ranks)` returns or raises on every rank."""
    shared, found = ([None] * count, threading.Barrier(count)), [None] * count

    def run(rank):
        try:
            found[rank] = call(Table(rank, count, shared))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_each_rank_writes_its_own_stages(tmp_path, monkeypatch):
    stages = [{"a": torch.randn(3, 4)[:, 1:], "b": torch.randn(2)} for _ in range(5)]
    held, written, write = [[0, 1], [2], [3, 4]], [], save_and_load._write
    monkeypatch.setattr(save_and_load, "_write", lambda folder, part: written.append(part.stage) or write(folder, part))
    pipes = {}

    def both(ranks):
        pipe = pipes[ranks.index] = Held(*stages, ranks=ranks, mine=held[ranks.index])
        path = checkpoint.save(pipe, tmp_path, facts={"rank": ranks.index})
        return path, checkpoint.load(pipe, tmp_path)

    assert on_ranks(3, both) == [(tmp_path / "step-00000005", {"rank": 0})] * 3
    assert sorted(written) == [0, 1, 2, 3, 4]
    for pipe in pipes.values():
        for s, stage in enumerate(stages):
            assert same(pipe.loaded["stages"][s], stage if s in pipe.mine else {})
        assert [plain["seed"] for plain in pipe.loaded["plain"]["stages"]] == [0, 1, 2, 3, 4]
    held[:] = [range(5)] * 3  # before the first push
    assert on_ranks(3, both) == [(tmp_path / "step-00000005", {"rank": 0})] * 3
    assert sorted(written) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_fault_of_one_rank_is_raised_by_all(bad, tmp_path, monkeypatch):
    stages, write = [{"a": torch.randn(3)} for _ in range(3)], save_and_load._write
    on_ranks(3, lambda ranks: checkpoint.save(Held(*stages, ranks=ranks, mine=[ranks.index]), tmp_path))

    def fail(folder, part):
        if part.stage == bad:
            with sealed_file.naming(folder / f"stage-{bad:03d}.safetensors"):
                raise OSError(errno.ENOSPC, "No space left on device")
        return write(folder, part)

    def save(ranks):
        try:
            checkpoint.save(Held(*stages, ranks=ranks, mine=[ranks.index]), tmp_path)
        except CheckpointError:
            assert names(tmp_path) == ["step-00000005"]
            raise

    monkeypatch.setattr(save_and_load, "_write", fail)
    found = on_ranks(3, save)
    assert [type(error) for error in found] == [CheckpointError] * 3 and len({str(error) for error in found}) == 1
    assert f"rank {bad} (" in str(found[0]) and f"stage-{bad:03d}.safetensors: OSError: [Errno 28]" in str(found[0])
    assert names(tmp_path) == ["step-00000005"] and checkpoint.latest(tmp_path)


def test_a_slow_disk_is_no_dead_rank(tmp_path, monkeypatch):
    """Writing may last longer than ranks wait for each other; they go on talking."""
    stages, write, calls = [{"a": torch.randn(3)} for _ in range(2)], save_and_load._write, []
    monkeypatch.setattr(
        save_and_load, "_write", lambda folder, part: time.sleep(1.5 * part.stage) or write(folder, part)
    )
    gather = Table.gather
    monkeypatch.setattr(Table, "gather", lambda *given: calls.append(time.monotonic()) or gather(*given))
    on_ranks(2, lambda ranks: checkpoint.save(Held(*stages, ranks=ranks, mine=[ranks.index]), tmp_path))
    calls.sort()
    assert checkpoint.latest(tmp_path) and max(b - a for a, b in pairwise(calls)) < Table.timeout


def test_a_rank_that_ends_in_the_middle(tmp_path, monkeypatch):
    stages = [{"a": torch.randn(3)} for _ in range(2)]
    on_ranks(2, lambda ranks: checkpoint.save(Held(*stages, ranks=ranks, mine=[ranks.index]), tmp_path))

    def die(folder, part):
        if part.stage == 1:
            dead.wait(10)
        return "", {}

    dead = threading.Event()
    gather = Table.gather

    def broken(self, value, what):
        if value is False:  # somebody still writes
            self.shared[1].abort()
            dead.set()
        return gather(self, value, what)

    monkeypatch.setattr(save_and_load, "_write", die)
    monkeypatch.setattr(Table, "gather", broken)
    found = on_ranks(2, lambda ranks: checkpoint.save(Held(*stages, ranks=ranks, mine=[ranks.index]), tmp_path))
    assert [type(error) for error in found] == [RankError] * 2
    assert names(tmp_path) == ["step-00000005"] and checkpoint.latest(tmp_path)
