"""The census of `pipeback zoo --others`: one line per model, and how many train exactly.

Each model is cut into blocks and trained by method=sgd beside a plain loop, on the same micro-batches. A model is

    ok        if the largest difference of a loss, a weight or a buffer is 0
    cured     if it was refused with options to type in the message, and is ok with these
    failed    if it was refused without a cure that works, or crashed, or gave another number

The table also says whether plain pb trains the model (it may refuse a model that computes tensors from weights alone),
and how long cutting takes: the CPU time of `split_model`, divided by that of one forward-and-backward pass of the model
on the same micro-batch.
"""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from rich import box
from rich.markup import escape
from rich.table import Table

from pipeback import Splitting, StageError
from pipeback.counts import counted
from pipeback.recipes.foreign.case import Case
from pipeback.recipes.foreign.others import package

# the option stages= in a message, in its short or its long form
TYPED = re.compile(
    r"\bstages=(pipeback\.Splitting\((?:\d+, )?leaves=\[(?!\.)[^\]]*\]\)|\[[^\]]*\]|\"[^\"]*\"|'[^']*'|\d+)"
)
REFUSALS = ValueError, TypeError, StageError  # the last one where a later micro-batch is refused
TRIES = 4  # how many cures are tried, one after the other

# a model, method and options of Pipeline -> its stages, the rung of its split, and the largest difference
Trained = Callable[[Case, str, dict[str, Any]], tuple[int, str, float]]
# a model and options -> how many of its forward-and-backward passes cutting takes
Passes = Callable[[Case, dict[str, Any]], float]


class Line(NamedTuple):
    """A model of the census. difference: the largest of a loss or a weight between sgd and a plain loop."""

    model: str
    verdict: str  # ok, cured or failed
    rung: str = ""
    stages: int = 0
    difference: float = math.nan
    pb: str = ""  # "trains", "function of weights", or the name of an error
    said: str = ""  # the message of the refusal or the failure
    cutting: float = math.nan  # the time of cutting, in forward-and-backward passes


def line(name: str, build: Callable[[str], Case], train: Trained, passes: Passes) -> Line:
    """Cut and train a model; if it is refused, try again with the options in the message."""
    splitting = Splitting("block")
    said, bare = "", False
    try:
        case = build(name)
    except Exception as error:
        return Line(name, "failed", said=f"{type(error).__name__}: {error}")
    for _ in range(TRIES):
        try:
            cutting = passes(case, {"stages": splitting})
            stages, rung, difference = train(case, "sgd", {"stages": splitting})
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            cured = cure(str(error), splitting) if isinstance(error, REFUSALS) else splitting
            if "use_cache=False" in str(error) and not bare:
                case, bare = case._replace(batch=partial(_bare, case.batch)), True
                continue
            if cured == splitting:
                return Line(name, "failed", said=said)
            splitting = cured
            continue
        verdict = "failed" if difference != 0 else "cured" if said else "ok"
        return Line(name, verdict, rung, stages, difference, _pb(case, splitting, train), said, cutting)
    return Line(name, "failed", said=said)


def _bare(batch: Callable[[Any], tuple[Any, Any]], generator: Any) -> tuple[Any, Any]:
    """Return a micro-batch that asks for no key-value cache."""
    x, y = batch(generator)
    return {**x, "use_cache": False}, y


def cure(message: str, splitting: Splitting) -> Splitting:
    """Return the options with those in a message; its leaves are added to earlier ones."""
    for typed in TYPED.findall(message):
        found = Splitting(ast.literal_eval(typed)) if not typed.startswith("pipeback") else _long(typed)
        leaves = tuple(dict.fromkeys([*splitting.leaves, *found.leaves]))
        splitting = replace(found if found.stages != "auto" else splitting, leaves=leaves)
    return splitting


def _long(typed: str) -> Splitting:
    call = ast.parse(typed, mode="eval").body
    assert isinstance(call, ast.Call)
    named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg}
    return Splitting(*map(ast.literal_eval, call.args), **named)


def _pb(case: Case, splitting: Splitting, train: Trained) -> str:
    try:
        train(case, "pb", {"stages": splitting})
    except Exception as error:
        return "a function of weights" if "function of the weights" in str(error) else type(error).__name__
    return "trains"


def table(lines: Iterable[Line]) -> Table:
    """Return a table with one row per model."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head, side in (("model", "left"), ("from", "left"), ("rung", "left"), ("stages", "right"), ("cutting", "right"),
                       ("sgd − plain", "right"), ("pb", "left"), ("verdict", "left")):  # fmt: skip
        shown.add_column(head, justify=side)  # type: ignore[arg-type]
    for n in lines:
        rung = n.rung.removesuffix(", its forward traced")
        stages, cutting = str(n.stages or ""), "" if math.isnan(n.cutting) else f"{n.cutting:.1f}"
        values = (n.model, package(n.model), rung, stages, cutting, f"{n.difference:.1g}", n.pb, n.verdict)
        shown.add_row(*map(escape, values), style={"ok": None, "cured": "yellow", "failed": "red"}[n.verdict])
    return shown


def counts(lines: Iterable[Line]) -> str:
    """Return the number of models per verdict, in a sentence or two."""
    lines = list(lines)
    found, pb = Counter(n.verdict for n in lines), Counter(n.pb for n in lines if n.pb)
    single = sum(n.stages == 1 for n in lines)
    right = 100 * (found["ok"] + found["cured"]) / max(len(lines), 1)
    models = counted(len(lines), "model")
    return (
        f"{models}: {found['ok']} ok, {found['cured']} refused with a cure, {found['failed']} failed; "
        f"{right:.1f} % train exactly, {single} of them as one stage.\n"
        f"pb: {', '.join(f'{count} {what}' for what, count in pb.most_common())}.\n{cutting(lines)}"
    )


def cutting(lines: Iterable[Line]) -> str:
    """Say in a sentence how long cutting takes, at the median of each kind of model."""
    found: dict[str, list[float]] = {"vision": [], "transformers": []}
    for n in lines:
        if not math.isnan(n.cutting):
            found["transformers" if package(n.model) == "transformers" else "vision"].append(n.cutting)
    told = [
        f"{median(values):.1f} at the median of {len(values)} {kind} models (at most {max(values):.1f})"
        for kind, values in found.items()
        if values
    ]
    return f"Forward-and-backward passes that cutting takes: {', '.join(told) or 'nothing was cut'}."
