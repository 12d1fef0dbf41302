"""Survey: the facts about a pipeline before its first micro-batch, as plain values for a plan.

Bytes are counted on the stages; seconds come from the rehearsal and from `bandwidth`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from pipeback.byte_sizes import written
from pipeback.distributed.held_stages import HeldStages
from pipeback.distributed.ranks import Ranks
from pipeback.methods.base import Method, When
from pipeback.plan import bandwidth
from pipeback.plan.bandwidth import Bandwidth
from pipeback.plan.dry_run import Choose, DryWorker, Load
from pipeback.runtime.loop import Loop
from pipeback.runtime.setting import Setting
from pipeback.schedules.order import Order
from pipeback.schedules.placement import Placement
from pipeback.schedules.programs import flush
from pipeback.stages.stage import Stage
from pipeback.streaming import disk_store
from pipeback.streaming.disk_store import DiskStore
from pipeback.streaming.fetch_policy import Choice, asks, choice_of
from pipeback.streaming.pages import paged
from pipeback.streaming.store import DeviceStore, Store
from pipeback.tensors import accelerators
from pipeback.tensors.layout import lines


class StageBytes(NamedTuple):
    """The bytes of one stage; its weights are all that are copied to the device, frozen ones included."""

    label: str
    load: Load
    home: int  # in the store: all weights; of sparse ones, the survivors and their index
    trainable: int  # of the weights that train, for one copy in the store
    optimizer: int
    method: int  # the method's state
    older: int  # older versions of the weights, at most
    waiting: int  # activations per micro-batch in host memory
    buffers: int
    pages: int  # in its file, per version
    newly: int  # written to its file per update
    small: int  # written to its file per commit: buffers, and tensors too small to be streamed
    flight: int  # written to its file per micro-batch in flight


class PlanInputs(NamedTuple):
    """The facts that a plan is computed from. Stages are those of this process."""

    method: Method
    stages: Mapping[int, StageBytes]
    depth: int  # stages of the pipeline
    delays: Sequence[int]
    workers: Sequence[Sequence[int]]  # the stages of each worker of this process
    placement: Placement | None  # where stages are, if flushes run by worker
    replicas: int  # in this process
    keeps: bool  # whether all activations stay on the device
    samples: int  # per micro-batch
    kind: Literal["device", "host", "disk"]
    prefetch: int | None
    order: str
    commit_every: int | None
    device_memory: int | None  # the budgets, in bytes
    host_memory: int | None
    written: tuple[str, str]  # the budgets, as the user has written them
    device_room: int | None  # bytes that an accelerator has
    bandwidth: Bandwidth
    stacks: Sequence[Sequence[int]] = ()  # the stages that run as one, if weights come from a store
    outside: bool = False  # whether the loss is computed outside
    assumed: str = ""  # the device that is not here for which the seconds are; "": they are of this machine


def survey(holding: HeldStages, setting: Setting, samples: int, *, timed: bool = True) -> PlanInputs:
    """The facts of a pipeline that has rehearsed a micro-batch of so many samples. timed: measure bandwidths, too."""
    store, method, ranks = holding.store, holding.method, holding.ranks
    stages = [stage for stage in holding.mine if stage.replica == ranks.replica]
    here = {stage.index: stage for stage in stages}
    portions = {s: _portion(stage, here.get(s - 1), method) for s, stage in here.items()}
    device = next((stage.device for stage in stages if stage.device), torch.device("cpu"))
    folder = store.folder if isinstance(store, DiskStore) else None
    speeds = Bandwidth()
    if timed:
        speeds = bandwidth.measured(device, folder, 2 * sum(p.pages for p in portions.values()))
        for stage in stages:
            portion, seconds, step = portions[stage.index], holding.seconds[stage.index], bandwidth.step_seconds(stage)
            portions[stage.index] = portion._replace(load=_timed(portion, seconds, speeds, step))
    balance = holding.balance()
    workers = [list(portions)]
    if not isinstance(ranks, Ranks) and setting.threads is not None:
        workers = [[s for s in portions if balance[s] == worker] for worker in range(holding.workers)]
    several, outside = len(workers[0]) < len(holding.stages), holding.stages[-1].loss is None
    moves = store is not None and not isinstance(store, DeviceStore)
    by_worker = several and setting.order == "grouped" and not any(setting.delays) and not outside and method.by_worker
    budgets = (None, None) if store is None else store.budgets
    return PlanInputs(
        method, portions, len(holding.stages), list(setting.delays), workers,
        holding.placement() if by_worker else None, len(holding.everywhere),
        all(stage.keeping is None for stage in stages), samples,
        "device" if not moves else "host" if folder is None else "disk",
        store.prefetch if moves and store is not None else None, setting.order,
        store.commit_every if isinstance(store, DiskStore) else None, *budgets, said(store), _room(device), speeds,
        [stack.numbers for stack in setting.stacks] if moves else (), outside,
    )  # fmt: skip


def said(store: Store | None) -> tuple[str, str]:
    """The budgets, as the user has written them."""
    budgets = () if store is None else (store.device_memory, store.host_memory)
    device, host = (size if isinstance(size, str) else written(size or 0) for size in budgets or (None, None))
    return device, host


def _room(device: torch.device) -> int | None:
    return accelerators.room(device)


def slot_bytes(stage: Stage) -> int:
    """The bytes of a stage's slot on the device."""
    return sum(lines(p.numel() * p.element_size()) for p in stage.module.parameters())


def _portion(stage: Stage, before: Stage | None, method: Method) -> StageBytes:
    kept = bandwidth.state_sizes(stage) if stage.weights else []
    own = {id(v) for w in stage.weights for v in stage.optimizer.state.get(w, {}).values()}
    state = [
        t.numel() * t.element_size()
        for values in stage.state.values()
        for t in (values if isinstance(values, list) else ())
        if isinstance(t, Tensor) and id(t) not in own
    ]
    weights = _sizes(stage.weights)
    place, trainable = slot_bytes(stage), sum(weights)
    copies = method.held(stage.index, stage.stages) - 1 if method.copies == "stash" else 0
    home, placed = place, sum(_sizes(stage.module.parameters()))
    gradients = trainable
    if stage.masters:
        place, gradients = place + sum(_sizes(stage.masters.weights)), sum(_sizes(stage.params))
    load = Load(place, gradients, stage.added_bytes(before), stage.learnt.repeat_bytes, place, placed)
    if stage.home.sparse is not None and stage.home.flat is not None:
        dense, index = sum(_sizes(stage.params)), stage.home.sparse.index_bytes
        sent = placed - dense + trainable + index
        # a policy that sometimes looks at all gradients lets all of them leave at such updates
        load = load._replace(gradients=dense, sent=sent, placed=sent, left=trainable)
        home = stage.home.flat.nbytes + index
    base = [home] + [size for size in kept + state if size >= disk_store.SMALL]
    older = [size for size in weights if size >= disk_store.SMALL]
    buffers = _sizes(stage.module.buffers())
    small = buffers + [size for size in kept + state if size < disk_store.SMALL]
    if stage.random.state is not None:
        small.append(stage.random.state.numel())
    return StageBytes(
        stage.label, load, home, trainable, sum(kept), sum(state),
        copies * trainable, stage.learnt.host_bytes, sum(buffers),
        sum(map(paged, base + small)) + copies * sum(map(paged, older)),
        sum(base) + (sum(older) if copies else 0), sum(small), stage.learnt.activation_bytes,
    )  # fmt: skip


def _sizes(tensors: Iterable[Tensor]) -> list[int]:
    return [t.numel() * t.element_size() for t in tensors]


def _timed(portion: StageBytes, seconds: float, speeds: Bandwidth, step: float) -> Load:
    """The load of a stage: a backward takes twice as long as a forward, and the store moves what an update changes."""
    load, base = portion.load, portion.newly
    return load._replace(
        forward=seconds / 3,
        backward=2 * seconds / 3 + (seconds / 3 if load.repeat else 0.0),
        add=load.gradients / speeds.adding,
        away=portion.waiting / speeds.from_device,
        back=portion.waiting / speeds.to_device,
        fetch=speeds.handing + load.weights / speeds.to_device + portion.home / speeds.disk_read,
        ask=base / speeds.disk_read,
        leave=load.gradients / speeds.from_device,
        update=speeds.handing + step + base / speeds.disk_read + base / speeds.disk_write,
    )


# -- a dry run ---------------------------------------------------------------------------------------------------------


def loops(facts: PlanInputs, prefetch: int | None) -> list[tuple[Loop, DryWorker]]:
    """One loop per worker, as `start` builds them, with workers that move nothing."""
    method = facts.method
    policy = facts.order
    if prefetch is not None and policy == "grouped":
        policy = "skewed" if facts.stacks else "streaming"
    found = []
    for mine in facts.workers:
        loads = {s: facts.stages[s].load for s in mine}
        stacks = [stack for stack in facts.stacks if stack[0] in loads]
        dry = DryWorker(
            loads, facts.depth, prefetch, chooser(method, facts.delays), asks(method), method.needs_entry, stacks
        )
        order = Order(method.schedule, facts.depth, policy=policy, near=max(1, prefetch or 0))
        loop = Loop(dry, order, method, placement=facts.placement, at_once=prefetch is not None)  # type: ignore[arg-type]
        found.append((loop, dry))
    return found


def period(method: Method) -> int:
    """The number of micro-batches after which a schedule repeats."""
    return 1 if method.flush_each_push else flush(method.schedule)


def chooser(method: Method, delays: Sequence[int]) -> Choose:
    """A function that asks the method which weights it chooses, on a stage of one weight."""
    weights: list[Tensor] = [nn.Parameter(torch.zeros(1))]
    state = method.init(weights)
    stash = method.copies == "stash"

    @torch.no_grad()
    def choose(kind: str, s: int, mb: int, version: int, start: int, base: int, entry: int) -> Choice:
        when = When(s, len(delays), mb, version, delays[s], (0.1,), (delays[s],), start, base, entry)
        if kind == "F":
            return choice_of(method.forward_weights(weights, state, when), weights, None)
        used = [torch.zeros(1)] if stash else None
        return choice_of(method.backward_weights(weights, used, state, when), weights, used)

    return choose
