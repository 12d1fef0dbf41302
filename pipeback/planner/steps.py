"""Steps: how long an update takes, and who waits, by the simulation of its routine or of its lanes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from pipeback.planner.costs import WORD, Costs
from pipeback.planner.lanes import Visit, stream
from pipeback.planner.models import Model
from pipeback.planner.options import Option
from pipeback.planner.placed_routines import PlacedRoutine
from pipeback.planner.precisions import Precision
from pipeback.planner.routines import Routine
from pipeback.planner.simulation import simulate
from pipeback.planner.sweeps import StageTimes
from pipeback.planner.timing import ENDLESS, StageLoad, times

ADAM = 28  # bytes of host memory that an AdamW step moves per parameter: 32-bit masters and states, gradients, weights
ON_DISK = 14  # bytes per parameter that are read, and as many written


class StepTime(NamedTuple):
    """Seconds of an update on the busiest worker, and what they are made of."""

    seconds: float
    computing: float  # of products, attention, moving and launching, what is recomputed left out
    recomputing: float
    messages: float  # to and from neighbouring stages
    reducing: float  # gradients among replicas
    optimizer: float
    bubble: float  # waiting for other stages
    waiting: float  # waiting for weights


def step(option: Option, loads: Sequence[StageLoad], model: Model, costs: Costs, precision: Precision) -> StepTime:
    """One update."""
    return _streamed(option, loads, model, costs, precision) if option.streams else _piped(option, loads, costs)


def least(option: Option, loads: Sequence[StageLoad], model: Model, costs: Costs, precision: Precision) -> float:
    """Seconds that an update takes at least.

    A worker begins when a forward has passed those before it, and does all its operations. Of a flush, a backward
    passes those before it at the end, and the first updates.
    """
    if option.streams:
        return step(option, loads, model, costs, precision).seconds
    some = times(option, loads, costs)
    p, m = option.pipeline, option.micro_batches
    if option.technique.flows:
        return max(sum(_busy(t, m) for t in _of(option, some, w)) for w in range(p))
    late = option.technique.order.startswith("zb")  # W may come when the backward has passed
    down = up = longest = 0.0
    for w in range(p):
        mine = _of(option, some, w)
        busy = sum(_busy(t, m) for t in mine)
        waited = sum(t.update + (m * t.weight_gradient if late else 0.0) for t in mine)
        longest = max(longest, down + busy, down + busy - waited + up + (some[0].update if w else waited))
        down += float(some[w].forward)
        up += float(some[w].input_gradient + (0.0 if late else some[w].weight_gradient))
    return longest


def _piped(option: Option, loads: Sequence[StageLoad], costs: Costs) -> StepTime:
    some = times(option, loads, costs)
    technique, m = option.technique, option.micro_batches
    if technique.flows:
        routine = technique.routine(option.pipeline, m if technique.group else 1)
        seconds, busiest = flowing(routine, tuple(some)) * m, max(range(len(some)), key=lambda n: _busy(some[n], m))
    else:
        seconds = _flush(technique.routine(option.pipeline, m, option.chunks), tuple(some))
        busiest = max(range(option.pipeline), key=lambda w: sum(_busy(t, m) for t in _of(option, some, w)))
    mine, spent = _of(option, loads, busiest), _of(option, some, busiest)
    update = sum(t.update for t in spent)
    reducing = sum(costs.gradients(WORD * load.parameters, option.data, option.tensor) for load in mine)
    again = m * sum(load.seconds.recomputed for load in mine)
    computing = m * sum(load.seconds.total for load in mine) - again
    busy = sum(_busy(t, m) for t in spent)
    return StepTime(
        seconds,
        computing,
        again,
        max(0.0, busy - update - computing - again),
        reducing,
        update - reducing,
        max(0.0, seconds - busy),
        0.0,
    )


def _of(option: Option, by_stage: Sequence[Any], worker: int) -> list[Any]:
    """What the stages of a worker have."""
    return [by_stage[s] for s in option.technique.mine(worker, option.pipeline, option.chunks)]


def _busy(some: StageTimes, m: int) -> float:
    return float(m * (some.forward + some.input_gradient + some.weight_gradient) + some.update)


@lru_cache(maxsize=4096)
def _flush(routine: Routine | PlacedRoutine, some: tuple[StageTimes, ...]) -> float:
    return float(simulate(routine, some).seconds)


@lru_cache(maxsize=4096)
def flowing(routine: Routine | PlacedRoutine, some: tuple[StageTimes, ...]) -> float:
    """Seconds per micro-batch of a pipeline that is never drained.

    Where workers are nearly as fast as each other, a queue fills for longer than anybody looks: then the mean counts.
    """
    found = simulate(routine._replace(micro_batches=ENDLESS), some)
    return float(found.steady if found.steady is not None else found.seconds / ENDLESS)


def _streamed(option: Option, loads: Sequence[StageLoad], model: Model, costs: Costs, precision: Precision) -> StepTime:
    """Layer by layer, from host memory or disk, or from the replicas that share them out."""
    m, host = option.micro_batches, option.store != "device"
    layers = [layer for layer, times in loads[0].runs for _ in range(times)]
    tokens = float(option.micro_batch * model.context)
    passes = [costs.layer(one, tokens, option.micro_batch, option.tensor, option.recompute) for one in layers]
    forwards, backwards = [], []
    for n, (layer, seconds) in enumerate(zip(layers, passes, strict=True)):
        own = layer.parameters / option.tensor
        needed = model.layers[0].parameters / option.tensor if model.tied and n == len(layers) - 1 else own
        fetch, leave, update = _moves(option, costs, precision, needed, own)
        row = m if host else 1  # micro-batches for which a layer is fetched once
        forwards.append(Visit(n, row * seconds.forward, fetch))
        back = row * (seconds.recomputed + seconds.input_gradient + seconds.weight_gradient)
        backwards.append(Visit(n, back, fetch, leave, update))
    found = stream([*forwards, *backwards[::-1]], option.prefetch)
    rounds = 1 if host else m
    again = m * sum(seconds.recomputed for seconds in passes)
    computing = m * sum(seconds.total for seconds in passes)
    last = costs.constants.step if host else costs.step(loads[0].parameters / option.data)
    return StepTime(
        rounds * found.seconds + last, computing - again, again, 0.0, 0.0, last, 0.0, rounds * found.waiting
    )


def _moves(option: Option, costs: Costs, precision: Precision, needed: float, own: float) -> tuple[float, float, float]:
    """Seconds to bring a layer's weights, for its gradients to leave, and of its update where it lives."""
    device, data, tensor = costs.cluster.device, option.data, option.tensor
    if option.store == "device":
        fetch = costs.gradients(precision.weights * needed, data, tensor, halves=1)
        return fetch, costs.gradients(WORD * own, data, tensor, halves=1), 0.0
    link = device.host.speed
    fetch, leave = precision.weights * needed / link, WORD * own / link + costs.gradients(WORD * own, data, tensor)
    share = 1 if option.shard == "none" else data
    if option.store == "host":
        return fetch, leave, own * ADAM / device.host_speed / share
    fetch += precision.weights * needed / device.disk_read
    return fetch, leave, own * ON_DISK * (1 / device.disk_read + 1 / device.disk_write) / share
