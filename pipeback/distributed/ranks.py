"""Ranks: the processes of a pipeline, with those of its replicas; they find each other and agree on options.

The processes are those of torch.distributed. Torchrun, SLURM or Lightning starts them, and every rank runs the same
script. Rank r of a pipeline is its worker r: the first ranks hold the first stages, unless the method places them
otherwise.
"""

from __future__ import annotations

import json
import os
import pickle
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pipeback.distributed.all_gather_bytes import all_gather_bytes
from pipeback.distributed.board import REFUSED, Board
from pipeback.distributed.health.health import Failed, Health
from pipeback.distributed.health.heartbeat import RankIdentity, host_store, join_store, my_facts, one_host
from pipeback.distributed.join import join, layout, wanted
from pipeback.distributed.transport.interruptible_wait import Broken, InterruptibleWait
from pipeback.errors import RankError, StageError
from pipeback.private import group_named
from pipeback.runtime.link import OtherBatch
from pipeback.runtime.replicas import RankReplicas
from pipeback.streaming.shards import Collective, ReplicaGroup
from pipeback.tensors import accelerators

# how many pipelines were built in a process group, by a weak reference to it; every rank builds them in one order
_built: list[Any] = [lambda: None, 0]
_left: dict[str, Ranks] = {}  # those that this process has left, and whose groups still stand, by their number

PATIENT = 7 * 24 * 3600.0  # seconds; the timeout of groups whose waits `Health` ends
SLOW = 15.0  # additional seconds for first connections, in which the store asks a name service, which may be slow


class SingleProcess:
    """The ranks of a pipeline in one process, with the same calls as `Ranks`."""

    several = False
    index, count, replica, replicas = 0, 1, 0, 1
    shard, tensor = 0, 1
    place = None  # its number among several processes

    def gather(self, value: Any, what: str) -> list[Any]:
        return [value]

    def agree(self, facts: dict[str, Any]) -> None:
        pass

    def failed(self, error: BaseException) -> None:
        pass

    def meet(self, what: str) -> None:
        pass

    def leave(self) -> None:
        pass


class Ranks:
    """The ranks of one pipeline.

    mesh     global ranks by replica, worker and shard, the last two in one row; this rank is among them
    timeout  seconds after which every rank raises a `RankError` for a rank that does not answer
    tensor   how many ranks compute each stage together, each with its shard of the weights

    A rank exchanges activations and gradients with the ranks of its own shard only (`table`, `line`), whose pipeline is
    like any other; within their stages, the ranks of all shards meet (`among`).

    goes_back: whether they go back to a state when an operation fails (`take_back`). Then a call that returns on one
    rank returns on all, or is told of the failure on all (`meet`), and every wait ends as soon as a rank has failed.
    guard: does what it is given, a meeting, and goes back if that raises the failure.
    """

    several = True

    def __init__(
        self, mesh: list[list[int]], timeout: float, board: dist.Store | None = None, tensor: int = 1,
        after: Ranks | None = None,
    ) -> None:  # fmt: skip
        """board: the store of `_board`, if the caller has it already. after: the same ranks before one of them failed,
        which meet anew. Raises RankError naming one that does not come then.
        """
        self.timeout, self.mesh, self.tensor = timeout, mesh, tensor
        self.goes_back = after is not None
        self.guard: Callable[[Callable[[], object]], None] = _plainly if after is None else after.guard
        self.rank = dist.get_rank()
        self.everyone = [rank for row in mesh for rank in row]
        self.place = self.everyone.index(self.rank)
        self.shard = self.place % tensor
        self.table = table = [row[self.shard :: tensor] for row in mesh]
        self.replica, self.index = next((r, row.index(self.rank)) for r, row in enumerate(table) if self.rank in row)
        self.line = table[self.replica]  # the ranks of this replica and shard, by their stages
        self.count, self.replicas = len(self.line), len(table)
        self.others = [rank for rank in self.everyone if rank != self.rank]
        if after is None:
            self._board, self._rounds, self.number = board or _board(), 0, str(_built[1])
        else:  # a number of their own: meanwhile this rank may have built other pipelines than the others
            self._board, self._rounds = after._board, after._rounds + 1
            self.number = f"{after.number.partition('+')[0]}+{self._rounds}"
        self._groups, self._meetings, self._has_left = list[dist.ProcessGroup](), 0, False
        self.facts: dict[int, RankIdentity]
        store, self.facts = self._come() if after is None else (self._come_again(after.facts), after.facts)
        self.health = Health(store, self.rank, self.everyone, self.facts, timeout)
        self.control = self.group(self.everyone, "gloo")
        self._sums: RankReplicas | None = None
        self._column: ReplicaGroup | None = None
        self._vigils: list[InterruptibleWait] = []

    def _come(self) -> tuple[dist.Store, dict[int, RankIdentity]]:
        """Return the pipeline's store and the facts of all ranks. Raises RuntimeError naming ranks that do not come."""
        first, board = self.everyone[0], Board(self._board, self.rank, self.everyone)
        mine = json.dumps((my_facts(), sorted(_left)))
        told = {rank: json.loads(text) for rank, text in board.all("hello", mine, self.timeout).items()}
        facts = {rank: RankIdentity(*identity) for rank, (identity, _) in told.items()}
        if self.rank == first:
            store, address = host_store(self.timeout + SLOW, near=one_host(facts.values()))
            board.set("address", address)
        else:
            near = one_host([facts[first], facts[self.rank]])
            store = join_store(board.get("address", first, self.timeout + SLOW), self.timeout + SLOW, near)
        board.all("ready", "", self.timeout + SLOW)
        self._end_left([left for _, left in told.values()])
        return store, facts

    def _come_again(self, facts: dict[int, RankIdentity]) -> dist.Store:
        """Return a new store for ranks that are known. Raises RankError naming one that does not come."""
        first, store, address = self.everyone[0], None, ""
        board = Board(dist.PrefixStore(f"after {self._rounds}", self._board), self.rank, self.everyone, facts)
        try:
            if self.rank == first:
                store, address = host_store(self.timeout + SLOW, near=one_host(facts.values()))
            mine = json.dumps((address, sorted(_left)))
            told = {rank: json.loads(text) for rank, text in board.all("hello", mine, self.timeout).items()}
            near = one_host([facts[first], facts[self.rank]])
            store = store or join_store(told[first][0], self.timeout + SLOW, near)
            board.all("ready", "", self.timeout + SLOW)
        except RankError:
            raise
        except (RuntimeError, ConnectionError) as error:
            raise RankError(f"the ranks do not reach rank {first} to go back after an error: {error}", first) from error
        self._end_left([left for _, left in told.values()])
        return store

    def anew(self) -> Ranks:
        """These ranks after one of them has failed: all of them call this, and have new connections that are empty."""
        for vigil in self._vigils:
            vigil.sever()  # a group that still works could not be destroyed
        self.leave()
        return Ranks(self.mesh, self.timeout, tensor=self.tensor, after=self)

    def group(self, ranks: Sequence[int], backend: str, seconds: float | None = None) -> dist.ProcessGroup:
        """Return a process group of these ranks, all of which call this. seconds: the time limit of its operations."""
        before = sum(dist.get_process_group_ranks(group) == sorted(ranks) for group in self._groups)
        whose = "-".join(map(str, ranks))
        name = f"pipeback {_attempt()} {self.number} {whose} {before}"  # one that no other group of a run has
        waiting = self.health.waiting(self.others, "a process group")
        with self.health.calling("Pipeline(...)"), waiting, group_named(name):
            try:
                made = dist.new_group(
                    list(ranks),
                    timeout=timedelta(seconds=seconds or self.timeout),
                    backend=backend,
                    use_local_synchronization=True,
                )
                assert isinstance(made, dist.ProcessGroup)  # this rank is one of them
                self._groups.append(made)
                return made
            except RuntimeError as error:
                raise self.lost(self.others, "a process group") from error

    def sums(self, device: torch.device | None, sizes: Mapping[int, int]) -> RankReplicas | None:
        """Return the sum over the replicas of these stages, for gradients on this device; None for one replica.

        sizes: the numbers of each stage's gradients.
        """
        if self.replicas > 1 and self._sums is None:
            column = [row[self.index] for row in self.table]
            backend = "nccl" if accelerators.direct(device) else "gloo"
            # gloo ends the process where vectors of other lengths meet; a group of NCCL holds memory of the GPU
            apart = {s: size if backend == "gloo" else 0 for s, size in sizes.items()}
            groups = {}
            for size in dict.fromkeys(apart.values()):
                group = self.group(column, backend)
                groups[size] = group, self._ending(group, column) if self.goes_back else self._awaited
            self._sums = RankReplicas(*next(iter(groups.values())), {s: groups[size] for s, size in apart.items()})
        return self._sums

    def among(
        self, device: torch.device | None, what: str
    ) -> tuple[dist.ProcessGroup, Callable[[dist.Work | None], None]]:
        """Return a new group of the ranks that compute these stages together, and what waits for its work."""
        first = self.index * self.tensor
        together = self.mesh[self.replica][first : first + self.tensor]
        group = self.group(together, "nccl" if accelerators.direct(device) else "gloo")
        return group, partial(self._awaited, what=what, among=together)

    def column(self, device: torch.device) -> ReplicaGroup:
        """Return the group of the replicas of these stages, each with a slice in its store; they are on `device`."""
        if self._column is None:
            ranks = [row[self.index] for row in self.table]
            nccl = accelerators.direct(device) and "nccl" in str(dist.get_backend_config())
            fetching, updating = (self.group(ranks, "nccl" if nccl else "gloo") for _ in range(2))
            self._column = ReplicaGroup(
                Collective(fetching, partial(self._awaited, what="the replicas' weights"), nccl),
                Collective(updating, self._awaited, nccl),
                Collective(self.group(ranks, "gloo", PATIENT), self._polled),
                partial(self.health.waiting, ranks),
            )
        return self._column

    def _awaited(
        self, work: dist.Work | None, what: str = "the replicas' gradients", among: Sequence[int] | None = None
    ) -> None:
        column = [row[self.index] for row in self.table] if among is None else among
        with self.health.waiting(column, what):
            try:
                assert work is not None  # since it is asynchronous
                work.wait()
            except RuntimeError as error:
                raise self.lost(column, what) from error

    def _ending(self, group: dist.ProcessGroup, column: Sequence[int]) -> Callable[[dist.Work | None], None]:
        """As `_awaited`, but the wait ends as soon as a rank has failed."""
        other = next(rank for rank in column if rank != self.rank)
        what, vigil = "the replicas' gradients", InterruptibleWait(group, other, self.health.check)
        self._vigils.append(vigil)

        def wait(work: dist.Work | None) -> None:
            with self.health.waiting(column, what):
                try:
                    vigil.wait(work)
                except Broken as error:
                    raise self.lost(column, what) from error

        return wait

    def _polled(self, work: dist.Work | None) -> None:
        """Wait for work without a time limit, until a rank is at fault: a checkpoint may take long per stage."""
        column, pause = [row[self.index] for row in self.table], 1e-5
        with self.health.waiting(column, "the replicas' state"):
            assert work is not None
            while not work.is_completed():
                self.health.check()
                time.sleep(pause)
                pause = min(2 * pause, 0.02)
            try:
                work.wait()
            except RuntimeError as error:
                raise self.lost(column, "the replicas' state") from error

    def leave(self) -> None:
        """Note that this rank has finished its part. Its process groups end when all ranks meet for a later pipeline:
        before that, another rank may still receive what this one has sent.
        """
        self.health.leave()
        if not self._has_left:
            self._has_left, _left[self.number] = True, self

    def _end_left(self, by_all: Iterable[Collection[str]]) -> None:
        """End the process groups, and with them the threads, of earlier pipelines. by_all: those that each rank of this
        one has left.
        """
        for number in set(_left).intersection(*by_all):
            if set(_left[number].everyone) <= set(self.everyone):
                for group in _left.pop(number)._groups:
                    dist.destroy_process_group(group)

    def lost(self, on: Sequence[int], what: str) -> BaseException:
        """Return the error for a wait that torch.distributed has given up."""
        return self.health.blame(on, what, self.timeout)

    def failed(self, error: BaseException) -> None:
        """Tell the others that this rank cannot go on."""
        if not isinstance(error, RankError):
            self.health.own = error
            known = isinstance(error, (StageError, OtherBatch, ValueError, TypeError)) and str(error)
            failed = None
            if isinstance(error, StageError):
                failed = Failed(str(error), error.operation, error.stage, error.micro_batch)
            self.health.fail(self.rank, str(error) if known else f"{type(error).__name__}: {error}", failed)

    def told(self, error: BaseException) -> BaseException:
        """Tell the other ranks about an error in this rank's loop; return the error to raise."""
        if isinstance(error, Broken):
            return self.health.blame(error.peer, "its messages", 0.0)
        self.failed(error)
        return error

    def gather(self, value: Any, what: str) -> list[Any]:
        """Return the values of all ranks, by replica, worker and shard. Every rank calls it. what: the public call."""
        sent = pickle.dumps(value)
        if self.goes_back:
            self.meet(what)
        else:
            self.health.check()
        with self.health.calling(what), self.health.waiting(self.others, what):
            try:
                found = all_gather_bytes(sent, self.control)
            except RuntimeError as error:
                raise self.lost(self.others, what) from error
        by_rank = dict(zip(sorted(self.everyone), map(pickle.loads, found), strict=True))
        return [by_rank[rank] for rank in self.everyone]

    def meet(self, what: str) -> None:
        """If they go back after an error: return on all ranks, or raise the error on all. Every rank calls it."""
        if self.goes_back:
            self.guard(partial(self._meet, what))

    def _meet(self, what: str) -> None:
        with self.health.calling(what), self.health.waiting(self.others, what):
            self.health.meet(f"{what} {self._meetings}")
        self._meetings += 1

    def agree(self, facts: dict[str, Any]) -> None:
        """Raise ValueError on every rank if a rank has other facts (options, model, versions) than the first one."""
        with self.health.calling("Pipeline(...)"), self.health.waiting(self.others, "Pipeline(...)"):
            self.health.meet("built")
        every = self.gather(facts, "Pipeline(...)")
        for rank, theirs in zip(self.everyone, every, strict=True):
            for key, value in every[0].items():
                if theirs.get(key) != value:
                    raise ValueError(
                        f"rank {rank} has {key} {theirs.get(key)}, rank {self.everyone[0]} has {value}; "
                        "start the same script with the same options and versions on every rank"
                    )


def _plainly(call: Callable[[], object]) -> None:
    call()


def meet(mesh: DeviceMesh | None, replicas: int | None, timeout: float, tensor: int = 1) -> Ranks | SingleProcess:
    """Return the ranks of the pipeline that this process builds, once all of them have come to build it.

    If one of the arguments is wrong, this raises the error, and tells the other ranks, which would otherwise wait.
    """
    if isinstance(mesh, DeviceMesh | None) and not wanted(mesh):
        if tensor > 1:
            raise ValueError(
                f"tensor_parallel={tensor} needs as many ranks, but this is one process; start it by torchrun "
                f"--nproc-per-node={tensor}, or leave tensor_parallel out"
            )
        return SingleProcess()
    known = isinstance(timeout, (int, float)) and not isinstance(timeout, bool) and timeout > 0
    join(timeout if known else 30.0)
    board = _board()
    try:
        if not known:
            raise ValueError(f"timeout must be above 0, but is {timeout!r}; it is the seconds that ranks have")
        table = layout(mesh, replicas, tensor)
        if dist.get_rank() not in [rank for row in table for rank in row]:
            raise ValueError(
                f"mesh {table} lacks rank {dist.get_rank()}, which builds a pipeline over it; give each rank the mesh "
                "that it is in"
            )
    except Exception as error:
        with suppress(RuntimeError):
            board.set(REFUSED, json.dumps((dist.get_rank(), str(error))))
        raise
    return Ranks(table, timeout, board, tensor)


def _board() -> dist.Store:
    """Return a part of the default group's store, which every rank reaches; torch has no public name for it."""
    group, number = dist.group.WORLD, 0
    if _built[0]() is group:
        number = _built[1] + 1
    else:
        _left.clear()  # their groups are gone with the default group
    _built[:] = weakref.ref(group), number
    return dist.PrefixStore(f"pipeback/{_attempt()}/{number}", dist.distributed_c10d._get_default_store())


def _attempt() -> str:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
