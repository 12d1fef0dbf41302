"""Charts: curves for the page, whose lines take its colours and whose points tell their numbers to the mouse.

Places are in percent of a chart's width and of its height from the top, so that it is as wide as there is room, while
letters keep their size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeback.recipes.reports.histories import History
from pipeback.recipes.reports.runs import REFERENCES, SAMPLES, SECONDS, STEPS, Curve, Method
from pipeback.recipes.reports.scales import Scale, of_curves
from pipeback.recipes.reports.style import Paint

AXES = {SAMPLES: "samples seen", STEPS: "steps (batches)", SECONDS: "training time, seconds"}
POINTS = 60  # the most points of a line that tell their numbers


class Mark(NamedTuple):
    """A place on an axis, or a point if y is given, and its text."""

    x: float
    text: str
    y: float = 0.0


class Line(NamedTuple):
    """A method's curve. paint: its class on the page. places: "x,y x,y", the line and the band of its seeds."""

    label: str
    paint: str
    thin: bool
    dashes: str
    places: str
    band: str
    points: list[Mark]


class Chart(NamedTuple):
    """A panel. missing: why it is empty. notes: which methods are not on it, and why."""

    title: str
    below: str = ""
    left: Sequence[Mark] = ()
    bottom: Sequence[Mark] = ()
    lines: Sequence[Line] = ()
    notes: Sequence[str] = ()
    missing: str = ""


class Group(NamedTuple):
    """The panels of some methods, side by side. keys: (label, class, dashes) of each line, for their legend."""

    title: str
    keys: list[tuple[str, str, str]]
    charts: list[Chart]


def groups(methods: Sequence[Method], found: Sequence[History], axis: str, paint: Paint) -> list[Group]:
    """Return a group per panel of methods; the axes of one history have the same range in all of them."""
    curves = [{m.label: history.curve(m, axis) for m in methods} for history in found]
    last = max((curve.x[-1] for each in curves for curve in each.values() if curve.x), default=1.0)
    across = Scale(0.0, last or 1.0)
    shown = []
    for title, panel in paint.shown.items():
        charts = [chart(panel, h, mine, axis, across, methods, paint) for h, mine in zip(found, curves, strict=True)]
        keys = [(f"{m.label} ({m.fate})" if m.fate else m.label, paint.name(m), paint.dashes(m)) for m in panel]
        shown.append(Group(title, keys, charts))
    return shown


def chart(
    panel: Sequence[Method], history: History, curves: dict[str, Curve], axis: str, across: Scale,
    methods: Sequence[Method], paint: Paint,
) -> Chart:  # fmt: skip
    if history.missing:
        return Chart(history.title, missing=history.missing)
    zero = {label for label, curve in curves.items() if curve.x and not any(map(any, curve.values)) and history.name}
    kept = [m for m in methods if curves[m.label].x and m.label not in zero]
    seen = [m for m in kept if not m.fate] or kept
    up = of_curves([curves[m.label].mean for m in seen], history.share, history.whole)
    notes = [f"{words}: {', '.join(some)}" for words, some in (
        ("zero throughout", [m.label for m in panel if m.label in zero]),
        ("not logged", [m.label for m in panel if not curves[m.label].x]),
    ) if some]  # fmt: skip
    if up is None:
        return Chart(history.title, missing="; ".join(notes))
    lines = [line(m, curves[m.label], history, axis, across, up, paint) for m in panel if m in kept]
    left = [Mark(0.0, written(n, history.share), round(100 - up.place(n), 2)) for n in up.marks(5)]
    bottom = [Mark(round(across.place(n), 2), f"{n:,.10g}") for n in across.marks(4)]
    return Chart(history.title, AXES[axis], left, bottom, lines, notes)


def written(value: float, share: bool) -> str:
    return f"{100 * value:.6g} %" if share else f"{value:,.6g}"


def line(method: Method, curve: Curve, history: History, axis: str, across: Scale, up: Scale, paint: Paint) -> Line:
    places = [(across.place(x), 100 - up.place(y)) for x, y in zip(curve.x, curve.mean, strict=True)]
    ends = [[100 - up.place(end(values)) for values in curve.values] for end in (min, max)]
    xs = [x for x, _ in places]
    several = not method.fate and any(len(values) > 1 for values in curve.values)
    band = [*zip(xs, ends[0], strict=True), *reversed(list(zip(xs, ends[1], strict=True)))] if several else []
    step = -(-len(places) // POINTS)
    told = [
        Mark(*rounded(place[0], place[1], told_by(method, x, values, mean, history, axis)))
        for n, (place, x, values, mean) in enumerate(zip(places, curve.x, curve.values, curve.mean, strict=True))
        if (n % step == 0 or n == len(places) - 1) and up.holds(mean)
    ]
    return Line(
        method.label, paint.name(method), method.base in REFERENCES, paint.dashes(method), joined(places), joined(band),
        told,
    )  # fmt: skip


def rounded(x: float, y: float, text: str) -> tuple[float, str, float]:
    return round(x, 2), text, round(y, 2)


def joined(places: Sequence[tuple[float, float]]) -> str:
    """Return the places as points of a polyline, no farther out than a browser can draw."""
    return " ".join(f"{x:.2f},{min(1e4, max(-1e4, y)):.2f}" for x, y in places)


def told_by(method: Method, x: float, values: Sequence[float], mean: float, history: History, axis: str) -> str:
    """Return what a point tells: "pb at 1,438 samples: held-out accuracy 91.5 % (90.7 % to 92.3 % over 3 seeds)"."""
    where = {SAMPLES: f"{x:,.0f} samples", STEPS: f"step {x:,.0f}", SECONDS: f"{x:,.3g} s"}[axis]
    over = f" ({history.text(min(values))} to {history.text(max(values))} over {len(values)} seeds)"
    return f"{method.label} at {where}: {history.label} {history.text(mean)}{over if len(values) > 1 else ''}"
