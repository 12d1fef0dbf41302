"""Models: a transformer by name or by numbers, or any layers, measured on a pipeline.

Model.named("gpt:13b")        Model.named("llama:70b,context=8192")
Model.gpt(layers=48, width=8192, heads=64, context=2048)
Model.measured(pipe.breakdown(x, y), samples=8)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate, groupby
from math import inf
from typing import Any, Protocol

from pipeback.planner import catalogue
from pipeback.planner.layers import Layer, TransformerShape
from pipeback.planner.quantities import whole

Runs = tuple[tuple[Layer, int], ...]  # layers of a stage, equal ones that follow each other with their number


class MeasuredStage(Protocol):
    """A stage as `Pipeline.breakdown` has it; numbers of one micro-batch."""

    @property
    def name(self) -> str: ...
    @property
    def parameters(self) -> int: ...
    @property
    def forward_flops(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def activations(self) -> int: ...
    @property
    def input(self) -> int: ...
    @property
    def output(self) -> int: ...


@dataclass(frozen=True)
class Model:
    """Layers in their order; stages are cut between them.

    context: tokens per sample; 1 if samples are no sequences. heads: which tensor parallelism shares out; 0: it cannot.
    tied: whether the last layer uses the weight of the first, so that both hold it.
    """

    name: str
    layers: tuple[Layer, ...]
    context: int = 1
    heads: int = 0
    tied: bool = False
    shape: TransformerShape | None = None
    weight_bytes: int = 2  # of one parameter, as it computes
    source: str = "given by you"

    @classmethod
    def named(cls, text: str) -> Model:
        """gpt:13b, llama:70b, or numbers: gpt:layers=48,width=8192,heads=64. Raises ValueError for unknown ones."""
        family, _, rest = text.partition(":")
        families = catalogue.table("models")
        family = catalogue.key("family of models", family, families)
        entries = families[family]
        words = [word.strip() for word in rest.split(",") if word.strip()]
        given = dict(entries.get("all", {}))
        if words and "=" not in words[0]:
            given |= entries[catalogue.key(f"{family}:", words.pop(0), [name for name in entries if name != "all"])]
        source = given.pop("source", "a file of your own")
        known = [one.name for one in fields(TransformerShape)]
        for word in words:
            name, _, value = word.partition("=")
            given[catalogue.key(f"option of {family}:", name, known)] = _value(name, value)
        for need in ("layers", "width", "heads"):
            if need not in given:
                sizes = ", ".join(f"{family}:{name}" for name in entries if name != "all")
                raise ValueError(f"{text}: {need} is missing; give {need}=..., or one of {sizes}")
        source = source if not words else f"{source}; {', '.join(words)} given by you"
        return cls._of(text, TransformerShape(**given), source)

    @classmethod
    def gpt(cls, layers: int, width: int, heads: int, **more: Any) -> Model:
        """A GPT by numbers; more: context, vocabulary and so on, as `TransformerShape` has them."""
        shape = TransformerShape(layers, width, heads, **more)
        return cls._of(f"gpt:layers={layers},width={width},heads={heads}", shape, "given by you")

    @classmethod
    def _of(cls, name: str, shape: TransformerShape, source: str) -> Model:
        return cls(name, tuple(shape.sequence), shape.context, shape.heads, shape.tied, shape, source=source)

    @classmethod
    def measured(
        cls, stages: Iterable[MeasuredStage], samples: int, *, name: str = "your model", weight_bytes: int = 4
    ) -> Model:
        """From the rows of `pipe.breakdown(x, y)`, of a micro-batch of so many samples.

        Its context is how often a weight is used per sample, on average: FLOP/(2·parameters).
        """
        rows = list(stages)
        flops, parameters = (sum(map(float, some)) for some in zip(*((r.forward_flops, r.parameters) for r in rows)))
        context = max(1, round(flops / (2 * parameters * samples))) if parameters else 1
        layers = [
            Layer(
                row.name, float(row.parameters), row.forward_flops / samples, kept=row.activations / samples,
                entry=row.input / samples, output=row.output / samples, width=inf,
                seconds=(row.seconds / 3 / samples, 2 * row.seconds / 3 / samples),
            )
            for row in rows
        ]  # fmt: skip
        return cls(name, tuple(layers), context, weight_bytes=weight_bytes, source="measured on a pipeline")

    def elsewhere(self) -> Model:
        """The same layers without the seconds that were measured, for another device."""
        return replace(self, layers=tuple(layer._replace(seconds=None) for layer in self.layers))

    @cached_property
    def parameters(self) -> float:
        return sum(layer.parameters for layer in self.layers)

    @cached_property
    def flops(self) -> float:
        """FLOP of the forward and the backward of one sample, without recomputation."""
        return 3 * sum(layer.products + layer.attention for layer in self.layers)

    @cached_property
    def blocks(self) -> int:
        """How many stages it can be cut into: an embedding and a head are on the stages of their neighbours."""
        return len(self.layers) - 2 if self.shape else len(self.layers)

    def cut(self, stages: int) -> list[Runs]:
        """The layers of each stage.

        Of a transformer: as many blocks on each; where this cannot be, one more on those before the last, which has the
        head. Of other layers: as even as can be by FLOP or measured seconds.
        """
        if stages not in self._cuts:
            if self.shape:
                each, more = divmod(self.blocks, stages)
                counts = [each + (stages - 1 - more <= n < stages - 1) for n in range(stages)]
                ends = [1 + end for end in accumulate(counts)]
            else:
                ends = even([_weight(layer) for layer in self.layers], stages)
            ends[-1] = len(self.layers)
            self._cuts[stages] = [_runs(self.layers[a:b]) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
        return self._cuts[stages]

    @cached_property
    def _cuts(self) -> dict[int, list[Runs]]:
        return {}


def _runs(layers: Sequence[Layer]) -> Runs:
    return tuple((layer, len(list(some))) for layer, some in groupby(layers))


def _weight(layer: Layer) -> float:
    return sum(layer.seconds) if layer.seconds else layer.products + layer.attention


def even(weights: Sequence[float], parts: int) -> list[int]:
    """Where consecutive parts end, none of them empty, of which the heaviest is as light as can be.

    >>> even([1, 1, 1, 3, 1], 3)
    [3, 4, 5]
    """
    low, high = max(weights), sum(weights)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_filled(weights, parts, middle)) <= parts else (middle, high)
    return _filled(weights, parts, high)


def _filled(weights: Sequence[float], parts: int, most: float) -> list[int]:
    """Ends of parts that are filled up to `most`, with at least one weight left for each part that follows."""
    ends: list[int] = []
    load = 0.0
    for n, weight in enumerate(weights):
        if load and (load + weight > most * (1 + 1e-12) or len(weights) - n < parts - len(ends)):
            ends.append(n)
            load = 0.0
        load += weight
    return [*ends, len(weights)]


def _value(name: str, text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return whole(name, text)
