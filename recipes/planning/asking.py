"""Asks the planner: reads a model, devices and what is fixed from words, prints the ranked options, writes files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeback.planner.candidates import Fixed
from pipeback.planner.constants import constants
from pipeback.planner.found import Found
from pipeback.planner.hardware import Cluster, devices
from pipeback.planner.loss import CRITICAL, Loss
from pipeback.planner.quantities import cost, count, duration, whole
from pipeback.planner.search import Question, question, within
from pipeback.recipes.output_files import writable
from pipeback.recipes.planning.listing import listed

SEVERAL = ("stages", "replicas", "tensor", "micro_batch")  # whole numbers
OPTIONS = (
    "devices", "device", "link", "host", "tokens", "in", "method", *SEVERAL, "recompute", "store", "batch",
    "critical_batch", "optimizer", "precision", "price", "calibrate", "constants", "out", "json", "explain", "top",
)  # fmt: skip
PAGES, PICTURES = (".html",), (".png", ".svg", ".pdf")


@dataclass
class Words:
    """What was typed."""

    model: str
    values: dict[str, str] = field(default_factory=dict)

    def numbers(self, name: str) -> tuple[int, ...]:
        text = self.values.get(name, "auto")
        return () if text == "auto" else tuple(whole(name, part) for part in text.split(","))

    def texts(self, name: str) -> tuple[str, ...]:
        return tuple(part.strip() for part in self.values[name].split(",")) if name in self.values else ()


def main(words: list[str], console: Console) -> None:
    """Print, and write what is asked for. Raises ValueError for a mistake."""
    typed = read(words)
    asking, cluster = asked(typed)
    files = written_to(typed)
    found = answered(asking, cluster, typed)
    top = whole("top", typed.values.get("top", 20))
    if "explain" in typed.values:
        number = whole("explain", typed.values["explain"])
        if number > len(found):
            raise ValueError(f"explain={number}, but there are {len(found)} options; give explain={len(found)} or less")
        one = found[number - 1]
        console.print(f"option {number} of {found.title}: {one.title}", style="bold", markup=False)
        console.print(one.explain(), highlight=False, markup=False, soft_wrap=True)
    else:
        listed(found, console, top)
    for file in files:
        write(file, found, asking, console)


def read(words: Iterable[str]) -> Words:
    """The model and the options. `--name value` and `--name=value` are options, too."""
    found, rest = Words(""), list(words)
    while rest:
        word = rest.pop(0)
        if word.startswith("--"):
            name, given, value = word[2:].partition("=")
            if not given:
                if not rest:
                    raise ValueError(f"{word} needs a value; write {word}=...")
                value = rest.pop(0)
            word = f"{name.replace('-', '_')}={value}"
        name, given, value = word.partition("=")
        if not given or ":" in name:
            if found.model:
                raise ValueError(f"two models, {found.model} and {word}; plan one at a time")
            found.model = word
            continue
        if name not in OPTIONS:
            near = get_close_matches(name, OPTIONS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{word!r} is not an option{hint}; beside a model there are {', '.join(OPTIONS)}")
        found.values[name] = value
    return found


def asked(typed: Words) -> tuple[Question, Cluster]:
    """The question, and the devices that it is about."""
    values = typed.values
    where = values.get("devices") or values.get("device")
    if not where:
        raise ValueError(f"{typed.model}: on which devices? Add for example devices=64xA100")
    fixed = Fixed(
        stages=typed.numbers("stages"), replicas=typed.numbers("replicas"), tensor=typed.numbers("tensor"),
        micro_batch=typed.numbers("micro_batch"), stores=typed.texts("store") or ("device",),
        recompute=typed.texts("recompute"), batch=int(count("batch", values["batch"])) if "batch" in values else 0,
    )  # fmt: skip
    critical = count("critical_batch", values.get("critical_batch", CRITICAL))
    asking = question(
        typed.model, tokens=values.get("tokens"), methods=values.get("method", "all"),
        optimizer=values.get("optimizer", "adamw"), numbers=values.get("precision", "mixed"),
        target=loss(critical, values.get("calibrate")), fixed=fixed,
        using=constants(values["constants"]) if "constants" in values else None,
        price=cost("price", values.get("price", 0.0)),
    )  # fmt: skip
    return asking, devices(where, link=values.get("link"), host=values.get("host"))


def loss(critical: float, file: str | None) -> Loss:
    """The prices of batches and delays. file: one that `pipeback plan calibrate` wrote."""
    if file is None:
        return Loss(critical)
    try:
        slow = json.loads(Path(file).expanduser().read_text("utf-8"))["slow"]
        return Loss(critical, {str(name): float(kappa) for name, kappa in slow.items()}, calibrated=file)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"calibrate={file} is no file of `pipeback plan calibrate` ({error})") from error


def answered(asking: Question, cluster: Cluster, typed: Words) -> Found:
    if "in" in typed.values:
        return within(asking, cluster.device, duration("in", typed.values["in"]))
    return asking.answer(cluster)


def written_to(typed: Words) -> list[Path]:
    """The files that are asked for. Raises ValueError if one cannot be, before anything is computed."""
    files = []
    for option, known in (("out", (*PAGES, *PICTURES)), ("json", (".json",))):
        for file in (Path(name).expanduser() for name in typed.texts(option)):
            if file.suffix.lower() not in known:
                raise ValueError(f"{option}={file} must end in one of {', '.join(known)}")
            writable(option, file)
            files.append(file)
    if "out" in typed.values:
        import matplotlib  # noqa: F401  # which is missed before anything is computed
    return files


def write(file: Path, found: Found, asking: Question, console: Console) -> None:
    """Write a page, a picture or the data."""
    if file.suffix.lower() == ".json":
        content: dict[str, Any] = found.as_json()
        file.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
    elif file.suffix.lower() in PAGES:
        from pipeback.recipes.planning.page import page

        file.write_text(page(found, asking), encoding="utf-8")
    else:
        from pipeback.recipes.planning.pictures import whole as picture

        picture(found, asking).savefig(file)
    console.print(f"written: {file}", highlight=False, markup=False, soft_wrap=True)
