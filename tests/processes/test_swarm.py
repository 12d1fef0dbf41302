"""Law: weights split over the replicas' stores equal whole ones, bit for bit at every number of ranks."""

import os
import random
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pipeback
from pipeback.streaming import disk_store
from pipeback.streaming.disk_store import DiskStore
from pipeback.streaming.shards import Shard
from pipeback.streaming.store import HostStore
from tests.helpers.choice import rare
from tests.laws.cases import CASES, OPTIMIZERS, allowed, data, pipeline
from tests.processes.cases import differences, settled, train

KEPT = ("flying", "end", "model")  # losses are those of a replica, and so is the output where batch statistics are
SOME = ["pb", "cerebras", "pipedream_2bw", "spectrain-v2", "gpipe-4"]  # no hook, shifted, older, kept, flushed
LATER = ["gap_aware", "dc_asgd-adaptive", "ef", "pipeoptim", "pipeoptim-xpipe", "msnag", "msnag-stash", "staleness_lr"]
pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")


def of_a_rank(model, case, replicas, store, **options):
    workers = dist.get_world_size() // replicas
    replica = dist.get_rank() // workers
    disk_store.SMALL = 1  # these networks are small
    found = train(model, case, replica=replica, replicas=replicas, store=store, **options)
    return {key: found[key] for key in KEPT}


def agree(crew, model, case, replicas, store, **options):
    wanted = train(model, case, samples=12, replicas=replicas, **options)
    wanted = {key: wanted[key] for key in KEPT}
    for rank, found in enumerate(crew.run(of_a_rank, model, case, replicas, store, samples=12, **options)):
        assert differences(found, wanted) == [], f"{case}, {options}, {store}, rank {rank}"


@pytest.mark.parametrize(
    ("model", "ranks", "replicas", "cases"),
    [
        rare("plain", 2, 2, SOME[3:]), ("drawing", 4, 2, SOME[2:3]), rare("plain", 2, 2, SOME[1:]),
        rare("drawing", 3, 3, SOME[1:3]), rare("drawing", 4, 2, SOME[2:4]), rare("plain", 2, 2, LATER),
    ],
)  # fmt: skip
def test_split_stores_equal_replicas_in_one_process(crew, tmp_path, model, ranks, replicas, cases):
    crew = crew.ranks(ranks)
    for n, case in enumerate(cases):
        store = DiskStore(tmp_path / case, commit_every=3) if n % 2 else HostStore(prefetch=n // 2)
        agree(crew, model, case, replicas, store)
    agree(crew, model, "pb", replicas, HostStore(), optimizer="adamw", clip_norm=pipeback.Clipping(value=0.01))


@pytest.mark.soak
@pytest.mark.parametrize(("ranks", "replicas"), [(2, 2), (3, 3), (4, 2)])
@pytest.mark.parametrize("model", ["plain", "drawing"])
def test_every_method_and_optimizer(crew, tmp_path, ranks, replicas, model):
    crew = crew.ranks(ranks)
    for case in (case for case in CASES if CASES[case](5).elementwise):
        for optimizer in (name for name in OPTIMIZERS if allowed(case, name)):
            for store in (HostStore(), HostStore(prefetch=3), DiskStore(tmp_path / f"{case}-{optimizer}")):
                agree(crew, model, case, replicas, store, optimizer=optimizer)


# -- one device with the whole batch ---------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A weight of no dimensions."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return self.scale * x


def odd():
    """Layouts, frozen weights, weights smaller than a cache line, one of no dimensions, a stage that has none."""
    torch.manual_seed(0)
    conv = nn.Conv2d(1, 5, 3, padding=1).to(memory_format=torch.channels_last)
    frozen = nn.Linear(30, 6)
    frozen.weight.requires_grad_(False)
    stages = [
        nn.Sequential(nn.Unflatten(1, (1, 2, 3)), conv, nn.Flatten()),
        nn.Tanh(),
        frozen,
        Scaled(),
        nn.Linear(6, 6),
    ]
    return nn.Sequential(*stages).double()


def whole_batches(optimizer, replica=None, **options):
    pipe = pipeback.Pipeline(odd(), loss=nn.functional.mse_loss, method="pb", optimizer=FACTORIES[optimizer], **options)
    for x, y in data(9, samples=12, dtype=torch.float64):
        some = (x, y) if replica is None else (x.chunk(pipe.replicas)[replica], y.chunk(pipe.replicas)[replica])
        pipe.push(*some)
    found = {name: tensor.clone() for name, tensor in pipe.model.state_dict().items()}
    state = {name: tuple(tensor.shape) for name, tensor in settled(pipe.state_dict()).items() if "optimizer" in name}
    pipe.close()
    return found, state


FACTORIES = {
    **OPTIMIZERS,
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
}


def of_a_part(optimizer, options):
    replicas = dist.get_world_size()
    return whole_batches(optimizer, dist.get_rank(), replicas=replicas, store="host", **options)


@pytest.mark.parametrize("ranks", [2, 3])
def test_equal_to_one_device_with_the_whole_batch(crew, ranks):
    crew = crew.ranks(ranks)
    runs = [("momentum", {"clip_norm": 0.02}), ("adam", {}), ("adagrad", {}), ("nadam", {})]
    for optimizer, options in runs:
        wanted, shapes = whole_batches(optimizer, **options)
        for found, others in crew.run(of_a_part, optimizer, options):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
            assert others == shapes, "the state has another layout"


# -- what a rank has, and what it moves ------------------------------------------------------------------------------


def moved(rank, pushes=10):
    """Bytes, and the order in which this rank has called the others."""
    calls, gather, scatter = {"fetch": [], "update": []}, Shard.gather, Shard.scatter

    def gathers(self, mine, whole):
        calls["fetch"].append(self.stage)
        gather(self, mine, whole)

    def scatters(self, grads, number, version):
        calls["update"].append((self.stage, version))
        time.sleep(random.random() * 0.01)  # who is late must not matter
        return scatter(self, grads, number, version)

    Shard.gather, Shard.scatter = gathers, scatters
    try:
        pipe = pipeline(nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)]), "pb", "adam", replicas=2, store="host")
        for n, (x, y) in enumerate(data(pushes, width=32)):
            pipe.push(x, y)
            if rank and n % 2:
                pipe.wait()  # and so must not who looks in
                pipe.memory()
        pipe.wait()
        held = [
            t
            for stage in pipe._engine.holding.mine
            for w in stage.weights
            for t in (w, *stage.optimizer.state[w].values())
        ]
        kept = sum(t.numel() * t.element_size() for t in held if t.dim())
        traffic, memory = pipe.traffic(), pipe.memory()
        assert all(not stage.home.slot.flat.here for stage in pipe._engine.holding.mine)
        pipe.close()
    finally:
        Shard.gather, Shard.scatter = gather, scatter
    return calls, kept, traffic, memory


def test_a_rank_reads_and_keeps_its_share(crew):
    one = 4 * (32 * 32 + 32) * 4  # bytes of all weights, in whole cache lines
    (calls, kept, traffic, memory), (others, *rest) = crew.ranks(2).run(moved, each=range(2))
    assert calls == others
    assert len(calls["update"]) > 8
    for found in (kept, rest[0]):
        assert found == 3 * one // 2  # weights, and Adam's two averages
    assert memory.weights == rest[2].weights == one // 2
    for seen in (traffic, rest[1]):
        assert seen.weights_in == seen.gathered == seen.fetches * one // 4 // 2
        head = 8 * (3 + 2)  # bytes beside the gradients
        assert seen.scattered == len(calls["update"]) * (one // 4 // 2 + head)


# -- what goes wrong -------------------------------------------------------------------------------------------------

TIMEOUT = 5.0


class Fatal(nn.Linear):
    """Ends or stops its process at some forward of training."""

    def __init__(self, signal_, left):
        super().__init__(6, 6)
        self.signal, self.left = signal_, left

    def forward(self, x):
        self.left -= torch.is_grad_enabled()
        if not self.left:
            os.kill(os.getpid(), self.signal)
        return super().forward(x)


def until_the_end(rank, what):
    torch.manual_seed(0)
    stages = [nn.Linear(6, 6) for _ in range(4)]
    stages[2] = Fatal(what, 20 if rank == 1 else 10**9)
    pipe = pipeline(
        nn.Sequential(*stages), "cerebras", replicas=3, store="host", workers=pipeback.Processes(timeout=TIMEOUT)
    )
    begin = time.monotonic()
    try:
        for x, y in data(40) * 100:
            pipe.push(x, y)
        pipe.wait()
    except pipeback.RankError as error:
        return str(error), time.monotonic() - begin
    return None


@pytest.mark.parametrize("what", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_ends_ends_the_others(crew, what):
    crew = crew.ranks(3)
    crew.start(until_the_end, what, each=range(3))
    try:
        found = crew.results([0, 2], seconds=60)
    finally:
        crew.members[1].kill()
        crew.members[1].join()
        crew.again()
    for result in found:
        assert not isinstance(result, BaseException), "".join(getattr(result, "__notes__", [repr(result)]))
        message, seconds = result
        assert message.startswith("rank 1 ("), message
        assert seconds < TIMEOUT + 12


def refused(optimizer, options):
    with pytest.raises(ValueError) as found:
        pipeback.Pipeline(
            nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), loss=nn.functional.mse_loss, method="pb",
            optimizer=optimizer, replicas=2, **{"store": "host", **options},
        )  # fmt: skip
    return str(found.value)


class Mine(torch.optim.SGD):
    pass


def mine(params):
    return Mine(params, lr=0.1)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def test_what_cannot_be_split(crew):
    crew = crew.ranks(2)
    for text in crew.run(refused, mine, {}):
        assert "Mine of stage 0 (0) may look at whole matrices" in text
        assert "AdamW, or store=None, or one replica" in text
    for text in crew.ranks(2).run(refused, sgd, {"store": pipeback.Streaming("host", sparsity="set")}):
        assert "not sparse ones; use store=None" in text
