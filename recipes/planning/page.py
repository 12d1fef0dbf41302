"""Page: a plan as one self-contained page, as a report of runs is."""

from __future__ import annotations

from itertools import groupby

import jinja2
from matplotlib import pyplot as plt

import pipeback
from pipeback.planner.crossover import Crossing, crossings
from pipeback.planner.estimates import Estimate
from pipeback.planner.explain import explain
from pipeback.planner.found import DAGGER, HEAD, WORDS, Found, Point
from pipeback.planner.quantities import days, gigabytes, large
from pipeback.planner.search import Question
from pipeback.planner.techniques import technique
from pipeback.planner.windows import lines
from pipeback.recipes.planning import charts
from pipeback.recipes.planning.listing import two_lines
from pipeback.recipes.planning.pictures import piped, timelines, windows
from pipeback.recipes.provenance import command, provenance
from pipeback.recipes.report import template
from pipeback.recipes.reports.figures import NIGHT, PHONE, png
from pipeback.recipes.reports.style import ON_DARK, STYLE

PHASES_TOLD = {
    "forward": "From here on, computing a layer's forward takes longer than bringing the weights of the next one.",
    "backward": "From here on, its backward takes longer than its gradients take to leave, while weights come in.",
    "optimizer": "From here on, both take longer than the layer's optimizer step in host memory, beside them.",
    "memory": "Up to here, the activations that wait for their backward fit on the device, beside the layers in it.",
}
FLUSH = "one_f_one_b"  # with which pipelines that are never drained are compared


def page(found: Found, asking: Question) -> str:
    """The page."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, loader=jinja2.FunctionLoader(template)
    )
    seen, crossed, points = windows(found), crossing(found), found.frontier()
    return environment.get_template("plan.html.jinja").render(
        title=f"{found.job.model.name} on {found.job.cluster}", lead=found.title, glance=glance(found.best),
        head=[(two_lines(HEAD[n]), n in WORDS) for n in found.columns()], notes=found.notes,
        rows=[[(row[n], n in WORDS) for n in found.columns()] for row in found.rows()],
        memory=charts.memory(found), shares=charts.shares(found), images=images(found),
        frontier=charts.frontier(points, asking.price), phases=PHASES_TOLD,
        frontier_head=frontier_head(asking.price), frontier_rows=[frontier_row(one, asking.price) for one in points],
        windows=[charts.window(one, lines(one)) for one in seen], edges=list(map(str, seen)),
        crossover=charts.crossover(*crossed[:2]) if crossed else None, crossover_note=crossed[2] if crossed else "",
        explained={part: list(some) for part, some in groupby(explain(found.best), key=lambda line: line.part)},
        scheme=charts.scheme(), made=made(found),
    )  # fmt: skip


def glance(best: Estimate) -> dict[str, str]:
    """The best option in six numbers."""
    job = best.job
    cost = f" ({best.cost:,.0f} at {job.price:g} per hour)" if job.price else ""
    return {
        "best option": charts.told(best),
        "to the target": days(86_400 * best.days),
        "device-days": f"{best.device_days:,.0f}{cost}",
        "MFU": f"{best.mfu:.1%}",
        "fullest device": f"{gigabytes(best.footprint.fullest.total)} of {gigabytes(job.cluster.device.memory)} GB",
        "what binds": best.binds,
    }


def frontier_head(price: float) -> list[str]:
    return ["devices", "to the target", "device-days", *(["price"] if price else []), "best option", "binds"]


def frontier_row(point: Point, price: float) -> list[str]:
    """A number of devices below `frontier_head`."""
    one = point.best
    cost = [f"{one.cost:,.0f}"] if price else []
    return [
        f"{point.devices:,}{DAGGER if one.marks else ''}",
        days(86_400 * one.days),
        f"{one.device_days:,.0f}",
        *cost,
        charts.told(one),
        one.binds,
    ]


def images(found: Found) -> list[tuple[str, str]]:
    """The timelines, for a telephone and for a dark page, too."""
    some = piped(found)
    if not some:
        return []
    with plt.rc_context({**STYLE, **ON_DARK}):
        dark = [(f"{NIGHT} and {PHONE}", png(timelines(some, True))), (NIGHT, png(timelines(some)))]
    with plt.rc_context(STYLE):
        return [*dark, (PHONE, png(timelines(some, True))), ("", png(timelines(some)))]


def crossing(found: Found) -> tuple[dict[str, list[Crossing]], str, str] | None:
    """Gain and price over stages, at the flush of the best option that has one."""
    flush = next((one for one in found if one.option.pipeline > 1 and not one.option.technique.flows), None)
    flowing = list(dict.fromkeys(one.option.technique for one in found if one.option.technique.flows))[:4]
    if flush is None or not flowing:
        return None
    m, optimizer = flush.option.micro_batches, found.job.optimizer
    curves = {one.name: crossings(technique(FLUSH), one, m, found.job.loss, optimizer=optimizer) for one in flowing}
    note = f"Flushes have {m} micro-batches, and backwards take twice as long as forwards."
    return curves, f"{FLUSH} of {m} micro-batches", note


def made(found: Found) -> dict[str, str]:
    """What the page was made with."""
    facts = provenance()
    used = dict.fromkeys(one.job.costs(one.option).constants for one in found)
    return {
        "command": command(), "date": str(facts["date"]), "pipeback": pipeback.__version__,
        "model": f"{found.job.model.name}, {large(found.job.model.parameters)} parameters: {found.job.model.source}",
        "device": f"{found.job.cluster.device.title}: {found.job.cluster.device.source}",
        "constants": "; ".join(f"{one.name}: fitted on {one.fitted_on}; valid for {one.valid}" for one in used),
    }  # fmt: skip
