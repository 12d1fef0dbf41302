"""Start: the loops of a pipeline (one in all, one per thread or one per rank) and the runtime that runs them."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch

from pipeback.distributed.held_stages import HeldStages
from pipeback.distributed.rank_runner import RankRunner
from pipeback.distributed.rank_ticks import rank_ticks
from pipeback.distributed.ranks import Ranks
from pipeback.runtime.executor import Executor
from pipeback.runtime.link import LocalLink, StageLink, ThreadWire, links
from pipeback.runtime.loop import Loop
from pipeback.runtime.outside_ticks import OutsideTicks
from pipeback.runtime.replicas import OneReplica, Replicas, ThreadReplicas
from pipeback.runtime.runners import PushLoop, Runner, Threads
from pipeback.runtime.setting import Setting
from pipeback.runtime.stage_executor import StageExecutor
from pipeback.runtime.thread_ticks import ThreadTicks
from pipeback.runtime.tick_loop import TickLoop
from pipeback.runtime.weight_provider import WeightProvider
from pipeback.runtime.worker import Worker
from pipeback.schedules.order import Order
from pipeback.schedules.timeline import in_flight
from pipeback.stages.stage import Stage
from pipeback.streaming.store import DeviceStore
from pipeback.streaming.streamed_weights import StreamedWeights


def start(holding: HeldStages, setting: Setting) -> Runner:
    """Build the runtime; over processes every rank does."""
    owner, closed, ranks = holding.balance(), threading.Event(), holding.ranks
    outside = holding.stages[-1].loss is None
    bound = 2 * max(in_flight(holding.method.schedule, len(holding.stages))) + 2
    if isinstance(ranks, Ranks):
        from pipeback.distributed.connect import connect  # here, since most pipelines have no ranks

        mine = holding.mine
        for s, stage in enumerate(holding.stages):
            beside = owner[max(0, s - 1) : s + 2]
            if owner[s] == ranks.index and (s in (0, len(owner) - 1) or set(beside) != {ranks.index}):
                stage.learn(mixed=True)  # messages arrive on the CPU
        devices = {stage.device.type for stage in mine if stage.device}
        link, results = connect(ranks, owner, bound, closed, setting.link, devices, holding.method.chunks)
        sizes = {stage.index: stage.gradients.numbers for stage in mine}
        sums = None if holding.shards else ranks.sums(mine[0].device, sizes)
        loop = _loop(holding, setting, mine, link, sums, ranks.replica)
        runner = RankRunner(loop, owner, ranks, results, closed)
        runner.ticks = rank_ticks(runner) if setting.skewed and outside else None
        return runner
    if setting.threads is None and len(holding.everywhere) == 1:
        ticks: type[TickLoop | OutsideTicks] = OutsideTicks if outside else TickLoop
        inline = ticks if setting.skewed or setting.order == "skewed" else PushLoop
        return inline(_loop(holding, setting, holding.stages, LocalLink(), None, 0))
    bound *= holding.method.chunks == 1  # 0: without limit, as workers of several parts send to each other
    threads = Threads(_loops(holding, setting, owner, bound, closed), owner, closed)
    # a part is done when it returns, for the caller may then read gradients and weights
    threads.ticks = ThreadTicks(threads, done=threads.join) if setting.skewed and outside else None
    return threads


def _loops(holding: HeldStages, setting: Setting, owner: list[int], bound: int, closed: threading.Event) -> list[Loop]:
    """One loop per thread, that is, per worker of every replica."""
    replicas = len(holding.everywhere)
    workers = holding.workers * replicas
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    if workers * threads > max(cores, workers):
        warnings.warn(
            f"{workers} workers with {threads} threads each share {cores} cores; "
            "call torch.set_num_threads(1) before training",
            stacklevel=8,
        )
    sums = ThreadReplicas(replicas, closed) if replicas > 1 else None
    loops = []
    for replica, stages in enumerate(holding.everywhere):
        part = OneReplica(sums, replica) if sums else None
        for worker, link in enumerate(links(owner, lambda: ThreadWire(bound, closed))):
            mine = [stage for stage in stages if owner[stage.index] == worker]
            loops.append(_loop(holding, setting, mine, link, part, replica))
    return loops


def _loop(
    holding: HeldStages, setting: Setting, mine: Sequence[Stage], link: StageLink, sums: Replicas | None, replica: int
) -> Loop:
    alone = len(mine) == len(holding.stages)
    for stage in mine:
        threaded = setting.threads is not None or sums is not None or holding.shards or not alone
        stage.random.share(threaded)
        stage.gradients.share(threaded)
        stage.gradients.split.begin(any(setting.delays))
    policy, shared = setting.order, None
    if policy == "grouped" and not alone and not any(setting.delays) and holding.stages[-1].loss is not None:
        # in a flush, the gradient that another worker waits for leaves before the next one is begun; where the loss is
        # computed outside, a loop expects the forwards of a micro-batch first
        policy = "upstream"
        # stages as one go by ticks, or do whole flushes of GPipe, in the order of stages
        shared = holding.placement() if holding.method.by_worker and not setting.skewed else None
    store, near = holding.store, 1
    residence: WeightProvider | None = None
    if store is not None:
        residence, near = (
            StreamedWeights({stage.index: stage for stage in mine}, holding.method, store, holding.column()),
            max(1, store.prefetch),
        )
        policy = "streaming" if setting.order == "grouped" else setting.order
    executor: Callable[[Worker], Executor] = StageExecutor
    stacks = [stack for stack in setting.stacks if any(stage is stack.stages[0] for stage in mine)]
    policy = "skewed" if setting.skewed else policy
    if stacks:
        from pipeback.vectorized.stack_executor import StackExecutor  # here, since most pipelines have no stacks

        executor = partial(StackExecutor, stacks=stacks)
    if holding.spread is not None:
        from pipeback.tensor_parallel.executor import TensorExecutor  # here, since most pipelines have no shards

        executor = partial(TensorExecutor, group=holding.spread.group)
    worker = Worker(
        mine, holding.method, setting.delays, link, executor, replicas=sums, residence=residence, **setting.worker
    )
    order = Order(
        holding.method.schedule, len(holding.stages), policy=policy, seed=setting.seed, near=near,
        by_group=worker.executor.by_group,
    )  # fmt: skip
    if stacks:
        order.leap, order.landed = partial(worker.executor.leap, order), worker.executor.land
    moves = store is not None and not isinstance(store, DeviceStore)
    return Loop(worker, order, holding.method, replica, shared, at_once=moves)
