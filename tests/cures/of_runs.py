"""What is refused while a pipeline runs: tensors that do not travel, states that cannot be saved, folders, pictures."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import pipeback
from tests.laws.cases import data, network

from .rows import BATCH, Row, build, trains


class Stepped(nn.Module):
    """Two layers, with something between them that is the model's own affair."""

    def __init__(self, between: Callable[[Any], Any]) -> None:
        super().__init__()
        self.a, self.b, self.between = nn.Linear(6, 6), nn.Linear(6, 6), between

    def forward(self, x: Any) -> Any:
        return self.b(self.between(self.a(x)))


def followed(between: Callable[[Any], Any], *leaves: str) -> Callable[[], Any]:
    splitting = pipeback.Splitting("layer", leaves=leaves)
    return lambda: trains(model=Stepped(between), stages=splitting, example=BATCH)


def once(cached: bool) -> Callable[[], Any]:
    def pushed() -> None:
        model = nn.Sequential(*[nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)) for _ in range(3)])
        with nn.utils.parametrize.cached() if cached else nullcontext():
            trains(model=model)

    return pushed


def down(x: Any) -> Any:
    def halved(row: Any, n: int = 2) -> Any:
        return row if n == 0 else halved(row / 2, n - 1)

    return torch.vmap(halved)(x)


class Asking(nn.Module):
    """Takes as many ways as there are values."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled, self.last = Scaled(), nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        return self.last(self.scaled(x))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        return self.b(self.a(x * x.mean().item()))


def often(*leaves: str) -> Callable[[], Any]:
    def do() -> None:
        pipe = build(Asking(), stages=pipeback.Splitting("layer", leaves=leaves), example=BATCH)
        for n in range(70):
            pipe.push(BATCH + n / 100, BATCH)
        pipe.close()

    return do


class Handed:
    def __init__(self, x: Any) -> None:
        self.x = x


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, one: Any, more: Any) -> Any:
        return self.linear(one.x) + sum(each.x for each in more)


class Hands(nn.Module):
    def __init__(self, once: bool) -> None:
        super().__init__()
        self.a, self.both, self.b, self.once = nn.Linear(6, 6), Both(), nn.Linear(6, 6), once

    def forward(self, x: Any) -> Any:
        one = Handed(self.a(x))
        return self.b(self.both(one, [] if self.once else [one]))


def hands(once: bool, *leaves: str) -> Callable[[], Any]:
    splitting = pipeback.Splitting("layer", leaves=leaves)
    return lambda: trains(model=Hands(once), stages=splitting, example=BATCH)


class Declared(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.a, self.b, self.names = nn.Linear(6, 6), nn.Linear(6, 6), names

    def forward(self, x: Any) -> Any:
        return self.b(self.a(x))

    def pipeline_stages(self) -> list[nn.Module]:
        return [getattr(self, name) for name in self.names]


def half_meta(where: str) -> nn.Module:
    first = nn.Linear(6, 6, device=where)
    return nn.Sequential(nn.Sequential(first, nn.Linear(6, 6)), nn.Linear(6, 6))


def added(again: bool) -> None:
    model = network(4)
    pipe = build(model)
    train_on = pipe
    pipe.push(BATCH, BATCH)
    pipe.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    if again:
        train_on = build(model)
    train_on.push(BATCH, BATCH)
    train_on.wait()


class Keeping(torch.autograd.Function):
    """Keeps a tensor on ctx, or where it belongs."""

    @staticmethod
    def forward(ctx: Any, x: Any, saved: bool) -> Any:  # type: ignore[override]
        ctx.saved = saved
        if saved:
            ctx.save_for_backward(x)
        else:
            ctx.kept = {"x": object()}
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        return gradient * 2, None


class Doubling(nn.Module):
    def __init__(self, saved: bool) -> None:
        super().__init__()
        self.linear, self.saved = nn.Linear(6, 6), saved

    def forward(self, x: Any) -> Any:
        return Keeping.apply(self.linear(x), self.saved)


def saves(model: nn.Module, x: Any = BATCH, y: Any = BATCH, **options: Any) -> Callable[[], Any]:
    """A state with micro-batches in flight."""

    def do() -> None:
        pipe = build(model, **options)
        pipe.push(x, y)
        pipe.state_dict()

    return do


class Named(dict):  # type: ignore[type-arg]
    """A dictionary of a class of its own, as tokenizers give."""


def heard(late: bool, **options: Any) -> None:
    """A hook on a stage, registered after the first push or before it."""
    model = network(4)
    pipe = build(model=model, **options)
    for n in range(3):
        if n == late:
            model[2].register_forward_hook(lambda *_: None)
        pipe.push(BATCH, BATCH)
    pipe.close()


def local(x: Any) -> Any:
    """The same of a class that cannot be found by its name."""
    return type("Local", (dict,), {})(x=x)


class Picks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, some: Any) -> Any:
        return self.b(self.a(next(iter(some.values()))))


def given(some: Any) -> Callable[[], Any]:
    return saves(Picks(), {"some": some}, stages="layer", example={"some": some})


def recorded(first: int, last: int) -> Any:
    pipe = build()
    pipe.record()
    for _ in range(8):
        pipe.push(BATCH, BATCH)
    recording = pipe.recorded
    pipe.close()
    return recording.window(first, last)


def pictures(record: bool) -> None:
    from pipeback.draw import beside

    pipe = build()
    if record:
        pipe.record()
    for _ in range(8):
        pipe.push(BATCH, BATCH)
    beside([pipe.recorded])
    pipe.close()


def compiled(mode: str | None) -> None:
    trains(compile=True if mode is None else {"mode": mode})


def amid(shown: bool) -> None:
    pipe = build(store="host")
    train_on, (x, y) = pipe.push, data(1)[0]
    train_on(x, y)
    with pipe.shown():
        if shown:
            train_on(x, y)
    train_on(x, y)
    pipe.close()


def flops(before: int) -> None:
    """Count those of a push. before: how many have come before it."""
    pipe = build(network(3))
    for _ in range(before):
        pipe.push(BATCH, BATCH)
    with FlopCounterMode(display=False):
        pipe.push(BATCH, BATCH)


def budget(memory: Any) -> None:
    wide = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    build(wide, store=pipeback.HostStore(device_memory=memory)).close()


ROWS: dict[str, Row] = {
    # models
    "an iterator of modules": Row(
        lambda: build(iter(network(4))),
        r"model must be an nn.Sequential or a list of modules.*list_iterator; write it as nn.Sequential\(...\)|"
        r"model must be an nn.Sequential or a list of modules.*; write it as nn.Sequential\(...\)",
        lambda: trains(model=nn.Sequential(*iter(network(4)))),
    ),
    "a stage on the meta device in part": Row(
        lambda: build(half_meta("meta")),
        r"stage 0 \(0\) is on the meta device in part; build all of it there, or nothing",
        lambda: trains(model=half_meta("cpu")),
    ),
    "FLOPs of the first push": Row(
        lambda: flops(0), r"stage 1 \(1\): the backward failed.*; push once before you enter", lambda: flops(1)
    ),
    "a stage left out": Row(
        lambda: build(Declared("a")),
        r"Declared.pipeline_stages\(\) leaves out b.weight, which would not be trained; add it to a stage",
        lambda: trains(model=Declared("a", "b")),
    ),
    "random numbers of Python": Row(
        followed(lambda x: x * random.random()),
        "Stepped.forward computes by random numbers of Python or numpy, as layer drop may do.*switch that off, or keep",
        lambda: [followed(lambda x: x)(), followed(lambda x: x * random.random(), "")()],
    ),
    "parametrizations that are computed once": Row(
        once(True), r"parametrize.cached\(\) keeps weights that are computed of others.*push outside of that context",
        once(False),
    ),
    "a tensor from elsewhere": Row(
        followed(lambda x: x + torch.Tensor([1.0] * 6)),
        r"a tensor \(6,\) that no torch function or module has made from its input.*keep the whole model one stage: "
        r"stages=pipeback.Splitting\(leaves=\[''\]\)",
        followed(lambda x: x + torch.Tensor([1.0] * 6), ""),
    ),
    "a branch by many numbers": Row(
        followed(lambda x: x + torch.tensor((x > 0).tolist())),
        r"takes another branch for this micro-batch: tolist gave \[\[[\w., \[\]]{,60}, but \[\[.*leaves=\[''\]",
        followed(lambda x: x + torch.tensor((x > 0).tolist()), ""),
    ),
    "numbers that weights compute": Row(
        followed(lambda x: x + torch.tensor(x.tolist())),
        r"gives Python the value of a number that weights compute so that it is another one .*leaves=\[''\]",
        followed(lambda x: x + torch.tensor(x.tolist()), ""),
    ),
    "parameters that are added": Row(
        lambda: added(False), r"stage 0 \(0\): parameters were added to its optimizer; build a new Pipeline",
        lambda: added(True),
    ),
    "a function under vmap that calls itself": Row(
        followed(down), r"a function under torch.vmap calls itself; .*: stages=pipeback.Splitting\(leaves=\[''\]\)",
        followed(down, ""),
    ),
    "ways without end": Row(
        often(), r"Asking.forward has taken 64 branches .*: item gave .*; keep decisions by values within one layer: ",
        often("scaled"),
    ),
    "an object in two places": Row(
        hands(False, "both"),
        r"an object of Handed stands in two places of what a module is given.*; pass it once, or give the path of the "
        "module whose forward passes it in stages=.*, '' for the whole model",
        lambda: [hands(True, "both")(), hands(False, "")()],
    ),
    # what travels, and what is saved
    "a function that keeps an object": Row(
        saves(nn.Sequential(Doubling(False), nn.Linear(6, 6), nn.Linear(6, 6))),
        "keeps ctx.kept, a dict, which cannot be stored; keep tensors with ctx.save_for_backward, and numbers",
        saves(nn.Sequential(Doubling(True), nn.Linear(6, 6), nn.Linear(6, 6))),
    ),
    "a class inside a function": Row(
        given(local(BATCH)),
        "a saved state cannot hold, since its class is not found as.*define it at the top of a module, or push a dict",
        given({"x": BATCH}),
    ),
    "a key that is no string": Row(
        given(Named({("x", 1): BATCH})),
        "a saved state cannot hold, since one of its keys is a tuple; use strings",
        given(Named(x=BATCH)),
    ),
    "bytes beside tensors": Row(
        given({"x": BATCH, "more": b"abc"}),
        "a micro-batch has a bytes in it, b'abc', which a saved state cannot hold; push tensors, numbers and strings",
        given({"x": BATCH, "more": "abc"}),
    ),
    # options that meet the machine
    "graphs of one micro-batch": Row(
        lambda: build(compile={"mode": "reduce-overhead"}),
        'replays CUDA graphs.*use mode="max-autotune-no-cudagraphs", or compile=True',
        lambda: [build(compile=True), build(compile={"mode": "max-autotune-no-cudagraphs"})],
    ),
    "a hook on a stage of a stack": Row(
        lambda: heard(True, vectorize=True),
        r"stage 2 \(2\) runs as one with its neighbours, where no hooks are called, but .* has got some; register "
        "hooks before the first push, or build the pipeline with vectorize=False",
        lambda: [heard(False, vectorize="auto"), heard(True, vectorize=False)],
    ),
    "nothing alike": Row(
        lambda: trains(model=nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)) for _ in range(3))),
                       vectorize=True),
        r'vectorize=True: no stages can run as one \(.*use vectorize="auto" or False',
        lambda: [
            trains(model=nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)) for _ in range(3))),
                   vectorize=value)
            for value in ("auto", False)
        ],
    ),
    "no fused optimizer": Row(
        lambda: trains(store=pipeback.HostStore(fused=True), optimizer=torch.optim.RMSprop, method="gpipe"),
        r"fused=True: RMSprop of stage 0 \(0\) has no fused implementation; use fused=False",
        lambda: trains(store=pipeback.HostStore(fused=False), optimizer=torch.optim.RMSprop, method="gpipe"),
    ),
    "a push amid what is shown": Row(
        lambda: amid(True),
        r"weights are shown within `with pipe.shown\(\)`, where nothing is trained.*; leave that context first",
        lambda: amid(False),
    ),
    "a size in words": Row(
        lambda: budget("much"), "device_memory='much' is no size; write bytes, or a number with kB, MB.*: \"1.5 GB\"",
        lambda: [budget(10**9), budget("1.5 GB"), budget("900 MiB")],
    ),
    "a stage larger than memory": Row(
        lambda: budget("20 kB"), r"alone takes .* give device_memory of at least 32.5 KiB \(33280\)",
        lambda: budget(33280 * 4),
    ),
    "an input with a gradient": Row(
        lambda: build().push(nn.Linear(6, 6)(BATCH), BATCH), r"none goes back to x.*x\.detach\(\)",
        lambda: build().push(nn.Linear(6, 6)(BATCH).detach(), BATCH),
    ),
    # pictures
    "a window outside of a run": Row(
        lambda: recorded(4, 99), r"does not lie in a run of 8; write for example window\(2, 4\)",
        lambda: recorded(2, 4),
    ),
    "nothing to draw": Row(
        lambda: pictures(False), r"nothing was recorded. call pipe.record\(\) before the pushes",
        lambda: pictures(True),
    ),
}  # fmt: skip
