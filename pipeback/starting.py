"""Starting: the loops of a pipeline and the runtime that they run in. One loop here, or one a thread, or one a rank."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from pipeback.holding import Holding
from pipeback.link import Link, LocalLink, ThreadWire, links
from pipeback.loop import Loop
from pipeback.order import Order
from pipeback.processes import Processes
from pipeback.ranks import Ranks
from pipeback.replicas import OneReplica, Replicas, ThreadReplicas
from pipeback.residence import Residence
from pipeback.rounded import Rounded
from pipeback.runtime import Inline, Runtime, Threads, Ticks
from pipeback.stack import Stack
from pipeback.stage import Stage
from pipeback.store import DeviceStore
from pipeback.streaming import Streaming
from pipeback.timeline import in_flight
from pipeback.vectorized import Vectorized
from pipeback.wiring import connect
from pipeback.worker import Worker


class Setting(NamedTuple):
    """What every loop of a pipeline is built with."""

    delays: Sequence[int]
    order: str
    seed: int
    link: str
    threads: int | None  # workers in this process; None: the event loop
    worker: dict[str, Any]  # options of `Worker`
    stacks: Sequence[Stack] = ()  # of stages that run as one


def start(holding: Holding, setting: Setting) -> Runtime:
    """Build the runtime; over processes every rank does."""
    owner, closed, ranks = holding.balance(), threading.Event(), holding.ranks
    bound = 2 * max(in_flight(holding.method.schedule, len(holding.stages))) + 2
    if isinstance(ranks, Ranks):
        mine = holding.mine
        mine[0].mixed = mine[-1].mixed = True  # messages arrive on the CPU
        devices = {stage.device.type for stage in mine if stage.device}
        link, results = connect(ranks, owner, bound, closed, setting.link, devices)
        sums = None if holding.shards else ranks.sums(mine[0].device)
        loop = _loop(holding, setting, mine, link, sums, ranks.replica)
        return Processes(loop, owner, ranks, results, closed)
    if setting.threads is None and len(holding.everywhere) == 1:
        inline = Ticks if setting.stacks or setting.order == "skewed" else Inline
        return inline(_loop(holding, setting, holding.stages, LocalLink(), None, 0))
    return Threads(_loops(holding, setting, owner, bound, closed), owner, closed)


def _loops(holding: Holding, setting: Setting, owner: list[int], bound: int, closed: threading.Event) -> list[Loop]:
    """A loop a thread: for every worker of every replica."""
    replicas = len(holding.everywhere)
    workers = holding.workers * replicas
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    if workers * threads > max(cores, workers):
        warnings.warn(
            f"{workers} workers with {threads} threads each share {cores} cores; "
            "call torch.set_num_threads(1) before training",
            stacklevel=7,
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
    holding: Holding, setting: Setting, mine: Sequence[Stage], link: Link, sums: Replicas | None, replica: int
) -> Loop:
    alone = len(mine) == len(holding.stages)
    for stage in mine:
        stage.threaded = setting.threads is not None or sums is not None or holding.shards or not alone
        stage.gradients.threaded = stage.threaded
    policy, shared = setting.order, None
    if policy == "grouped" and not alone and not any(setting.delays) and holding.stages[-1].loss is not None:
        # in a flush, the gradient that another worker waits for leaves before the next one is begun; where the loss is
        # computed outside, a loop expects the forwards of a micro-batch first
        policy = "upstream"
        shared = holding.balance() if holding.method.by_worker else None
    store, near = holding.store, 1
    residence: Residence | None = None
    if store is not None:
        residence, near = (
            Streaming({stage.index: stage for stage in mine}, holding.method, store, holding.column()),
            max(1, store.prefetch),
        )
        policy = "streaming" if setting.order == "grouped" else setting.order
    elif any(stage.masters for stage in mine):
        residence = Rounded({stage.index: stage for stage in mine}, holding.method)
    kind: Any = partial(Vectorized, stacks=setting.stacks) if setting.stacks else Worker
    worker = kind(mine, holding.method, setting.delays, link, replicas=sums, residence=residence, **setting.worker)
    if setting.stacks:
        policy = "skewed"
    order = Order(holding.method.schedule, len(holding.stages), policy=policy, seed=setting.seed, near=near)
    if isinstance(worker, Vectorized):
        order.leap = partial(worker.leap, order)
    moves = store is not None and not isinstance(store, DeviceStore)
    return Loop(worker, order, holding.method, replica, shared, at_once=moves)
