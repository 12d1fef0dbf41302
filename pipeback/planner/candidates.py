"""Candidates: every option worth a look, with what it takes at least: its computing and exchanging, without waiting.

What is decided here, because it is never worse in this model: replicas share out the optimizer's states, and of the
ways to recompute the first that fits is taken, as each computes more than the one before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from math import inf
from typing import NamedTuple

from pipeback.planner import catalogue
from pipeback.planner.costs import RECOMPUTE
from pipeback.planner.estimates import DAY, Job
from pipeback.planner.memory import MARGIN, Footprint, likely
from pipeback.planner.options import STORES, Option, check_stages, check_tensor
from pipeback.planner.steps import least
from pipeback.planner.techniques import Technique, without_pipeline
from pipeback.planner.timing import StageLoad, loads

MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)  # samples
CHUNKS = (2, 3, 4, 6, 8)
BATCHES = 2.0  # the most tokens per update that are looked at, in critical batches


@dataclass(frozen=True)
class Fixed:
    """What the user has fixed; an empty tuple leaves it open. stages: workers of a pipeline. batch: samples."""

    stages: tuple[int, ...] = ()
    replicas: tuple[int, ...] = ()
    tensor: tuple[int, ...] = ()
    stores: tuple[str, ...] = ("device",)
    micro_batch: tuple[int, ...] = ()
    recompute: tuple[str, ...] = ()
    batch: int = 0

    @property
    def told(self) -> str:
        """What is fixed, as it is typed."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        texts = {
            name: ",".join(map(str, value)) if isinstance(value, tuple) else value for name, value in values.items()
        }
        return " ".join(f"{name}={text}" for name, text in texts.items() if text and name != "stores")

    def check(self, job: Job) -> None:
        """Raise ValueError, by name, for what cannot be."""
        model = job.model
        for name, known in (("stores", STORES), ("recompute", RECOMPUTE)):
            for value in getattr(self, name):
                catalogue.key(name.removesuffix("s"), value, known)
        for stages in self.stages:
            check_stages(stages, model)
        for tensor in self.tensor:
            check_tensor(tensor, model)
        least = min(self.stages, default=1) * min(self.tensor, default=1) * min(self.replicas, default=1)
        if least > job.cluster.count:
            raise ValueError(
                f"{self.told} are {least} devices, but there are {job.cluster.count}; "
                f"give devices={least}x{job.cluster.device.name}"
            )


class Candidate(NamedTuple):
    """An option, and the fewest days it can take."""

    days: float
    option: Option
    loads: Sequence[StageLoad]
    footprint: Footprint  # of the workers that are most likely the fullest
    fits: bool

    @property
    def required(self) -> float:
        return self.footprint.fullest.total / (1 - MARGIN)


def candidates(job: Job, techniques: Sequence[Technique], fixed: Fixed) -> Iterator[Candidate]:
    """All that fit, and for each way to cut the model the one of those that do not fit that needs least."""
    count, model = job.cluster.count, job.model
    for tensor, pipeline in product(_tensors(job, fixed), fixed.stages or range(1, count + 1)):
        data, rest = divmod(count, tensor * pipeline)
        if rest or not data or pipeline > model.blocks or (fixed.replicas and data not in fixed.replicas):
            continue
        for micro_batch in fixed.micro_batch or MICRO_BATCHES:
            if micro_batch * data > _most_samples(job, fixed):
                break
            yield from _of(job, techniques, fixed, Option(
                without_pipeline(), data, pipeline, tensor, 1, micro_batch, shard="optimizer" if data > 1 else "none"
            ))  # fmt: skip


def _of(job: Job, techniques: Sequence[Technique], fixed: Fixed, base: Option) -> Iterator[Candidate]:
    """The candidates of one way to share the devices out."""
    known: dict[tuple[int, str, bool], Sequence[StageLoad]] = {}

    def loaded(option: Option) -> Sequence[StageLoad]:
        key = option.chunks, option.recompute, option.shard == "all"  # which has constants of its own
        if key not in known:
            known[key] = loads(option, job.model, job.costs(option))
        return known[key]

    ways = _recompute(job, fixed)
    for option in _methods(job, techniques, fixed, base):
        for way in ways:
            tried = replace(option, recompute=way)
            some = loaded(tried)
            there = likely(tried, some, job.precision)
            device = job.cluster.device
            fits = there.fullest.total <= device.memory * (1 - MARGIN) and there.host <= device.host_memory
            if fits or way == ways[-1]:
                yield Candidate(_days(job, tried, some) if fits else inf, tried, some, there, fits)
                break


def _methods(job: Job, techniques: Sequence[Technique], fixed: Fixed, base: Option) -> Iterator[Option]:
    """Every method, number of micro-batches, chunks and store."""
    if base.pipeline == 1:  # all methods are the same
        for m in _micro_batches(job, fixed, base):
            plain = replace(base, micro_batches=m)
            for store in fixed.stores:
                yield plain if store == "device" else replace(plain, store=store)
            if base.data > 1 and "device" in fixed.stores:
                yield replace(plain, shard="all")
        return
    for technique in techniques:
        mine = replace(base, technique=technique)
        if "device" not in fixed.stores or (technique.slack == 0 and technique.flows):
            continue
        chunks = [1]
        if technique.order in ("interleaved", "looped_bfs"):
            chunks = [v for v in CHUNKS if not job.model.blocks % (v * base.pipeline)]
        elif technique.order == "zb_v":
            chunks = [2] if 2 * base.pipeline <= job.model.blocks else []
        for v, m in product(chunks, _micro_batches(job, fixed, mine)):
            if technique.order != "interleaved" or not m % base.pipeline:
                yield replace(mine, chunks=v, micro_batches=m)


def _micro_batches(job: Job, fixed: Fixed, option: Option) -> list[int]:
    """The numbers of micro-batches per update that are worth a look."""
    technique, each = option.technique, option.micro_batch * option.data
    if technique.updates_each and option.pipeline > 1:
        return [1]
    least_many = technique.slack * (option.pipeline - 1) + 1 if technique.group else 1
    if fixed.batch:
        many, rest = divmod(fixed.batch, each)
        return [many] if not rest and many >= least_many else []
    found, m = [], 1
    while m * each <= _most_samples(job, fixed):
        if m >= least_many:
            found.append(m)
        m *= 2
    return found


def _most_samples(job: Job, fixed: Fixed) -> float:
    return fixed.batch or max(1.0, BATCHES * job.loss.critical_batch / job.model.context)


def _tensors(job: Job, fixed: Fixed) -> list[int]:
    """Devices that share a layer: within a node, and divisors of the heads."""
    if fixed.tensor:
        return list(fixed.tensor)
    most = min(job.cluster.device.per_node, job.cluster.count, max(1, job.model.heads))
    return [t for t in (1, 2, 4, 8, 16) if t <= most and (t == 1 or not job.model.heads % t)]


def _recompute(job: Job, fixed: Fixed) -> list[str]:
    if fixed.recompute:
        return [way for way in RECOMPUTE if way in fixed.recompute]
    scores = any(layer.scores for layer in job.model.layers)
    return [way for way in RECOMPUTE if way != "selective" or scores]


def _days(job: Job, option: Option, some: Sequence[StageLoad]) -> float:
    """The fewest days to the target."""
    tokens = option.batch * job.model.context
    slow = job.loss.delay(option.technique, option.stages, job.optimizer, option.batch).factor
    seconds = least(option, some, job.model, job.costs(option), job.precision)
    return job.tokens / tokens * seconds / DAY * slow * job.loss.batch(tokens)
