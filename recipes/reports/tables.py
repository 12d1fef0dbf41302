"""Tables: the tables of a report: held-out values, at equal delay, time to target, cost, differing options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from pipeback.recipes.reports import options
from pipeback.recipes.reports.metric import spread
from pipeback.recipes.reports.runs import SAMPLES, SECONDS, STEPS, Method
from pipeback.recipes.reports.sheet import Column, Numbers, Sheet, sheet
from pipeback.recipes.reports.target import Target


def tables(methods: Sequence[Method], goal: Target | None) -> list[Sheet]:
    """Return the tables: methods at their own delays, at equal delay if there are such runs, time to target, cost."""
    over = _over(methods)
    own = [m for m in methods if not m.equal_slack]
    shown = columns(methods)
    found = [sheet("methods", "Every method at its own delay", own or methods, shown, _notes(methods) + over)]
    if own and len(own) < len(methods):
        equal = [m for m in methods if m.equal_delay or m.base == "sgd"]
        text = "Every method but sgd runs at slack 2, that is, at the delay of pb; sgd is the reference." + over
        found.append(sheet("equal_delay", "At equal delay", equal, shown, text))
    if goal is not None:
        found.append(time_to_target(methods, goal))
    return [*found, cost(methods)]


def columns(methods: Sequence[Method]) -> list[Column]:
    metric, last = methods[0].metric, max(int(m.facts.get("epochs") or 0) for m in methods)
    unit = "\n" if not metric.unit else f"{metric.unit}\n"
    shown = [e for e in epochs(last) if any(m.after(e) for m in methods)]

    def held_out(m: Method, values: Numbers, ends: bool) -> str:
        if ends and all(m.diverged):
            return "diverged"
        return spread(values(m), metric.form, metric.scale)

    found = [
        Column("update\nsize", lambda m: _fact(m, "update_size"), "g"),
        Column("D at\nstage 0", lambda m: [] if m.delay is None else [m.delay], "g"),
    ]
    for epoch in shown:
        after = partial(Method.after, epoch=epoch)
        text = partial(held_out, values=after, ends=epoch == last)
        found.append(Column(f"{metric.name}{unit}epoch {epoch}", after, scale=metric.scale, text=text))
    if last not in shown or any(len(m.after(last)) < len(m.finals) for m in methods):
        text = partial(held_out, values=_finals, ends=True)
        found.append(Column(f"{metric.name}{unit}at the end", _finals, scale=metric.scale, text=text))
    loss = ".3f" if max(len(m.runs) for m in methods) == 1 else ".2f"
    if metric.column != "val/loss":
        found.append(Column("held-out\nloss", lambda m: m.losses, loss))
    found.append(Column("training\nloss", lambda m: _last(m, "train/loss"), loss))
    found.append(Column("gap at\nthe end", _gaps, ".2g"))
    if any(any(m.diverged) for m in methods):
        found.append(Column("runs\ndiverged", lambda m: [float(d) for d in m.diverged], text=_diverged))
    return found


def epochs(last: int) -> list[int]:
    """Return the epochs that have a column: all of a few, else the first, the middle and the last."""
    return list(range(1, last + 1)) if last <= 4 else [1, (last + 1) // 2, last]


def _fact(method: Method, name: str) -> list[float]:
    value = method.facts.get(name)
    return [] if value is None else [float(value)]


def _last(method: Method, column: str) -> list[float]:
    """Return the last value of a column, one per run that did not diverge and has it."""
    found = [run.last(column) for run, bad in zip(method.runs, method.diverged, strict=True) if not bad]
    return [value for value in found if value is not None]


def _gaps(method: Method) -> list[float]:
    """Return the last gap, as the mean over stages, one per run that did not diverge and was monitored."""
    found = []
    for run, bad in zip(method.runs, method.diverged, strict=True):
        lasts = [run.last(name) for name in run.columns if name.startswith("pipeback/gap/stage_")]
        gaps = [gap for gap in lasts if gap is not None]
        if gaps and not bad:
            found.append(sum(gaps) / len(gaps))
    return found


def _finals(method: Method) -> list[float]:
    return method.finals


def _diverged(method: Method) -> str:
    return f"{sum(method.diverged)} of {len(method.runs)}"


def _over(methods: Sequence[Method]) -> str:
    seeds = sorted({len(m.runs) for m in methods})
    if seeds[-1] == 1:
        return ""
    return f" Mean ± standard deviation over {seeds[-1] if len(seeds) == 1 else f'{seeds[0]} to {seeds[-1]}'} seeds."


def _notes(methods: Sequence[Method]) -> str:
    stages = {m.facts["stages"] for m in methods if m.facts.get("stages")}
    found = (
        f"{methods[0].metric.title} and loss are those on held-out data. "
        f"Training loss is the one that was logged last. The gap is the distance between the newest weights and those "
        f"that the forward used, the mean over stages of the last probe. "
        f"The update size is in samples. D is the number of updates between forward and gradient, at the first"
        f"{f' of {min(stages)} stages' if len(stages) == 1 else ' stage'}. "
    )
    return found.strip()


def time_to_target(methods: Sequence[Method], goal: Target) -> Sheet:
    metric = methods[0].metric
    shown = [
        Column(
            "runs that\nreach it", lambda m: [float(s is not None) for s in m.first(goal.value)], text=_reached(goal)
        ),
        Column("samples", lambda m: m.until(goal.value, SAMPLES), ",.0f"),
        Column("steps", lambda m: m.until(goal.value, STEPS), ",.0f"),
        Column("seconds", lambda m: m.until(goal.value, SECONDS), ".1f"),
    ]
    why = f" ({goal.why})" if goal.why else ""
    notes = (f"The target is a {metric.held_out} of {metric.text(goal.value)}{why}. The numbers are those of the "
             f"first measurement at or past it, over the runs that reach it. Seconds are those of training, without "
             f"validation.")  # fmt: skip
    return sheet("target", f"Time to {metric.text(goal.value)}", methods, shown, notes + _over(methods), dagger=False)


def cost(methods: Sequence[Method]) -> Sheet:
    shown = [
        Column("samples/s", lambda m: m.rates, ",.0f"),
        Column("utilisation\n%", lambda m: m.number("pipeback/utilisation"), ".0f", 100),
        Column("weight\ncopies", lambda m: m.number("pipeback/weight_copies")[:1]),
        Column("method\nstate", lambda m: m.number("pipeback/state_copies")[:1]),
        Column("activations\nMB", lambda m: m.number("pipeback/activation_mb")[:1]),
        Column("bubble\n%", lambda m: _fact(m, "bubble"), ".1f", 100),
    ]
    micro = next((m.facts["bubble_micro_batches"] for m in methods if m.facts.get("bubble_micro_batches")), None)
    notes = ("Samples/s are those of training, as it was run; utilisation is the share of that time spent in forwards, "
             "backwards and updates. Both compare methods on one machine, not schedules.")  # fmt: skip
    if any(m.number("pipeback/weight_copies") for m in methods):
        notes += (" Weight copies are live weights, kept versions and scratch, at the peak; method state is counted "
                  "apart, in copies of the weights. Activations are those in flight, at the peak.")  # fmt: skip
    else:
        notes += " Utilisation, copies of the weights and activations were not logged (callback PipelineMonitor)."
    if micro:
        notes += (f" The bubble is the idle share of the schedule over {micro:,} micro-batches, with one worker per "
                  f"stage, and forwards and backwards of equal length.")  # fmt: skip
    return sheet("cost", "Throughput and memory", methods, shown, notes + _over(methods), dagger=False)


def _reached(goal: Target) -> Callable[[Method], str]:
    return lambda m: f"{sum(step is not None for step in m.first(goal.value))} of {len(m.runs)}"


def differences(methods: Sequence[Method]) -> Sheet | None:
    """Return the options in which methods differ; None for one method, or if there is no difference."""
    head, rows = options.table({m.label: m.runs for m in methods})
    if len(methods) < 2 or len(head) < 2:
        return None
    scaled = any(name.startswith("optimizer.") for name in head)
    notes = "Rate and momentum are those that the optimizer got, scaled to the update size. " if scaled else ""
    notes += "Options that are not shown are the same for all."
    return Sheet("options", "Options that differ", head, rows, [list(head), *map(list, rows)], notes)
