"""Charts of a plan: its numbers as rows, bars and lines, which the page and the pictures draw.

Places are in percent of a chart's width and of its height from the top, as in `reports.charts`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pipeback.planner.crossover import Crossing, first
from pipeback.planner.estimates import Estimate
from pipeback.planner.found import Found, Point
from pipeback.planner.memory import MARGIN, NAMES
from pipeback.planner.quantities import days, gigabytes
from pipeback.planner.windows import PHASES, Window, WindowLine
from pipeback.recipes.reports.charts import Chart, Line, Mark, joined
from pipeback.recipes.reports.scales import Scale
from pipeback.recipes.reports.style import on_dark

KINDS = dict(zip(NAMES, ("#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#CC79A7", "#009E73", "#8C8C8C"), strict=True))
SHARES = {
    "computing": "#0072B2", "recomputing": "#56B4E9", "bubble": "#E69F00", "network": "#CC79A7", "host link": "#009E73",
    "optimizer": "#8C8C8C", "delay": "#D55E00", "batch": "#B8860B",
}  # fmt: skip
LINES = ("#0072B2", "#D55E00", "#009E73", "#8C8C8C", "#CC79A7")
MOST = 9  # options that bars are drawn of


class Part(NamedTuple):
    """A part of a bar. told: what the mouse shows."""

    paint: str
    x: float
    width: float
    told: str
    size: float


class Stack(NamedTuple):
    """An option's bar."""

    label: str
    value: str
    parts: list[Part]
    failed: bool = False


class Stacks(NamedTuple):
    """Bars with what their colours mean; line: what there is, with its name."""

    title: str
    keys: list[tuple[str, str]]
    bottom: list[Mark]
    rows: list[Stack]
    line: float | None = None
    limit: str = ""


def scheme() -> dict[str, tuple[str, str]]:
    """The colours of the page: class -> on white, on dark."""
    groups = {"m": KINDS.values(), "t": SHARES.values(), "l": LINES}
    colours = {f"{letter}{n}": colour for letter, some in groups.items() for n, colour in enumerate(some)}
    return {name: (colour, on_dark(colour)) for name, colour in colours.items()}


def told(one: Estimate) -> str:
    """An option in a few words."""
    option = one.option
    chunks = f", {option.chunks} chunks" if option.chunks > 1 else ""
    return f"{one.title}, {option.data} × {option.pipeline} × {option.tensor}{chunks}"


def chosen(found: Found) -> list[Estimate]:
    """The best option of every method, as many as bars are drawn of."""
    some: dict[str, Estimate] = {}
    for one in found:
        some.setdefault(one.title, one)
    return list(some.values())[:MOST]


def memory(found: Found) -> Stacks:
    """Bytes of the fullest device by kind, of the best option of every method and of those that do not fit."""
    room = found.job.cluster.device.memory
    options = [*chosen(found), *found.refused[:3]]
    across = Scale(0.0, 1.18 * max([room, *(one.footprint.fullest.total for one in options)]))
    rows = []
    for one in options:
        value = f"{gigabytes(one.footprint.fullest.total)} GB"
        sizes = dict(zip(NAMES, one.footprint.fullest, strict=True))
        parts = _parts(sizes, "m", list(KINDS), across, lambda size: f"{gigabytes(size)} GB")
        rows.append(Stack(told(one), value if one.fits else f"{value}, does not fit", parts, not one.fits))
    bottom = [Mark(round(across.place(n), 2), f"{n / 1e9:,.10g} GB") for n in across.marks(5)]
    used = [name for name in KINDS if any(dict(zip(NAMES, o.footprint.fullest, strict=True))[name] for o in options)]
    keys = [(name, f"m{list(KINDS).index(name)}") for name in used]
    limit = f"{found.job.cluster.device.name}: {gigabytes(room)} GB, of which {1 - MARGIN:.0%} are planned"
    return Stacks("the fullest device", keys, bottom, rows, round(across.place(room), 2), limit)


def shares(found: Found) -> Stacks:
    """Where the time to the target goes."""
    across = Scale(0.0, 1.0)
    rows = []
    for one in chosen(found):
        losses = dict(one.losses)
        losses["recomputing"] = losses.pop("memory")
        whole = {"computing": max(0.0, 1 - sum(losses.values())), **losses}
        parts = _parts(whole, "t", list(SHARES), across, lambda share: f"{share:.1%}")
        rows.append(Stack(told(one), days(86_400 * one.days), parts))
    bottom = [Mark(100.0 * n / 4, f"{25 * n} %") for n in range(5)]
    used = {part.paint for row in rows for part in row.parts}
    keys = [(name, f"t{n}") for n, name in enumerate(SHARES) if f"t{n}" in used]
    return Stacks("shares of the time to the target", keys, bottom, rows)


def _parts(
    sizes: dict[str, float], letter: str, order: Sequence[str], across: Scale, written: Callable[[float], str]
) -> list[Part]:
    parts, before = [], 0.0
    for name in order:
        size = sizes.get(name, 0.0)
        if size > 0:
            place, end = across.place(before), across.place(before + size)
            told_by = f"{name}: {written(size)}"
            parts.append(Part(f"{letter}{order.index(name)}", round(place, 2), round(end - place, 2), told_by, size))
        before += size
    return parts


# -- curves ------------------------------------------------------------------------------------------------------------


def curve(
    label: str, paint: str, points: Sequence[tuple[float, float, str]], x: Scale, y: Scale, dashes: str = ""
) -> Line:
    """points: places on both axes, and what the mouse shows."""
    places = [(x.place(a), 100 - y.place(b)) for a, b, _ in points]
    marks = [
        Mark(round(px, 2), text, round(py, 2)) for (px, py), (_, _, text) in zip(places, points, strict=True) if text
    ]
    return Line(label, paint, False, dashes, joined(places), "", marks)


def _log(values: Sequence[float], room: float = 1.25) -> Scale:
    low, high = min(values), max(values)
    return Scale(low / room, high * room, logarithmic=True)


def _axes(x: Scale, y: Scale, below: str, above: str) -> tuple[list[Mark], list[Mark]]:
    left = [Mark(0.0, f"{n:,.6g}{above}", round(100 - y.place(n), 2)) for n in y.marks(5)]
    bottom = [Mark(round(x.place(n), 2), _round(n)) for n in x.marks(5)]
    return left, bottom


def _round(value: float) -> str:
    """A round number at an axis: 200, 5K, 100K."""
    unit, scale = next((one for one in (("M", 1e6), ("K", 1e3)) if value >= one[1]), ("", 1.0))
    return f"{value / scale:,.6g}{unit}"


def frontier(points: Sequence[Point], price: float) -> Chart:
    """Days over devices, beside what they would be if each device helped as much as the first."""
    x, y = _log([p.devices for p in points]), _log([p.best.days for p in points])
    best = [(float(p.devices), p.best.days, _point(p, price)) for p in points]
    ideal = [(float(p.devices), points[0].best.device_days / p.devices, "") for p in points]
    left, bottom = _axes(x, y, "devices", "")
    lines = [curve("best option", "l0", best, x, y), curve("device-days of the fewest", "l3", ideal, x, y, "5 4")]
    return Chart("days to the target", "devices", left, bottom, lines)


def _point(point: Point, price: float) -> str:
    one = point.best
    cost = f", {one.cost:,.0f} at {price:g} per device and hour" if price else ""
    return f"{point.devices} devices: {days(86_400 * one.days)} by {told(one)}, {one.binds} binds{cost}"


def window(found: Window, some: Sequence[WindowLine]) -> Chart:
    """Computing and moving of the phase that hides last, over tokens; its edges upright, the window shaded."""
    x = Scale(some[0].tokens, some[-1].tokens, logarithmic=True)
    y = _log([one.computing for one in some] + [one.moving for one in some])
    computing = [(one.tokens, one.computing, f"{one.tokens:,.0f} tokens: {1e3 * one.computing:.3g} ms") for one in some]
    moving = [(one.tokens, one.moving, "") for one in some]
    low, high = found.low, found.high
    ends = [(low, "5 4", "l2", f"hides from {low.tokens:,.0f} tokens on"),
            (high, "2 3", "l3", f"fits up to {high.tokens:,.0f} tokens")]  # fmt: skip
    phase = PHASES[low.name]
    lines = [curve(phase.computing, "l0", computing, x, y), curve(phase.moving, "l1", moving, x, y)]
    for edge, dashes, paint, label in ends:
        lines.append(curve(label, paint, [(edge.tokens, place, "") for place in (y.low, y.high)], x, y, dashes))
    if found.open:
        left_end, right_end = x.place(low.tokens), x.place(high.tokens)
        corners = [(left_end, 0.0), (right_end, 0.0), (right_end, 100.0), (left_end, 100.0)]
        lines[2] = lines[2]._replace(band=joined(corners))
    left = [Mark(0.0, f"{1e3 * n:,.10g} ms", round(100 - y.place(n), 2)) for n in y.marks(5)]
    bottom = [Mark(round(x.place(n), 2), _round(n)) for n in x.marks(4)]
    state = "open" if found.open else "empty"
    return Chart(f"{found.device.name}: the window is {state}", "tokens per weight pass", left, bottom, lines)


def crossover(curves: dict[str, Sequence[Crossing]], flush: str) -> Chart:
    """What a pipeline without a flush gains, and what the delays of each method cost."""
    some = next(iter(curves.values()))
    highest = max(3.0, max(one.gain for one in some) * 1.3)
    x = Scale(1.0, float(max(one.stages for one in some)), logarithmic=True)
    y = Scale(1.0, highest, logarithmic=True)
    gain = [
        (float(one.stages), one.gain, f"{one.stages} stages: {flush} takes {one.gain:.2f} times as long")
        for one in some
    ]
    lines = [curve(f"no flush gains over {flush}", "l0", gain, x, y)]
    for n, (name, each) in enumerate(curves.items()):
        start = first(each)
        where = f"wins from {start} stages" if start else "never wins"
        slow = [(float(one.stages), one.slow, f"{name} at {one.stages} stages: {one.slow:.2f} times the updates")
                for one in each if one.slow <= highest]  # fmt: skip
        if math.isfinite(each[0].slow) and slow:
            lines.append(curve(f"{name} ({where})", f"l{1 + n % (len(LINES) - 1)}", slow, x, y))
    left = [Mark(0.0, f"{n:g} ×", round(100 - y.place(n), 2)) for n in y.marks(5)]
    bottom = [Mark(round(x.place(n), 2), f"{n:g}") for n in (1, 2, 4, 8, 16, 32, 64, 128) if x.holds(n)]
    return Chart("gain of never flushing, and price of delays", "stages", left, bottom, lines)
