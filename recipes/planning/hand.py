"""Plans the model at hand: linear layers of one size, or an experiment of conf/; what is measured stands beside."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import pipeback
from pipeback.plan.budget import check
from pipeback.plan.forecast import fills
from pipeback.plan.training_plan import Row, beside, rows, title
from pipeback.streaming.disk_store import DiskStore
from pipeback.streaming.store import HostStore, Store

TEXTS = {
    "method": "pb", "store": "host", "optimizer": "SGD", "device_memory": None, "host_memory": None, "device": None,
}  # fmt: skip
NUMBERS = {"stages": 8, "width": 512, "samples": 4, "micro_batches": 16, "prefetch": 1, "run": 0}
# options of this command beside experiment=
OURS = ("store", "prefetch", "device_memory", "host_memory", "run", "device")
LEAST = {"prefetch": 0, "run": 0}
WRITTEN = ("out", "json")  # what a model by name may have


class Case(NamedTuple):
    """A training and one push of it."""

    model: nn.Module
    loss: Callable[[Any, Any], Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    method: Any
    micro_batch_size: int | None
    x: Any
    y: Any


class Training(NamedTuple):
    """A training, whose loader is made anew for every epoch."""

    model: nn.Module
    loss: Callable[[Any, Any], Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    method: pipeback.Method
    micro_batch_size: int | None
    loader: Callable[[], Any]


def main(words: list[str], console: Console) -> None:
    """Print the plan, and train if that is asked. Raises ValueError for a mistake."""
    torch.set_num_threads(1)
    if written := [w for w in words if w.removeprefix("--").partition("=")[0] in WRITTEN]:
        raise ValueError(
            f"{written[0]!r}: files are written of a model by name, as in pipeback plan gpt:13b devices=64xA100 "
            "out=plan.html; leave it out"
        )
    ours = [w for w in words if w.partition("=")[0] in OURS]
    experiment = any(w.startswith("experiment=") for w in words)
    options = parsed(ours if experiment else words)
    show(composed([w for w in words if w not in ours]) if experiment else built_in(options), options, console)


def parsed(words: list[str]) -> dict[str, Any]:
    options: dict[str, Any] = TEXTS | NUMBERS
    for word in words:
        name, given, value = word.removeprefix("--").partition("=")
        if not given or name not in options:
            near = get_close_matches(name, [*options, "experiment"], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            names = ", ".join(f"{n}=" for n in options)
            raise ValueError(
                f"{word!r} is not an option{hint}; write one of {names}, or a model first, such as gpt:13b"
            )
        if name in NUMBERS and (not value.isdecimal() or int(value) < LEAST.get(name, 1)):
            raise ValueError(f"{name} must be a whole number of at least {LEAST.get(name, 1)}, but is {value!r}")
        options[name] = int(value) if name in NUMBERS else value
    return options


def built_in(options: dict[str, Any]) -> Case:
    """Return a training of linear layers of one size."""
    width, samples, count = options["width"], options["samples"], options["micro_batches"]
    kinds = {name: kind for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    if options["optimizer"] not in kinds:
        near = get_close_matches(options["optimizer"], kinds, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"torch.optim has no {options['optimizer']!r}{hint}")
    momentum = {"momentum": 0.9} if options["optimizer"] == "SGD" else {}
    torch.manual_seed(0)
    return Case(
        nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(options["stages"])]),
        nn.functional.mse_loss,
        lambda params: kinds[options["optimizer"]](params, lr=1e-3, **momentum),
        method(options["method"], count),
        samples,
        torch.randn(count * samples, width),
        torch.randn(count * samples, width),
    )


def method(entry: str, count: int) -> pipeback.Method:
    """Return a method from text such as pipedream:slack=2; methods with groups have one group per push."""
    name, *rest = entry.split(":")
    given: dict[str, Any] = {"anneal": 100} if name == "pipemare" else {}
    if name == "pipedream_2bw":
        given["micro_batches"] = count
    for pair in rest:
        key, _, value = pair.partition("=")
        given[key] = int(value) if value.lstrip("-").isdecimal() else value
    return pipeback.methods.create(name, **given)


def configured(words: list[str]) -> dict[str, Any]:
    """Return the values of a configuration of conf/, as in `pipeback train`."""
    from hydra import compose, initialize_config_module
    from hydra.errors import HydraException

    from pipeback.recipes.command import explained, offer_installed_methods, ordered, quoted
    from pipeback.recipes.schemas import check as checked

    if several := [word for word in words if word.startswith("methods=")]:
        raise ValueError(f"{several[0]}: methods is an option of `pipeback compare`; write method=, such as method=pb")

    offer_installed_methods()
    try:
        with initialize_config_module("pipeback.conf", version_base="1.3"):
            # values that are known only within a run of Hydra
            config = compose("train", [*ordered([quoted(word) for word in words]), "label=plan", "out=."])
    except HydraException as error:
        raise ValueError(explained(error)) from error
    return checked(config)


def training(values: dict[str, Any]) -> Training:
    """Return a training with the data, model, loss and optimizer of a configuration."""
    from pipeback.recipes import build

    data = build.data(values["data"], values["batch_size"], values["seed"])
    chosen = build.method(values["method"])
    size = build.update_size(chosen, values["batch_size"], values["micro_batch_size"])
    optimizer, _ = build.optimizer(values["optimizer"], size)
    task: Any = build.task(values["task"], build.model(values["model"], build.facts(data), values["seed"]), optimizer)
    return Training(task.model, task.loss, optimizer, chosen, values["micro_batch_size"], data.train_dataloader)


def composed(words: list[str]) -> Case:
    """Return a training of conf/ and its first batch."""
    made = training(configured(words))
    x, y = next(iter(made.loader()))
    return Case(made.model, made.loss, made.optimizer, made.method, made.micro_batch_size, x, y)


@contextmanager
def stored(options: dict[str, Any]) -> Iterator[Store | None]:
    """A context with the store, whose temporary folder is removed on exit."""
    kind, _, folder = options["store"].partition(":")
    given = {name: options[name] for name in ("prefetch", "device_memory", "host_memory")}
    if kind == "device" and not folder:
        if given["device_memory"] or given["host_memory"]:
            raise ValueError("device_memory=, host_memory=: budgets are kept by a store; add store=host or store=disk")
        yield None
    elif kind == "host" and not folder:
        yield HostStore(**given)
    elif kind == "disk" and folder:
        yield DiskStore(folder, **given)
    elif kind == "disk":
        with tempfile.TemporaryDirectory(prefix="pipeback-plan-") as temporary:
            yield DiskStore(Path(temporary), **given)
    else:
        raise ValueError(f"store={options['store']} is unknown; write device, host, disk or disk:FOLDER")


def show(case: Case, options: dict[str, Any], console: Console) -> None:
    pushes, device = options["run"], options["device"]
    if device and pushes:
        raise ValueError("run= trains here, and device= is not here; leave one of them out")
    with stored(options) as store:
        pipe = pipeback.Pipeline(
            case.model, loss=case.loss, optimizer=case.optimizer, method=case.method,
            micro_batch_size=case.micro_batch_size, store=store,
        )  # fmt: skip
        try:
            plan = pipe.plan(case.x, case.y, device=device)
            console.print(title(plan), style="bold")
            console.print(table(rows(plan)))
            check(plan.facts, plan.micro_batches)  # the check of the first push
            if pushes:
                exact = pipe.plan(pushes=pushes)
                for _ in range(fills(plan.facts, plan.micro_batches)):
                    pipe.push(case.x, case.y)
                before = pipe.traffic()
                for _ in range(pushes):
                    pipe.push(case.x, case.y)
                console.print(f"{pushes} pushes, on average", style="bold")
                console.print(table(beside(exact, before, pipe.traffic(), pushes), ("", "predicted", "measured")))
        finally:
            pipe.close()


def table(lines: list[Row], heads: tuple[str, str, str] | None = None) -> Table:
    shown = Table(box=box.SIMPLE_HEAD if heads else None, show_header=heads is not None, pad_edge=False, padding=(0, 2))
    for n, justify in enumerate(("left", "right", "right" if heads else "left")):
        shown.add_column(heads[n] if heads else "", justify=justify, style="dim" if n == 2 and not heads else None)  # type: ignore[arg-type]
    for line in lines:
        shown.add_row(*line)
    return shown
