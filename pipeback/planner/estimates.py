"""Estimates: everything about one option: seconds, bytes, delay, time to the target, and what binds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeback.planner.constants import Constants, best_for
from pipeback.planner.costs import Costs
from pipeback.planner.explain import text
from pipeback.planner.hardware import Cluster
from pipeback.planner.loss import Loss, Slow
from pipeback.planner.marks import marks
from pipeback.planner.memory import MARGIN, NAMES, Footprint, footprint
from pipeback.planner.models import Model
from pipeback.planner.options import Option
from pipeback.planner.placed_routines import PlacedRoutine
from pipeback.planner.precisions import Precision
from pipeback.planner.routines import Routine
from pipeback.planner.simulation import simulate
from pipeback.planner.steps import StepTime, step
from pipeback.planner.timing import StageLoad, loads, times
from pipeback.schedules.timeline import Slot

DAY = 86_400.0
LITTLE = 0.1  # what costs no more than this share of the time does not bind


@dataclass(frozen=True)
class Job:
    """What is asked: a model, on a cluster, to a target, with an optimizer."""

    model: Model
    cluster: Cluster
    precision: Precision
    tokens: float
    loss: Loss
    optimizer: str
    price: float = 0.0  # per device and hour
    constants: Constants | None = None  # None: those of the catalogue that fit the option best

    def costs(self, option: Option) -> Costs:
        """The cost model of an option."""
        return Costs(self.cluster, self.constants or best_for(self.cluster.device.name, option.shard))


class Estimate(NamedTuple):
    """An option and what it takes."""

    job: Job
    option: Option
    loads: Sequence[StageLoad]
    footprint: Footprint
    step: StepTime
    slow: Slow

    @property
    def title(self) -> str:
        """The method, or what replicas do that have no pipeline."""
        option = self.option
        if option.pipeline > 1:
            return option.technique.name
        if option.store != "device":
            return "streaming"
        if option.devices == 1:
            return "one device"
        return "sharded" if option.shard == "all" else "data parallel" if option.data > 1 else "tensor parallel"

    @property
    def tokens_per_update(self) -> float:
        return float(self.option.batch * self.job.model.context)

    @property
    def throughput(self) -> float:
        """Tokens per second."""
        return self.tokens_per_update / self.step.seconds

    @property
    def mfu(self) -> float:
        """The share of the devices' peak that the model's FLOP take, without recomputation."""
        flops = self.job.model.flops * self.option.batch
        return flops / (self.step.seconds * self.option.devices * self.job.cluster.device.flops)

    @property
    def bubble(self) -> float:
        return max(0.0, self.step.bubble / self.step.seconds)

    @property
    def waiting(self) -> float:
        return self.step.waiting / self.step.seconds

    @property
    def batch_factor(self) -> float:
        return self.job.loss.batch(self.tokens_per_update)

    @property
    def plain_days(self) -> float:
        """Days for so many tokens, whatever they teach."""
        return self.job.tokens / self.throughput / DAY

    @property
    def days(self) -> float:
        """Days to the target."""
        return self.plain_days * self.slow.factor * self.batch_factor

    @property
    def device_days(self) -> float:
        return self.days * self.option.devices

    @property
    def cost(self) -> float:
        return self.device_days * 24 * self.job.price

    @property
    def required(self) -> float:
        """Bytes of device memory that it needs, with what the allocator takes beside."""
        return self.footprint.fullest.total / (1 - MARGIN)

    @property
    def fits(self) -> bool:
        device = self.job.cluster.device
        return self.required <= device.memory and self.footprint.host <= device.host_memory

    @property
    def losses(self) -> dict[str, float]:
        """The share of the time to the target that is not computing the model, by what takes it."""
        one = self.step
        busy = {
            "bubble": one.bubble, "host link": one.waiting if self.option.store != "device" else 0.0,
            "network": one.messages + one.reducing + (one.waiting if self.option.store == "device" else 0.0),
            "memory": one.recomputing, "optimizer": one.optimizer,
        }  # fmt: skip
        useful = 1 / (self.slow.factor * self.batch_factor)
        found = {name: useful * max(0.0, seconds) / one.seconds for name, seconds in busy.items()}
        # first the delay, then the batch, so that the shares add up
        found["delay"] = 1 - 1 / self.slow.factor
        found["batch"] = (1 - 1 / self.batch_factor) / self.slow.factor
        return found

    @property
    def binds(self) -> str:
        """What costs most of the time, if anything but computing costs more than a tenth."""
        name, share = max(self.losses.items(), key=lambda item: item[1])
        return name if share > LITTLE else "compute"

    @property
    def marks(self) -> list[str]:
        """Why the numbers lie outside what was compared with measurements; none if they do not."""
        return marks(self)

    @property
    def routine(self) -> Routine | PlacedRoutine:
        """Of one update, or of enough micro-batches to see a pipeline that is never drained."""
        technique, option = self.option.technique, self.option
        many = option.micro_batches if not technique.flows else max(option.micro_batches, 4 * option.pipeline)
        return technique.routine(option.pipeline, many, option.chunks)

    def memory(self) -> list[dict[str, float]]:
        """Bytes of every worker's device by kind; those of other replicas and of shared layers are alike."""
        return [dict(zip(NAMES, some, strict=True)) for some in self.footprint.devices]

    def explain(self) -> str:
        """Every number with its formula and its inputs."""
        return text(self)

    def timeline(self) -> list[Slot]:
        """The operations of one replica, in seconds, for `pipeback.draw.picture`."""
        return simulate(self.routine, times(self.option, self.loads, self.job.costs(self.option)), slots=True).slots


def estimate(job: Job, option: Option) -> Estimate:
    """Everything about an option. Raises ValueError where its numbers contradict each other."""
    option.check(job.model, job.cluster)
    some = loads(option, job.model, job.costs(option))
    return complete(job, option, some, footprint(option, some, job.precision))


def complete(job: Job, option: Option, some: Sequence[StageLoad], there: Footprint) -> Estimate:
    """The same, where loads and footprint are known."""
    slow = job.loss.delay(option.technique, option.stages, job.optimizer, option.batch)
    taken = step(option, some, job.model, job.costs(option), job.precision)
    return Estimate(job, option, some, there, taken, slow)
