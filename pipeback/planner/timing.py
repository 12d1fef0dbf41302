"""Timing: the stages of an option on one device: their layers, bytes, seconds, and what a simulation takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeback.planner.costs import WORD, Costs, PassSeconds
from pipeback.planner.layers import Layer
from pipeback.planner.models import Model, Runs
from pipeback.planner.options import Option
from pipeback.planner.sweeps import StageTimes

ENDLESS = 100_000  # micro-batches after which a pipeline that is never drained is steady


class StageLoad(NamedTuple):
    """A stage of an option, on one of the devices that share it, for one micro-batch."""

    runs: Runs  # its layers
    seconds: PassSeconds  # without messages
    message: float  # seconds of one to the next stage
    parameters: float
    kept: float  # bytes from F to B
    again: float  # bytes that B computes once more, of one layer


def loads(option: Option, model: Model, costs: Costs) -> list[StageLoad]:
    """The stages of an option."""
    samples, tensor, how = option.micro_batch, option.tensor, option.recompute
    tokens = float(samples * model.context)
    known: dict[Runs, StageLoad] = {}
    found = []
    for n, runs in enumerate(model.cut(option.stages)):
        if runs not in known:
            each = [(layer, times, costs.layer(layer, tokens, samples, tensor, how)) for layer, times in runs]
            known[runs] = StageLoad(
                runs,
                PassSeconds(*(sum(times * one[k] for _, times, one in each) for k in range(len(PassSeconds._fields)))),
                costs.message(samples * runs[-1][0].output, tensor * option.data, option.pipeline),
                sum(times * layer.parameters for layer, times in runs) / tensor,
                samples * sum(times * kept(layer, tensor, how) for layer, times in runs),
                samples * max(repeated(layer, tensor, how) for layer, _ in runs),
            )
        one = known[runs]
        if model.tied and n == option.stages - 1 > 0:  # a copy of the embedding, for the head
            one = one._replace(parameters=one.parameters + model.layers[0].parameters / tensor)
        found.append(one)
    return found


def kept(layer: Layer, tensor: int, recompute: str) -> float:
    """Bytes that a layer keeps from F to B of one sample, on one device.

    With selective recomputation, devices that share a layer share its sequence out, too.
    """
    part = layer.on(tensor, sequence=recompute == "selective")
    if recompute == "full":
        return part.entry
    return part.kept + part.shared + (part.scores if recompute == "none" else 0.0)


def repeated(layer: Layer, tensor: int, recompute: str) -> float:
    """Bytes that a layer computes once more in B, of one sample."""
    part = layer.on(tensor, sequence=recompute == "selective")
    if recompute == "none":
        return 0.0
    return part.scores + (max(0.0, part.kept + part.shared - part.entry) if recompute == "full" else 0.0)


def times(option: Option, some: Sequence[StageLoad], costs: Costs) -> list[StageTimes]:
    """What the simulation takes. A worker waits for its messages; U has what replicas exchange, and the step."""
    found, apart = [], option.technique.apart
    share = option.data if option.shard == "optimizer" else 1
    for n, load in enumerate(some):
        come = some[n - 1].message if n and apart(n - 1, option.pipeline) else 0.0
        back = load.message if n < len(some) - 1 and apart(n, option.pipeline) else 0.0
        one = load.seconds
        exchanged = costs.gradients(WORD * load.parameters, option.data, option.tensor)
        found.append(
            StageTimes(
                one.forward + come, one.recomputed + one.input_gradient + back, one.weight_gradient,
                exchanged + costs.step(load.parameters / share),
            )
        )  # fmt: skip
    return found
