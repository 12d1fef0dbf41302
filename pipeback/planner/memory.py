"""Memory: bytes on each device, in its host's memory and on disk, by kind.

Of a stage on one device, with P its parameters, in bytes per parameter of `precisions`:

    weights      P·weights                          older versions   (held − 1)·P·weights, held as the method declares
    gradients    P·gradients                        method state     state·P·masters
    optimizer    P·(masters + states), divided by the replicas that share it out
    activations  in flight · kept of a micro-batch, and what is computed once more, of one layer

in flight is counted on the routine; kept is all that autograd saves, or that without attention scores (selective
recomputation), or the inputs of layers alone (full). Between I and W, a micro-batch keeps 32/34 of it (Qi et al., arXiv
2401.10241, Table 1).

Weights that live elsewhere are on the device a few layers at a time; the host or the disk then has the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pipeback.planner.options import Option
from pipeback.planner.precisions import Precision
from pipeback.planner.timing import StageLoad

AFTER_I = 32 / 34  # of the activations, those that W needs
MARGIN = 0.1  # of the device's memory, for the allocator and the runtime


class DeviceBytes(NamedTuple):
    """Bytes by kind."""

    weights: float = 0.0
    older: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    state: float = 0.0
    activations: float = 0.0
    buffers: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)


NAMES = ("weights", "older versions", "gradients", "optimizer", "method state", "activations", "buffers")


class Footprint(NamedTuple):
    """Where the bytes of an option are."""

    devices: list[DeviceBytes]  # per worker of a pipeline
    host: float = 0.0  # per device
    disk: float = 0.0  # per device

    @property
    def fullest(self) -> DeviceBytes:
        return max(self.devices, key=lambda some: some.total)


def footprint(option: Option, loads: Sequence[StageLoad], precision: Precision) -> Footprint:
    """The bytes of an option."""
    if option.streams:
        return _streamed(option, loads[0], precision)
    return _piped(option, loads, precision, range(option.pipeline))


def likely(option: Option, loads: Sequence[StageLoad], precision: Precision) -> Footprint:
    """The bytes of the workers that are most likely the fullest: those at the ends, and beside the first."""
    if option.streams:
        return _streamed(option, loads[0], precision)
    return _piped(option, loads, precision, sorted({0, min(1, option.pipeline - 1), option.pipeline - 1}))


def _piped(option: Option, loads: Sequence[StageLoad], precision: Precision, workers: Iterable[int]) -> Footprint:
    technique, p = option.technique, option.pipeline
    # a pipeline that is never drained is filled by so many micro-batches
    enough = technique.slack * p + 1 if technique.updates_each else option.micro_batches
    routine = technique.routine(p, enough, option.chunks)
    share = 1 if option.shard == "none" else option.data
    found = []
    for w in workers:
        mine = [loads[s] for s in technique.mine(w, p, option.chunks)]
        parameters = sum(load.parameters for load in mine)
        flying = routine.in_flight(w) + AFTER_I * routine.unfinished(w)
        found.append(
            DeviceBytes(
                weights=parameters * precision.weights,
                older=parameters * precision.weights * (technique.held(w, p) - 1),
                gradients=parameters * precision.gradients,
                optimizer=parameters * (precision.masters + precision.optimizer) / share,
                state=parameters * precision.state * technique.state,
                activations=flying * sum(load.kept for load in mine) / len(mine) + max(load.again for load in mine),
            )
        )
    return Footprint(found)


def _streamed(option: Option, load: StageLoad, precision: Precision) -> Footprint:
    """The weights of a few layers are on the device, and the activations of all."""
    most = max(layer.parameters for layer, _ in load.runs) / option.tensor
    parameters = load.parameters
    # from a store, a layer serves all micro-batches of an update; shared out over replicas, one after the other
    flying = option.micro_batches if option.store != "device" else 1
    slots = DeviceBytes(
        gradients=most * precision.gradients,
        activations=flying * load.kept + load.again,
        buffers=(option.prefetch + 1) * most * precision.weights,
    )
    states = parameters * (precision.masters + precision.optimizer)
    if option.store == "device":  # shared out over replicas
        own = parameters / option.data
        everything = slots._replace(
            weights=own * precision.weights, gradients=slots.gradients + own * precision.gradients,
            optimizer=states / option.data,
        )  # fmt: skip
        return Footprint([everything])
    share = option.data if option.shard != "none" else 1
    if option.store == "host":
        return Footprint([slots], parameters * (precision.weights + precision.gradients) + states / share)
    # two versions are on disk, the last and the one that is written; a few layers are open in host memory
    few = (option.prefetch + 1) * most * precision.total
    return Footprint([slots], few, 2 * (parameters * precision.weights + states / share))
