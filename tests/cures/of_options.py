"""What is refused of options that name another object or number, and the cure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import pipeback
import pipeback.draw
from pipeback import methods
from tests.laws.cases import network

from .rows import BATCH, Row, adam, build, momentum, sgd, trains


def lbfgs(params: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params)


class Whole(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def frozen(again: bool) -> None:
    model = network(4)
    model[1].requires_grad_(False)
    pipe = build(model)
    pipe.push(BATCH, BATCH)
    model[1].requires_grad_(True)
    (build(model) if again else pipe).push(BATCH, BATCH)


def measured(**options: Any) -> Callable[[], Any]:
    def do() -> None:
        pipe = build(**options)
        pipe.record()
        pipe.push(BATCH, BATCH)
        pipe.close()

    return do


def regrouped(how: str, cured: bool) -> Callable[[], Any]:
    """Parameter groups that are changed between two pushes."""

    def do() -> None:
        apart = lambda params: torch.optim.Adam([{"params": params[:1]}, {"params": params[1:]}], lr=0.01)  # noqa: E731
        model = network(4)
        pipe = build(model, optimizer=apart)
        pipe.push(BATCH, BATCH)
        first, second = pipe.optimizers[1].param_groups
        weight = first["params"].pop()
        if how == "moved":
            second["params"].append(weight)
            together = lambda params: torch.optim.Adam([{"params": params[:0]}, {"params": params}], lr=0.01)  # noqa: E731
            pipe = build(model, optimizer=together) if cured else pipe
        elif cured:
            weight.requires_grad_(False)
            model[1][0].weight.requires_grad_(False)
            pipe = build(model)
        pipe.push(BATCH, BATCH)

    return do


def without_rate(cured: bool) -> None:
    pipe = build()
    pipe.push(BATCH, BATCH)
    pipe.optimizers[1].param_groups[0]["lr"] = None
    if cured:
        pipe.optimizers[1].param_groups[0]["lr"] = 0.01
    pipe.push(BATCH, BATCH)


class Casting(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


SKEWED = pipeback.Debug(order="skewed")


def casting(inside: bool, **options: Any) -> Callable[[], Any]:
    """Autocast around pushes, or inside the modules."""
    kind = Casting if inside else nn.Linear
    model = nn.Sequential(*(kind(6, 6) for _ in range(4)))

    def do() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
            trains(model=model, **options)

    return do


def metrics(given: Any) -> Callable[[], Any]:
    return lambda: build().evaluate(BATCH, BATCH, metrics=given)


def units(count: int) -> Callable[[], Any]:
    def do() -> None:
        schedule = pipeback.schedules.flowing(2)
        list(pipeback.timeline.timeline(schedule, 2, 4, costs=[{"F": 1, "B": 1, "U": 1}] * count))

    return do


def leaky(activations: Any) -> Callable[[], Any]:
    return lambda: trains(model=nn.Sequential(nn.Linear(6, 6), nn.RReLU(), nn.Linear(6, 6)), activations=activations)


class Numpy(nn.Module):
    """Computes by numpy between its layers, or not."""

    def __init__(self, numpy: bool) -> None:
        super().__init__()
        self.a, self.b, self.numpy = nn.Linear(6, 6), nn.Linear(6, 6), numpy

    def forward(self, x: Any) -> Any:
        h = self.a(x)
        return self.b(torch.as_tensor(h.detach().numpy()) + h if self.numpy else h)


class Setting(nn.Module):
    """Gives a weight other memory, or writes into it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.how = nn.Linear(6, 6), nn.Linear(6, 6), how
        self.a.weight.requires_grad_(how != "frozen")

    def forward(self, x: Any) -> Any:
        if self.how == "copy":
            with torch.no_grad():
                self.a.weight.copy_(self.a.weight.clamp(-1, 1))
        else:
            self.a.weight.data = self.a.weight.data.clamp(-1, 1)
        return self.b(self.a(x))


def traced(model: nn.Module, *leaves: str, **options: Any) -> Callable[[], Any]:
    stages = pipeback.Splitting("layer", leaves=leaves)
    return lambda: trains(**{"model": model, "stages": stages, "example": BATCH, **options})


def stored(again: bool) -> None:
    """Freezes a weight that lives in a store."""
    model = network(4)
    pipe = build(model, store="host")
    pipe.push(BATCH, BATCH)
    model[1].requires_grad_(False)
    if again:
        pipe.close()
        pipe = build(model, store="host")
    pipe.push(BATCH, BATCH)
    pipe.close()


def flushes(at_once: bool) -> None:
    pipe = build(loss=None, method=methods.create("gpipe", micro_batches=2))
    if at_once:
        pipe.forward_many([BATCH] * 3)
    for _ in range(4):
        pipe.forward(BATCH)
        pipe.backward(torch.ones(4, 6))
    pipe.close()


class Rare(nn.Module):
    """A layer runs for positive inputs alone, in this form of the model or within a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.more, self.b = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Any, more: Any = None) -> Any:
        h = self.a(x)
        return self.b(h if more is None else self.more(h))


def rare(example: Any, *leaves: str) -> Callable[[], Any]:
    stages = pipeback.Splitting("layer", leaves=leaves)

    def do() -> None:
        pipe = build(Rare(), stages=stages, example=example)
        pipe.push({"x": BATCH, "more": BATCH}, BATCH)

    return do


def drawn(record: bool, one: bool) -> Callable[[], Any]:
    def do() -> None:
        pipe = build()
        if record:
            pipe.record()
        pipe.push(torch.randn(40, 6), torch.randn(40, 6))
        pipe.wait()
        pipeback.draw.measured(pipe) if one else pipeback.draw.beside([pipe.recorded])
        pipe.close()

    return do


ROWS: dict[str, Row] = {
    "noise in host memory": Row(
        leaky("host"),
        r"stage 1 \(1\): RReLU saves its random numbers for the backward before torch has drawn them.*give its "
        r"activations as \{1: 'device'\}, or activations='device' or 'recompute' for all stages",
        lambda: [leaky(kind)() for kind in ({1: "device"}, {0: "host", 2: "host"}, "device", "recompute")],
    ),
    "a weight of a store that is frozen": Row(
        lambda: stored(False), "cannot be frozen in between; build a new Pipeline once requires_grad is set",
        lambda: stored(True),
    ),
    "more than a flush": Row(
        lambda: flushes(True), "do not lie in one flush of .*; call forward and backward for one after the other",
        lambda: flushes(False),
    ),
    "a layer that the example does not need": Row(
        rare({"x": BATCH}), "so that no stage has it; give an example= for which it does, or keep what calls it whole",
        lambda: [rare({"x": BATCH, "more": BATCH})(), rare({"x": BATCH}, "")()],
    ),
    "a whole model in several stages": Row(
        lambda: build(Rare(), stages=pipeback.Splitting(2, leaves=[""]), example=BATCH),
        r"leaves=\[''\] keeps the whole model one stage, but stages=2; give stages=pipeback.Splitting\(1, l.*=\[''\]",
        lambda: trains(model=Rare(), stages=pipeback.Splitting(1, leaves=[""]), example=BATCH),
    ),
    "a run that was not recorded": Row(
        drawn(False, True), r"nothing was recorded: call pipe.record\(\) before the pushes that are to be seen",
        drawn(True, True),
    ),
    "runs that were not recorded": Row(
        drawn(False, False), r"there is nothing to draw: nothing was recorded; call pipe.record\(\) before the pushes",
        drawn(True, False),
    ),
    # optimizers
    "an optimizer that evaluates again": Row(
        lambda: build(optimizer=lbfgs),
        "LBFGS evaluates the loss several times per step, a pipeline cannot; use SGD or Adam",
        lambda: [trains(optimizer=sgd), trains(optimizer=adam, method="pipedream")],
    ),
    "a rule for momentum": Row(
        lambda: build(optimizer=adam, method="cerebras"),
        "is written for momentum SGD, but the optimizer is Adam; use ",
        lambda: trains(optimizer=momentum(), method="cerebras"),
    ),
    "a reference for another optimizer": Row(
        lambda: build(optimizer=adam, method="pb", micro_batch_size=1, reference_batch=32),
        "scales rate and momentum by a rule for SGD, but the optimizer is Adam; leave reference_batch out",
        lambda: trains(optimizer=adam, method="pb", micro_batch_size=1),
    ),
    "a weight that trains anew": Row(
        lambda: frozen(False),
        "was frozen when the pipeline was built, which does not train it; build a new Pipeline now that requires_grad",
        lambda: frozen(True),
    ),
    # splitting
    "more stages than layers": Row(
        lambda: trains(model=Numpy(False), stages=9, example=BATCH),
        r'stages=9, but the model has 2 layers to share out; use that or less, or "auto"',
        lambda: [trains(model=Numpy(False), stages=value, example=BATCH) for value in (2, 1, "auto")],
    ),
    "words for a list": Row(
        lambda: build([*network(4)], stages=["0"]),
        'stages=.*: a list has its modules for stages; give "auto", a number or one module',
        lambda: [trains(model=[*network(4)], stages=value) for value in ("auto", 2)],
    ),
    "numpy within": Row(
        traced(Numpy(True)),
        "Numpy.forward calls Tensor.numpy, which cannot be traced; keep to torch functions, or ",
        lambda: [traced(Numpy(False))(), traced(Numpy(True), "")()],
    ),
    "other memory for a weight": Row(
        traced(Setting("data")),
        r"and whose optimizer would go on with the old data; write into it under torch.no_grad\(\), with copy_\(\)",
        lambda: [traced(Setting("copy"))(), traced(Setting("frozen"))()],
    ),
    # stores and stacks
    "a store of whole matrices": Row(
        lambda: build(store=pipeback.Streaming(sparsity="set"), optimizer=lambda ps: Whole(ps, lr=0.1)),
        "may look at whole matrices, of which only the survivors are kept; use one of torch.optim's elementwise ones",
        lambda: [
            trains(store=pipeback.Streaming(sparsity="set"), optimizer=each, method="pipedream") for each in (sgd, adam)
        ],
    ),
    "recording a stack": Row(
        measured(vectorize=True), "stages that run as one cannot be measured apart; build it with vectorize=False",
        measured(vectorize=False),
    ),
    "autocast around a push that leaves work": Row(
        casting(inside=False, debug=SKEWED),
        'with order="skewed" a push leaves work to later calls, which its autocast does not reach; enter it inside the '
        "modules, or use another order",
        lambda: [casting(inside=True, debug=SKEWED)(), casting(inside=False)()],
    ),
    "graphs without a device": Row(
        lambda: build(debug=pipeback.Debug(), vectorize="cuda_graph"),
        'vectorize="cuda_graph" needs all stages on a CUDA device; move the model, or use True',
        lambda: trains(vectorize=True),
    ),
    "host memory that is too little": Row(
        lambda: build(store=pipeback.HostStore(host_memory=100)),
        'take .*; keep them in files, store="disk:FOLDER", or give host_memory of at least ',
        lambda: trains(store=pipeback.HostStore(host_memory="1 GB")),
    ),
    # between pushes
    "a weight in another group": Row(
        regrouped("moved", False),
        r"stage 1 \(1\): the parameter groups of its optimizer are others, 0.weight is in another one, .*; put them "
        "back, or build a new Pipeline with an optimizer function that makes these groups",
        regrouped("moved", True),
    ),
    "a weight in no group": Row(
        regrouped("removed", False),
        "0.weight was taken out of the parameter groups of its optimizer; put it back, or call requires_grad_.False. "
        "on it and build a new Pipeline",
        regrouped("removed", True),
    ),
    "no rate": Row(
        lambda: without_rate(False),
        r"stage 1 \(1\): lr of its optimizer is None, but must be a number; set it again, for example "
        r'pipe.optimizers\[1\].param_groups\[0\]\["lr"\] = 0.01',
        lambda: without_rate(True),
    ),
    # calls
    "metrics without names": Row(
        metrics([nn.functional.mse_loss]), "metrics must be a dict of functions by name, but is ",
        metrics({"accuracy": lambda output, y: (output.argmax(1) == y.argmax(1)).float().mean()}),
    ),
    "costs of other stages": Row(
        units(3), "costs needs one entry per stage: 2, not 3; give the units of time of each", units(2)
    ),
}  # fmt: skip
