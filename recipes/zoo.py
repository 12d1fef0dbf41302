"""Splits models of other packages and trains them by several methods; sgd must equal plain PyTorch.

    pipeback zoo                             # all models, 20 micro-batches
    pipeback zoo resnet18 gpt2 t5            # some models
    pipeback zoo micro_batches=50 lr=0.001   # more micro-batches, another rate
    pipeback zoo quick=true                  # four models, 6 micro-batches
    pipeback zoo --others                    # a census of 200 more: torchvision, timm, transformers (recipes/census.py)
    pipeback zoo --others resnet34 T5ForConditionalGeneration   # the census of some
    pipeback zoo --markdown                  # the table of docs/results/zoo.md

Each model (recipes/foreign/) is split with one stage per block and with one stage per layer, where that makes sense. A
plain loop and method=sgd train it on the same micro-batches: the largest difference of a loss or a weight must be 0.
pb, pipedream and cerebras train it too; their last loss must be finite. Weights are random and nothing is downloaded.
A model that fails is shown with its error, and the exit status is 1.
"""

from __future__ import annotations

import copy
import gc
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

import pipeback
from pipeback.recipes import census
from pipeback.recipes.foreign import OTHERS, WHERE, build
from pipeback.recipes.foreign.case import Case, called
from pipeback.recipes.markdown import table as in_markdown
from pipeback.recipes.provenance import command, heading, provenance
from pipeback.splitting.split import split_model

METHODS = ("pb", "pipedream", "cerebras")
TURNS = 5  # of cutting and of a pass, in the census
QUICK = ("resnet18", "seq2seq", "unet", "gpt2")
HEADS = ("model", "parameters", "rung", "one stage per", "stages", "sgd − plain", *METHODS)


class Row(NamedTuple):
    """A model at one granularity. difference: the largest of a loss or a weight between sgd and a plain loop."""

    model: str
    parameters: int
    rung: str
    cuts: str
    stages: int
    difference: float
    last: dict[str, float]  # loss of a method's last micro-batch
    error: str = ""

    @property
    def good(self) -> bool:
        return not self.error and self.difference == 0 and all(map(math.isfinite, self.last.values()))


def main() -> None:
    try:
        names, options = parsed(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"pipeback zoo: {error}")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".*takes its statistics from")  # micro-batches of few images are intended here
    console = Console(highlight=False, stderr=options["markdown"])
    if not console.is_terminal:
        console.width = 150
    if options["others"]:
        sys.exit(counted(names, options, console))
    found = []
    for name in names:
        with console.status(name):
            found += list(rows(name, options["micro_batches"], options["lr"]))
    if options["markdown"]:
        print(markdown(found))
    else:
        console.print(table(found))
    for row in found:
        if row.error:
            console.print(f"[red]{row.model}, one stage per {row.cuts}:[/red] {escape(row.error)}")
    sys.exit(0 if all(row.good for row in found) else 1)


def counted(names: Sequence[str], options: dict[str, Any], console: Console) -> int:
    """Run the census of these models; return the exit status."""
    warnings.filterwarnings("ignore")  # warnings of other packages about the unusual sizes
    train, lines = partial(trained, count=options["micro_batches"], lr=options["lr"]), []
    for n, name in enumerate(names, 1):
        with console.status(f"{n} of {len(names)}: {name}"):
            lines.append(census.line(name, build, train, passes))
    console.print(census.table(lines))
    for line in lines:
        if line.said:
            console.print(f"{line.model}, {line.verdict}: {escape(line.said)}")
    console.print(census.counts(lines))
    return int(any(line.verdict == "failed" for line in lines))


def trained(case: Case, method: str, options: dict[str, Any], count: int, lr: float) -> tuple[int, str, float]:
    """Train a model with these options; return its stages, its rung and the difference to the plain loop."""
    pipe, losses = piped(case, method, count=count, lr=lr, **options)
    if method != "sgd" and not all(map(math.isfinite, losses)):
        raise ArithmeticError(f"a loss of {method} is not finite")
    apart = difference((pipe.model, losses), plain(case, count, lr)) if method == "sgd" else math.nan
    return pipe.stages, pipe.split.rung, apart


def passes(case: Case, options: dict[str, Any]) -> float:
    """Return the CPU time of cutting a model, in forward-and-backward passes of it: of medians of turns.

    How long a single one of either takes depends on what is in the caches, and on other load.
    """
    model = copy.deepcopy(case.model)
    x, y = batches(case, 1)[0]
    splitting: pipeback.Splitting = options["stages"]
    cut = lambda: split_model(model, splitting.stages, x, splitting.leaves, splitting.balance)  # noqa: E731
    one = lambda: case.loss(called(model, x), y).backward()  # noqa: E731
    one()  # the overhead of the first call does not count
    turns = [(_took(cut), _took(one)) for _ in range(TURNS)]
    cutting, passing = (median(times) for times in zip(*turns, strict=True))
    return cutting / passing


def _took(do: Callable[[], Any]) -> float:
    """Return the CPU seconds of a call, without garbage collection."""
    collects = gc.isenabled()
    gc.disable()
    try:
        before = time.process_time()
        do()
        return time.process_time() - before
    finally:
        if collects:
            gc.enable()


def parsed(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the models (all of them if none is named) and the options."""
    if any(word in ("-h", "--help") for word in words):
        print(f"{__doc__}\nmodels: {', '.join(WHERE)}\nothers: {', '.join(OTHERS)}")
        sys.exit()
    quick = "quick=true" in words
    others = "--others" in words
    options: dict[str, Any] = {
        "micro_batches": 3 if others else 6 if quick else 20, "lr": 1e-4,
        "markdown": "--markdown" in words, "others": others,
    }  # fmt: skip
    names = []
    for word in words:
        name, given, value = word.removeprefix("--").partition("=")
        if name in (*WHERE, *OTHERS) and not given:
            names.append(name)
        elif name == "micro_batches" and value.isdecimal() and int(value):
            options[name] = int(value)
        elif name == "lr" and value.replace(".", "", 1).replace("e-", "", 1).isdecimal() and float(value):
            options[name] = float(value)
        elif word not in ("quick=true", "quick=false", "--markdown", "--others"):
            known = [*WHERE, *OTHERS, "micro_batches", "--others", "--markdown"]
            near = ["quick=true"] if name == "quick" else get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"{word!r} is no model and no option{hint}; models are {', '.join(WHERE)}, "
                "options micro_batches=20, lr=0.0001, quick=true, --others and --markdown"
            )
    return names or list(OTHERS if others else QUICK if quick else WHERE), options


def rows(name: str, count: int, lr: float) -> Iterator[Row]:
    """Yield a row per granularity of this model."""
    try:
        case = build(name)
    except Exception as error:
        yield Row(name, 0, "", "", 0, math.nan, {}, told(error))
        return
    parameters = sum(p.numel() for p in case.model.parameters())
    expected = plain(case, count, lr)
    for cuts in case.cuts:
        row = Row(name, parameters, "", cuts, 0, math.nan, {})
        try:
            pipe, losses = piped(case, "sgd", cuts, count, lr)
            row = row._replace(
                rung=pipe.split.rung, stages=pipe.stages, difference=difference((pipe.model, losses), expected)
            )
            for method in METHODS:
                _, losses = piped(case, method, cuts, count, lr)
                row = row._replace(last={**row.last, method: losses[-1]})
        except Exception as error:
            row = row._replace(error=told(error))
        yield row


def told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def batches(case: Case, count: int) -> list[tuple[Any, Any]]:
    generator = torch.Generator().manual_seed(1)
    return [case.batch(generator) for _ in range(count)]


def sgd(lr: float) -> Any:
    return lambda params: torch.optim.SGD(params, lr=lr, momentum=0.9)


def plain(case: Case, count: int, lr: float) -> tuple[torch.nn.Module, list[float]]:
    """Train a model by a plain PyTorch loop; return it and its losses."""
    model = copy.deepcopy(case.model)
    optimizer = sgd(lr)(model.parameters())
    losses = []
    for x, y in batches(case, count):
        loss = case.loss(called(model, x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def piped(
    case: Case, method: str, stages: str, count: int, lr: float, **options: Any
) -> tuple[pipeback.Pipeline, list[float]]:
    """Train it through a pipeline; return the pipeline and the losses."""
    data = batches(case, count)
    pipe = pipeback.Pipeline(
        copy.deepcopy(case.model), loss=case.loss, optimizer=sgd(lr), method=method, stages=stages,
        example=data[0][0], **options,
    )  # fmt: skip
    losses = [pipe.push(x, y) for x, y in data]
    pipe.drain()
    return pipe, [loss.item() for loss in losses]


def difference(found: tuple[torch.nn.Module, list[float]], expected: tuple[torch.nn.Module, list[float]]) -> float:
    """Return the largest difference of all losses, weights and buffers; infinite if one is NaN."""
    pairs: list[tuple[Tensor, Tensor]] = [(torch.tensor(found[1]), torch.tensor(expected[1]))]
    others = expected[0].state_dict()
    pairs += [(value, others[key]) for key, value in found[0].state_dict().items()]
    largest = max(float((a.double() - b.double()).abs().max()) for a, b in pairs if a.numel())
    return largest if math.isfinite(largest) else math.inf


def cells(row: Row) -> list[str]:
    """Return the texts of the columns of a row."""
    if row.error and not row.rung:
        return [row.model, f"{row.parameters:,}", "failed", row.cuts, *[""] * (len(HEADS) - 4)]
    losses = [f"{row.last[method]:.3f}" if method in row.last else "failed" for method in METHODS]
    rung = row.rung.removesuffix(", its forward traced")
    return [row.model, f"{row.parameters:,}", rung, row.cuts, str(row.stages), f"{row.difference:.1g}", *losses]


def table(found: Sequence[Row]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for n, head in enumerate(HEADS):
        shown.add_column(head, justify="left" if n in (0, 2, 3) else "right")
    last = None
    for row in found:
        values = cells(row)
        if row.model == last:
            values[:2] = "", ""
        shown.add_row(*map(escape, values), style=None if row.good else "red")
        last = row.model
    return shown


def markdown(found: Sequence[Row]) -> str:
    """The table, and above it where its numbers come from."""
    head = heading(command(), provenance() | {"threads": 1})
    return f"{head}\n{in_markdown(HEADS, list(map(cells, found)), left=(0, 2, 3))}"


if __name__ == "__main__":
    main()
