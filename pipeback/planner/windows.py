"""Windows: the tokens per weight pass between which streaming hides behind computing and everything fits.

With F the FLOP per second that a device reaches, W its host link and P the parameters of the largest layer, a pass over
T tokens computes 2PT FLOP forward and 4PT backward; weights have β bytes, 2 in a 16-bit type:

    forward      2PT/F ≥ βP/W                      T ≥ β/2 · F/W          the binding phase of 16-bit weights
    backward     (4 or, recomputed, 6)PT/F ≥ the larger of weights in and gradients out, over W
    optimizer    (6 or 8)PT/F ≥ 28P/W_host         it steps in host memory, beside forward and backward
    disk         the same with 14 bytes read and 14 written per parameter
    memory       Σ kept·T ≤ memory − (prefetch + 1)·βP − ...              the upper end: bytes of `memory.footprint`

Below, seconds are those of `costs`, so that small passes are slower than their FLOP say. Streamed activations are no
upper end: computing grows with T as they do.
"""

from __future__ import annotations

from typing import NamedTuple

from pipeback.planner.constants import best_for
from pipeback.planner.costs import WORD, Costs
from pipeback.planner.hardware import Cluster, Device
from pipeback.planner.layers import Layer
from pipeback.planner.memory import MARGIN, DeviceBytes, footprint
from pipeback.planner.models import Model
from pipeback.planner.options import Option
from pipeback.planner.precisions import precision
from pipeback.planner.quantities import gigabytes
from pipeback.planner.steps import ADAM, ON_DISK
from pipeback.planner.techniques import technique
from pipeback.planner.timing import loads


class Edge(NamedTuple):
    """Tokens per weight pass from which, or up to which, something is so. name: of `PHASES`, or "memory"."""

    name: str
    tokens: float
    formula: str  # with its inputs
    moving: float = 0.0  # seconds that hide


Parts = tuple[int, int, int, int]  # which of F, I, W and what is recomputed count
FORWARD, BACKWARD, BOTH = (1, 0, 0, 0), (0, 1, 1, 1), (1, 1, 1, 1)


class Phase(NamedTuple):
    """What hides behind what, in the words of a picture."""

    parts: Parts
    computing: str
    moving: str


PHASES = {
    "forward": Phase(FORWARD, "computing a layer's forward", "bringing its weights"),
    "backward": Phase(BACKWARD, "computing a layer's backward", "its gradients leaving"),
    "optimizer": Phase(BOTH, "computing a layer, both ways", "its optimizer step in host memory"),
    "disk": Phase(BOTH, "computing a layer, both ways", "its state from and to disk"),
}


class Window(NamedTuple):
    """The window of a device and a model."""

    device: Device
    model: Model
    recompute: str
    lows: list[Edge]  # from which each phase hides
    high: Edge  # up to which the activations fit
    reached: float  # FLOP per second of the largest layer's forward, at the lower edge

    @property
    def low(self) -> Edge:
        """The phase that hides last."""
        return max(self.lows, key=lambda edge: edge.tokens)

    @property
    def open(self) -> bool:
        return self.low.tokens <= self.high.tokens

    def __str__(self) -> str:
        is_open = "open" if self.open else "empty"
        head = (
            f"{self.model.name} streamed to {self.device.name}, recompute={self.recompute}: the window is {is_open}, "
            f"{self.low.tokens:,.0f} to {self.high.tokens:,.0f} tokens per weight pass"
        )
        wide = max(len(edge.name) for edge in (*self.lows, self.high))
        lines = [f"  {edge.name:<{wide}}  {edge.tokens:>12,.0f}  {edge.formula}" for edge in (*self.lows, self.high)]
        return "\n".join([head, *lines])


def window(model: Model, device: Device, *, recompute: str = "full", store: str = "host", prefetch: int = 1) -> Window:
    """The window of a model whose weights are in host memory or on disk."""
    costs = Costs(Cluster(device), best_for(device.name, "none"))
    layer = max(model.layers[1:-1] if model.shape else model.layers, key=lambda one: one.parameters)
    size, link = model.weight_bytes * layer.parameters, device.host.speed
    back = 3 if recompute == "full" else 2
    lows = [
        _edge(costs, model, layer, recompute, "forward", size / link,
              f"weights in: {model.weight_bytes} B · P / {link / 1e9:g} GB/s"),
        _edge(costs, model, layer, recompute, "backward", max(size, WORD * layer.parameters) / link,
              f"gradients out: {WORD} B · P / {link / 1e9:g} GB/s, against {2 * back}PT FLOP"),
        _edge(costs, model, layer, recompute, "optimizer", layer.parameters * ADAM / device.host_speed,
              f"{ADAM} B · P / {device.host_speed / 1e9:g} GB/s of host memory, against {2 + 2 * back}PT FLOP"),
    ]  # fmt: skip
    if store == "disk":
        seconds = layer.parameters * ON_DISK * (1 / device.disk_read + 1 / device.disk_write)
        told = f"{ON_DISK} B · P read at {device.disk_read / 1e9:g} and written at {device.disk_write / 1e9:g} GB/s"
        lows.append(_edge(costs, model, layer, recompute, "disk", seconds, told))
    high = _high(model, device, costs, recompute, store, prefetch)
    low = max(edge.tokens for edge in lows)
    reached = layer.products * low / model.context / _seconds(costs, model, layer, recompute, low, FORWARD)
    return Window(device, model, recompute, lows, high, reached)


def _seconds(costs: Costs, model: Model, layer: Layer, recompute: str, tokens: float, parts: Parts) -> float:
    one = costs.layer(layer, tokens, tokens / model.context, 1, recompute)
    return sum(part * seconds for part, seconds in zip(parts, one, strict=True))


def _edge(costs: Costs, model: Model, layer: Layer, recompute: str, name: str, moving: float, told: str) -> Edge:
    """The fewest tokens whose computing takes as long as the moving; found by halving."""
    parts = PHASES[name].parts
    low, high = 0.0, 1.0  # less than a token is none
    while _seconds(costs, model, layer, recompute, high, parts) < moving:
        low, high = high, 2 * high
    while high - low > max(0.5, 1e-3 * high):
        middle = (low + high) / 2
        if _seconds(costs, model, layer, recompute, middle, parts) < moving:
            low = middle
        else:
            high = middle
    return Edge(name, max(1.0, high), f"{told} = {1e3 * moving:.3g} ms, P = {layer.parameters:.3g}", moving)


def _high(model: Model, device: Device, costs: Costs, recompute: str, store: str, prefetch: int) -> Edge:
    """The tokens that fill the device, less its margin: the bytes of an option are linear in its micro-batches."""
    types = precision("mixed" if model.weight_bytes == WORD else "float")

    def held(micro_batches: int) -> DeviceBytes:
        one = Option(
            technique("gpipe"), micro_batches=micro_batches, recompute=recompute, store=store, prefetch=prefetch
        )
        return footprint(one, loads(one, model, costs), types).fullest

    each = held(2).total - held(1).total
    fixed = held(1).total - each
    room = device.memory * (1 - MARGIN)
    told = (
        f"({device.memory / 1e9:g} GB · {1 - MARGIN:g} − {gigabytes(fixed)} GB of {prefetch + 1} layers and what is "
        f"computed once more) / {each / model.context / 1e3:.3g} kB of activations per token"
    )
    return Edge("memory", max(0.0, room - fixed) / each * model.context, told)


class WindowLine(NamedTuple):
    """Seconds of a layer at so many tokens, for a picture."""

    tokens: float
    computing: float
    moving: float


def lines(found: Window, points: int = 60, phase: str = "") -> list[WindowLine]:
    """Computing and moving of the largest layer, over tokens around the window. phase: "": the one that hides last."""
    costs = Costs(Cluster(found.device), best_for(found.device.name, "none"))
    layer = max(found.model.layers[1:-1] if found.model.shape else found.model.layers, key=lambda one: one.parameters)
    edge = next(edge for edge in found.lows if edge.name == (phase or found.low.name))
    parts = PHASES[edge.name].parts
    first, last = min(found.low.tokens, found.high.tokens) / 30, max(found.low.tokens, found.high.tokens) * 4
    first = max(1.0, first)
    grid = [first * (last / first) ** (n / (points - 1)) for n in range(points)]
    return [WindowLine(t, _seconds(costs, found.model, layer, found.recompute, t, parts), edge.moving) for t in grid]
