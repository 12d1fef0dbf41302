"""Summary: a comparison in a few sentences: what was run, which methods were best, which failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipeback.counts import counted
from pipeback.recipes.reports.metric import mean_and_deviation, spread
from pipeback.recipes.reports.runs import SAMPLES, SECONDS, Method
from pipeback.recipes.reports.target import Target


def lead(methods: Sequence[Method]) -> str:
    """Return the sizes of the comparison: "20 stages, 1,438 training samples, 3 epochs, 3 seeds"."""
    parts = [counted(len(methods), "method")]
    for name, one in (("stages", "stage"), ("epoch_samples", "training sample"), ("epochs", "epoch")):
        values = sorted({m.facts[name] for m in methods if (m.facts.get(name) or 0) > 0})
        if len(values) == 1:
            parts.append(counted(values[0], one))
        elif values:
            parts.append(f"{values[0]:,} to {counted(values[-1], one)}")
    seeds = sorted({len(m.runs) for m in methods})
    parts.append(counted(seeds[-1], "seed") if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds")
    return ", ".join(parts)


def glance(methods: Sequence[Method], goal: Target | None) -> dict[str, str]:
    """Return the main results: name -> sentence."""
    metric, found = methods[0].metric, {}
    finished = [m for m in methods if m.finals and not m.fate]
    if finished and len(methods) > 1:
        best = min(finished, key=lambda m: metric.ahead(mean_and_deviation(m.finals)[0]))
        found[f"Best {metric.name} at the end"] = f"{best.label}, {told(best)}"
    elif finished:
        found[f"{metric.title} at the end"] = told(finished[0])
    if goal is not None:
        sure = [m for m in methods if all(step is not None for step in m.first(goal.value))]
        axes: list[tuple[str, str, Callable[[float], str]]] = [
            (SAMPLES, "Fewest samples", lambda n: f"{n:,.0f} samples"),
            (SECONDS, "Least time", lambda n: f"{n:,.3g} s"),
        ]
        for axis, name, write in axes:
            reached = {m.label: mean_and_deviation(n)[0] for m in sure if (n := m.until(goal.value, axis))}
            if reached and len(methods) > 1:
                first = min(reached, key=lambda label: reached[label])
                found[f"{name} to {metric.text(goal.value)}"] = f"{first}, {write(reached[first])}"
            elif reached:
                found[f"{name.split()[1].capitalize()} to {metric.text(goal.value)}"] = write(*reached.values())
    found["Diverged"] = divergence(methods)
    if unstable := [m.label for m in methods if m.unstable and not all(m.diverged)]:
        found["Loss above that of guessing"] = ", ".join(unstable)
    return found


def told(method: Method) -> str:
    metric = method.metric
    return spread(method.finals, metric.form, metric.scale) + metric.unit


def divergence(methods: Sequence[Method]) -> str:
    """Say how many runs stopped with a loss that is not finite, and of which methods."""
    runs, failed = sum(len(m.runs) for m in methods), [m for m in methods if any(m.diverged)]
    parts = [f"{m.label} {sum(m.diverged)} of {len(m.runs)}" for m in failed]
    total = sum(sum(m.diverged) for m in failed)
    return f"{total} of {counted(runs, 'run')} ({', '.join(parts)})" if failed else f"none of {counted(runs, 'run')}"


def unfinished(methods: Sequence[Method]) -> list[str]:
    """Return notes on runs that ended early without diverging, whose last values are not comparable."""
    ends = [(run.last(SAMPLES) or 0.0, m, run) for m in methods for run in m.runs]
    most = max(samples for samples, _, _ in ends)
    stopped = {id(run) for m in methods for run, diverged in zip(m.runs, m.diverged, strict=True) if diverged}
    early = [(samples, m) for samples, m, run in ends if 0 < samples < 0.99 * most and id(run) not in stopped]
    return [f"a run of {m.label} ended after {samples:,.0f} of {most:,.0f} samples" for samples, m in early]
