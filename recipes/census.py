"""The census of `pipeback zoo --others`: one line per model, and how many train exactly.

Each model is cut into blocks and trained by method=sgd beside a plain loop, on the same micro-batches. A model is

    ok        the largest difference of a loss, a weight or a buffer is 0
    cured     it was refused, the message named options as they are typed, and with these it is ok
    failed    it was refused without a cure that works, or crashed, or another number came out

Whether plain pb trains it, too, is told beside: models that compute something from weights alone may be refused there.
"""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from rich import box
from rich.markup import escape
from rich.table import Table

from pipeback.recipes.foreign.case import Case
from pipeback.recipes.foreign.others import package

TYPED = re.compile(r"\b(leaves|stages)=(\[[^\]]*\]|\"[^\"]*\"|'[^']*'|\d+)")  # an option in a message, as it is typed
TRIES = 4  # messages that are followed, one after the other

# a model, method and options of Pipeline -> its stages, the rung of its split, and the largest difference
Trained = Callable[[Case, str, dict[str, Any]], tuple[int, str, float]]


class Line(NamedTuple):
    """A model of the census. difference: the largest of a loss or a weight between sgd and a plain loop."""

    model: str
    verdict: str  # ok, cured or failed
    rung: str = ""
    stages: int = 0
    difference: float = math.nan
    pb: str = ""  # "trains", "a function of weights", or the name of another error
    said: str = ""  # what it was refused with, or failed with


def line(name: str, build: Callable[[str], Case], train: Trained) -> Line:
    """Train a model; where it is refused, do what the message says, and train it again."""
    options: dict[str, Any] = {"stages": "block"}
    said, bare = "", False
    try:
        case = build(name)
    except Exception as error:
        return Line(name, "failed", said=f"{type(error).__name__}: {error}")
    for _ in range(TRIES):
        try:
            stages, rung, difference = train(case, "sgd", options)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            cures = cure(str(error)) if isinstance(error, (ValueError, TypeError)) else {}
            if "use_cache=False" in str(error) and not bare:
                case, bare = case._replace(batch=partial(_bare, case.batch)), True
                continue
            if not cures or all(_held(options, key, value) for key, value in cures.items()):
                return Line(name, "failed", said=said)
            options = joined(options, cures)
            continue
        verdict = "failed" if difference != 0 else "cured" if said else "ok"
        return Line(name, verdict, rung, stages, difference, _pb(case, options, train), said)
    return Line(name, "failed", said=said)


def _bare(batch: Callable[[Any], tuple[Any, Any]], generator: Any) -> tuple[Any, Any]:
    """Micro-batches that ask for no key-value cache."""
    x, y = batch(generator)
    return {**x, "use_cache": False}, y


def cure(message: str) -> dict[str, Any]:
    """The options that a message names as they are typed."""
    return {key: ast.literal_eval(value) for key, value in TYPED.findall(message)}


def joined(options: dict[str, Any], cures: dict[str, Any]) -> dict[str, Any]:
    """With the options of a message; leaves are added to those that are there."""
    found = {**options, **cures}
    if "leaves" in cures:
        found["leaves"] = [*options.get("leaves", []), *cures["leaves"]]
    return found


def _held(options: dict[str, Any], key: str, value: Any) -> bool:
    return set(value) <= set(options.get(key, ())) if key == "leaves" else options.get(key) == value


def _pb(case: Case, options: dict[str, Any], train: Trained) -> str:
    try:
        train(case, "pb", options)
    except Exception as error:
        return "a function of weights" if "function of the weights" in str(error) else type(error).__name__
    return "trains"


def table(lines: Iterable[Line]) -> Table:
    """A row per model."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head, side in (("model", "left"), ("from", "left"), ("rung", "left"), ("stages", "right"),
                       ("sgd − plain", "right"), ("pb", "left"), ("verdict", "left")):  # fmt: skip
        shown.add_column(head, justify=side)  # type: ignore[arg-type]
    for n in lines:
        rung = n.rung.removesuffix(", its forward followed")
        values = (n.model, package(n.model), rung, str(n.stages or ""), f"{n.difference:.1g}", n.pb, n.verdict)
        shown.add_row(*map(escape, values), style={"ok": None, "cured": "yellow", "failed": "red"}[n.verdict])
    return shown


def counts(lines: Iterable[Line]) -> str:
    """How many are what, in a sentence or two."""
    lines = list(lines)
    found, pb = Counter(n.verdict for n in lines), Counter(n.pb for n in lines if n.pb)
    single = sum(n.stages == 1 for n in lines)
    right = 100 * (found["ok"] + found["cured"]) / max(len(lines), 1)
    models = "1 model" if len(lines) == 1 else f"{len(lines)} models"
    return (
        f"{models}: {found['ok']} ok, {found['cured']} refused with a cure, {found['failed']} failed; "
        f"{right:.1f} % train exactly, {single} of them as one stage.\n"
        f"pb: {', '.join(f'{count} {what}' for what, count in pb.most_common())}."
    )
