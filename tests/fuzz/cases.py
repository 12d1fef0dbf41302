"""Methods and optimizers that are fuzzed: how the library gets one, and what the recurrence takes instead."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.laws.equations import ANY, PAIRS, PLAIN, VELOCITY, Pair, create
from tests.laws.reference import RULES, Array, Moved, Options, Recurrence
from tests.laws.reference_eigendelay import EigenDelay


class Counting(torch.optim.Optimizer):
    """SGD whose rate falls by a count in its group, as schedule-free optimizers and Prodigy count."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, k=0))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] / (1 + 0.3 * group["k"]) * (p.grad + group["weight_decay"] * p)


class Counter(torch.optim.Optimizer):
    """The same with its count on itself."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay))
        self.k = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.k += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] / (1 + 0.3 * self.k) * (p.grad + group["weight_decay"] * p)


class Halved(torch.optim.SGD):
    """A subclass with a step of its own: half of SGD's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        before = [[p.clone() for p in group["params"]] for group in self.param_groups]
        super().step()
        for group, old in zip(self.param_groups, before):
            for p, was in zip(group["params"], old):
                p.lerp_(was, 0.5)


def _counting(u: int, w: Array, v: Array, q: Array, g: Array, o: Options) -> Moved:
    """w ← w − η / (1 + 0.3 u) · (g + λ w), u from 1."""
    return Moved(w - o["lr"] / (1 + 0.3 * (u + 1)) * (g + o.get("weight_decay", 0) * w), v, q)


def _halved(u: int, w: Array, v: Array, q: Array, g: Array, o: Options) -> Moved:
    moved = RULES["sgd"](u, w, v, q, g, o)
    return moved._replace(w=(w + moved.w) / 2)


RULES.setdefault("counting", _counting)
RULES.setdefault("halved", _halved)

Optimizer = tuple[Callable[..., torch.optim.Optimizer], str, dict[str, Any]]
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": (torch.optim.SGD, "sgd", {"lr": 0.05}),
    "momentum": (torch.optim.SGD, "sgd", {"lr": 0.02, "momentum": 0.9}),
    "nesterov": (torch.optim.SGD, "sgd", {"lr": 0.02, "momentum": 0.8, "nesterov": True}),
    "dampening": (torch.optim.SGD, "sgd", {"lr": 0.03, "momentum": 0.8, "dampening": 0.3}),
    "maximize": (torch.optim.SGD, "sgd", {"lr": 0.01, "momentum": 0.5, "maximize": True}),
    "adam": (torch.optim.Adam, "adam", {"lr": 0.01, "betas": (0.8, 0.95)}),
    "adamw": (torch.optim.AdamW, "adamw", {"lr": 0.01, "betas": (0.8, 0.95)}),
    "rmsprop": (torch.optim.RMSprop, "rmsprop", {"lr": 0.005, "alpha": 0.9, "eps": 1e-3}),
    "adagrad": (torch.optim.Adagrad, "adagrad", {"lr": 0.02, "lr_decay": 0.1}),
    "fused-momentum": (torch.optim.SGD, "sgd", {"lr": 0.02, "momentum": 0.9, "fused": True}),
    "fused-adam": (torch.optim.Adam, "adam", {"lr": 0.01, "betas": (0.8, 0.95), "fused": True}),
    "fused-adamw": (torch.optim.AdamW, "adamw", {"lr": 0.01, "betas": (0.8, 0.95), "fused": True}),
    "fused-adagrad": (torch.optim.Adagrad, "adagrad", {"lr": 0.02, "lr_decay": 0.1, "fused": True}),
    "counting": (Counting, "counting", {"lr": 0.05}),
    "counter": (Counter, "counting", {"lr": 0.05}),
    "halved": (Halved, "halved", {"lr": 0.04, "momentum": 0.8}),
    "undamped": (torch.optim.SGD, "sgd", {"lr": 0.002, "momentum": 1.0}),
}

METHODS: dict[str, Pair] = {
    **PAIRS,
    "gpipe": Pair(lambda _: create("gpipe"), lambda w, r, **k: Recurrence(w, r, slack=0, every=None, **k)),
    "one_f_one_b": Pair(lambda _: create("one_f_one_b"), lambda w, r, **k: Recurrence(w, r, slack=0, every=None, **k)),
    "zb_h1": Pair(lambda _: create("zb_h1"), lambda w, r, **k: Recurrence(w, r, slack=0, every=None, **k)),
    "zb_h2": Pair(lambda _: create("zb_h2"), lambda w, r, **k: Recurrence(w, r, slack=0, every=None, **k)),
    "interleaved": Pair(
        lambda stages: create("interleaved", chunks=max(1, stages // 3)),
        lambda w, r, **k: Recurrence(w, r, slack=0, every=None, **k),
    ),
    "looped_bfs": Pair(
        lambda stages: create("looped_bfs", chunks=max(1, stages // 3)),
        lambda w, r, **k: Recurrence(w, r, slack=0, every=None, **k),
    ),
    "zb_v": Pair(lambda _: create("zb_v"), lambda w, r, **k: Recurrence(w, r, slack=0, every=None, **k)),
    "pb-v": Pair(lambda _: create("pb", placement="v"), PAIRS["pb-2"].reference),
    # without its bases, which are only defined where covariances have full rank
    "eigendelay-no-basis": Pair(
        lambda _: create("eigendelay", sides=0), partial(EigenDelay, slack=2, sides=0), ("adam", "adamw")
    ),
}
EACH_PUSH = ("gpipe", "one_f_one_b", "zb_h1", "zb_h2", "interleaved", "looped_bfs", "zb_v")  # whose flush is a push


def most_workers(method: str, stages: int) -> int:
    """The most workers that a program may have: three, or as many as have their parts of the stages."""
    return max(1, min(3, stages // METHODS[method].library(stages).chunks))


def optimizers(method: str) -> list[str]:
    """Those that a method's equations allow."""
    allowed = METHODS[method].optimizers
    if allowed == ANY:
        return [name for name in OPTIMIZERS if allows(method, name)]
    return [*allowed, "maximize", "undamped"] if allowed in (PLAIN, VELOCITY) else list(allowed)


def allows(method: str, optimizer: str) -> bool:
    """Whether a method takes an optimizer, with weight decay."""
    kind, _, options = OPTIMIZERS[optimizer]
    try:
        METHODS[method].library(4).check(kind([torch.nn.Parameter(torch.zeros(1))], weight_decay=0.05, **options), 4)
    except ValueError:
        return False
    return True


def stepping(method: str) -> bool:
    """Whether the method makes the steps itself, which is for torch's own SGD."""
    return bool(METHODS[method].library(2).steps_itself)
