"""Measured runs: the rows of published tables, or of a file of your own, as options of the planner.

Columns: name, layers, width, heads, context, devices, tensor, pipeline, chunks, micro_batch, batch (samples per step),
recompute, and seconds per step, or tflops per device as the table's source counts them. A file of your own may also
have device, network (GB/s per device, one way) and vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from pipeback.planner.constants import Constants, best_for
from pipeback.planner.costs import Costs
from pipeback.planner.hardware import GIGA, Cluster, Link, device
from pipeback.planner.models import Model
from pipeback.planner.options import Option
from pipeback.planner.precisions import precision
from pipeback.planner.published import rows
from pipeback.planner.steps import step
from pipeback.planner.techniques import technique
from pipeback.planner.timing import loads

# what the columns of a table leave out
TABLES: dict[str, dict[str, Any]] = {
    "vtrain_multi": {"device": "A100", "network": 12.5},
    "vtrain_single": {"device": "A100", "network": 12.5},
    "megatron_a100": {"device": "A100", "network": 25},
    "korthikanti_steps": {"device": "A100", "network": 25},
    "mt_nlg": {"device": "A100", "network": 25},
    "foundry_a100": {"network": 25, "fused": True, "dropout": False},
    "foundry_a100_unseen": {"network": 25, "fused": True, "dropout": False},
    "foundry_h100": {"network": 50, "fused": True, "dropout": False},
    "megatron_h100": {"device": "H100", "network": 50, "vocabulary": 131072, "fused": True, "dropout": False},
}


class MeasuredRun(NamedTuple):
    """A run that somebody has measured."""

    name: str
    option: Option
    model: Model
    cluster: Cluster
    seconds: float  # per step

    def predicted(self, constants: Constants | None = None) -> float:
        """The seconds that the planner predicts. constants: None: those that a plan would take."""
        costs = Costs(self.cluster, constants or best_for(self.cluster.device.name, self.option.shard))
        some = loads(self.option, self.model, costs)
        return step(self.option, some, self.model, costs, precision()).seconds


def measured_runs(table: str) -> list[MeasuredRun]:
    """The runs of a published table."""
    return [run(row, TABLES[table]) for row in rows(table)]


def run(row: Mapping[str, str], given: Mapping[str, Any]) -> MeasuredRun:
    """A row as a run. given: the values of columns that it does not have."""
    values = {**given, **{name: value for name, value in row.items() if value}}
    more = {name: values[name] for name in ("fused", "dropout") if name in values}
    model = _model(*(int(values[name]) for name in ("layers", "width", "heads", "context")),
                   int(values.get("vocabulary", 51200)), **more)  # fmt: skip
    tensor, pipeline, chunks, micro_batch = (
        int(values[name]) for name in ("tensor", "pipeline", "chunks", "micro_batch")
    )
    count, batch = int(values["devices"]), int(values["batch"])
    data = count // (tensor * pipeline)
    option = Option(
        technique("interleaved" if chunks > 1 else "one_f_one_b"), data, pipeline, tensor, chunks, micro_batch,
        batch // (micro_batch * data), values.get("recompute", "full"), values.get("shard", "none"),
    )  # fmt: skip
    there = device(values["device"])
    cluster = Cluster(replace(there, scale_out=Link(float(values["network"]) * GIGA, "network")), count)
    return MeasuredRun(values["name"], option, model, cluster, _seconds(values, model, option, count))


def _seconds(values: Mapping[str, Any], model: Model, option: Option, count: int) -> float:
    if "seconds" in values:
        return float(values["seconds"])
    shape = model.shape
    assert shape is not None
    s, h, n, v = shape.context, shape.width, shape.layers, shape.vocabulary
    passes = 4 if option.recompute == "full" else 3
    flops = option.batch * s * n * h * h * (24 * passes * (1 + s / (6 * h)) + 6 * v / (n * h))
    return flops / (count * float(values["tflops"]) * 1e12)


@cache
def _model(layers: int, width: int, heads: int, context: int, vocabulary: int, **more: bool) -> Model:
    return Model.gpt(layers, width, heads, context=context, vocabulary=vocabulary, **more)


class Errors(NamedTuple):
    """How far predictions are off, as shares: of seconds, and of choosing by them."""

    mean: float
    worst: float
    bias: float
    choices: dict[str, float]  # by model: what the option that is predicted to be fastest costs beyond the fastest


def errors(runs: Iterable[MeasuredRun], predicted: Iterable[float]) -> Errors:
    pairs = list(zip(runs, predicted, strict=True))
    off = [guess / one.seconds - 1 for one, guess in pairs]
    choices = {}
    for name in dict.fromkeys(one.name for one, _ in pairs):
        mine = [(guess, one.seconds) for one, guess in pairs if one.name == name]
        choices[name] = min(mine)[1] / min(seconds for _, seconds in mine) - 1
    size = [abs(one) for one in off]
    return Errors(sum(size) / len(size), max(size), sum(off) / len(off), choices)
