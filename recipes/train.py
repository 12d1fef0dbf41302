"""Train one method and watch it.

    pipeback train method=cerebras
    python recipes/train.py method=pb method.slack=1 epochs=5 model.depth=29 out=outputs/pb-1f1b

The run is written to `out` as config.yaml and runs/<method>-seed<n>.jsonl; `pipeback report <out>` shows it.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch.nn.functional import cross_entropy

import pipeback
from pipeback.method import Method
from pipeback.pipeline import Pipeline
from pipeback.recipes.data import DATA, Split
from pipeback.recipes.models import MODELS
from pipeback.timeline import bubble, timeline

OmegaConf.register_new_resolver("when", lambda test, yes, no: yes if test else no, replace=True)

Record = dict[str, Any]


def train(config: Mapping[str, Any], options: Mapping[str, Any], label: str, seed: int) -> Iterator[Record]:
    """One run of the method with these options, told record by record, each with its `kind`.

    `run` once; `step` after every push, with the loss; `test` every `evaluate_every` samples; `result` at the end.
    """
    data = choose(DATA, "data", config["data"])()
    pipe, described = pipeline(config, options, data, seed)
    n, goal = len(data.x), config["epochs"] * len(data.x)
    yield dict(kind="run", label=label, method=options, seed=seed, samples=goal, epoch_samples=n, classes=data.classes,
               **described)  # fmt: skip

    order = torch.Generator().manual_seed(seed)  # the same order of the data for every method
    done = tested = 0
    seconds = losses = 0.0
    while done < goal:
        for part in torch.randperm(n, generator=order).split(config["push"]):
            began = time.perf_counter()
            loss = float(pipe.push(data.x[part], data.y[part]))
            done += len(part)
            if done == goal:
                pipe.drain()  # only here: elsewhere evaluation leaves what is in flight in flight
            seconds += time.perf_counter() - began
            losses += loss * len(part)
            yield dict(kind="step", samples=done, loss=loss)
            if not math.isfinite(loss):
                yield dict(kind="result", diverged=True, samples=done)
                return
            if done % n == 0 or done - tested >= config["evaluate_every"]:
                output = pipe.evaluate(data.test_x)  # (M, classes)
                yield dict(kind="test", samples=done, train_loss=losses / (done - tested),
                           accuracy=(output.argmax(1) == data.test_y).float().mean().item(),
                           loss=cross_entropy(output, data.test_y).item())  # fmt: skip
                tested, losses = done, 0.0

    memory, method, stages = pipe.memory(), pipe.method, described["stages"]
    flow = method.schedule_at(0, config["push"]) if method.flush_each_push else method.schedule
    count = math.ceil(n / config["micro_batch_size"])  # micro-batches in an epoch
    yield dict(kind="result", diverged=False, samples=done, samples_per_second=done / seconds,
               copies=memory.copies, state=memory.state, activations=memory.activations,
               bubble=bubble(timeline(flow, stages, count)), bubble_micro_batches=count)  # fmt: skip


def pipeline(config: Mapping[str, Any], options: Mapping[str, Any], data: Split, seed: int) -> tuple[Pipeline, Record]:
    """The model of the config under this method, and what there is to know of it before it runs."""
    torch.manual_seed(seed)  # the same weights for every method
    model = choose(MODELS, "model", config["model"])(inputs=data.x.shape[1], classes=data.classes)
    method = build(options)
    update_size = samples_an_update(method, config)
    make, hyperparameters = optimizer(config["optimizer"], update_size)
    pipe = Pipeline(
        model, loss=cross_entropy, optimizer=make, method=method, micro_batch_size=config["micro_batch_size"]
    )
    return pipe, dict(stages=len(model), delays=pipe.delays, update_size=update_size, optimizer=hyperparameters)


def choose(table: Mapping[str, Callable[..., Any]], group: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """The function that `options["name"]` names, the other options bound to it."""
    name, rest = options["name"], {k: v for k, v in options.items() if k != "name"}
    if name not in table:
        raise ValueError(f"unknown {group} {name!r}{suggestion(name, table)}; there are {', '.join(table)}")
    return lambda **more: table[name](**rest, **more)


def suggestion(name: str, names: Any) -> str:
    near = get_close_matches(str(name), list(names), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def build(options: Mapping[str, Any]) -> Method:
    """A method from its conf entry: a name with options (null: the library's default), or a chain of such."""
    if "chain" in options:
        return pipeback.chain(*(build(entry) for entry in options["chain"]))
    given = {k: v for k, v in options.items() if k != "name" and v is not None}
    return pipeback.methods.create(options["name"], **given)


def samples_an_update(method: Method, config: Mapping[str, Any]) -> int:
    if method.flush_each_push:
        return config["push"]
    return config["micro_batch_size"] * (getattr(method, "micro_batches", None) or 1)


def optimizer(config: Mapping[str, Any], update_size: int) -> tuple[Callable[..., torch.optim.Optimizer], Record]:
    """params -> optimizer, and its hyper-parameters; those of momentum SGD are scaled to the update size."""
    given = {k: v for k, v in config.items() if k not in ("name", "reference")}
    kind = getattr(torch.optim, config["name"], None)
    if not isinstance(kind, type):
        raise ValueError(f"torch.optim has no {config['name']!r}{suggestion(config['name'], dir(torch.optim))}")
    if config["reference"] is not None:
        if "momentum" not in given:
            raise ValueError(f"optimizer.reference scales rate and momentum; {config['name']} has none: set it to null")
        given["lr"], given["momentum"] = pipeback.scale_hyperparameters(
            given["lr"], given["momentum"], config["reference"], update_size
        )
    return lambda params: kind(params, **given), {"name": config["name"], **given}


def resolved(config: DictConfig) -> Record:
    """The config as plain values, counts checked."""
    values = OmegaConf.to_container(config, resolve=True)
    assert isinstance(values, dict)
    for name in ("epochs", "seeds", "jobs", "micro_batch_size", "push", "evaluate_every"):
        if name in values and (type(values[name]) is not int or values[name] < 1):
            raise ValueError(f"{name} must be a whole number of at least 1, but is {values[name]!r}")
    return {str(k): v for k, v in values.items()}


def fail(command: str, error: Exception) -> None:
    """A mistake in the input: its message, no traceback."""
    print(f"pipeback {command}: {error}", file=sys.stderr)
    sys.exit(2)


def store(file: Path, records: list[Record]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


@hydra.main(config_path="pkg://pipeback.conf", config_name="train", version_base="1.3")
def main(config: DictConfig) -> None:
    try:
        values = resolved(config)
        label = HydraConfig.get().runtime.choices["method"]
        torch.set_num_threads(1)  # layers this small gain nothing from more
        run(values, label)
    except (ValueError, TypeError, OmegaConfBaseException) as error:
        fail("train", error)


def run(config: Record, label: str) -> None:
    out, records = Path(config["out"]), []
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeRemainingColumn())
    console = Console(highlight=False)
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(label, total=None, note="")
        for record in train(config, config["method"], label, config["seed"]):
            if record["kind"] == "run":
                progress.update(task, total=record["samples"])
                console.print(
                    f"{label}: {record['stages']} stages, D = {record['delays'][0]} at stage 0", highlight=False
                )
                console.print(f"update size {record['update_size']}: {record['optimizer']}", highlight=False)
            elif record["kind"] == "step":
                progress.update(task, completed=record["samples"], note=f"loss {record['loss']:.3f}")
                continue  # live only: the files keep the loss averaged between measurements
            elif record["kind"] == "test":
                console.print(f"{record['samples']:>8,} samples   training loss {record['train_loss']:.3f}   "
                              f"held-out loss {record['loss']:.3f}   accuracy {record['accuracy']:.1%}")  # fmt: skip
            elif record["diverged"]:
                console.print(f"[red]diverged after {record['samples']:,} samples[/red]")
            else:
                console.print(f"{record['samples_per_second']:,.0f} samples/s, {record['copies']:g} weight copies, "
                              f"{record['activations'] / 1e6:.2f} MB of activations in flight at the peak")  # fmt: skip
            records.append(record)
    store(out / "runs" / f"{label}-seed{config['seed']}.jsonl", records)
    OmegaConf.save(OmegaConf.create(config), out / "config.yaml")
    console.print(f"written to {out}; `pipeback report {out}` shows it")


if __name__ == "__main__":
    main()
