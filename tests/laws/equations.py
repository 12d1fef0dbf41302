"""Each method twice: as the library builds it, and as the reference does; and the cases that both are compared in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import pipeback
from tests.laws.reference import Options, Recurrence, Tensors
from tests.laws.reference_chains import BrakedSpike, CompensatedPrediction, FedBackRates, SlowPrediction, SlowVelocity
from tests.laws.reference_later import (
    Braking,
    DecayedPrediction,
    DelayCompensation,
    ErrorFeedback,
    GapAware,
    OptimizerPrediction,
    StalenessRates,
)
from tests.laws.reference_methods import Corrected, PipeDream, PipeMare, SpecTrain, TwoBW

TOLERANCE = 1e-12
BATCH = 2


# -- the network, twice ----------------------------------------------------------------------------------------------


def widths(stages: int) -> list[int]:
    return [*(3, 5, 4, 5, 3, 4)[:stages], 2]


def initial(stages: int, seed: int = 0) -> list[Tensors]:
    rng, n = np.random.default_rng(seed), widths(stages)
    return [(rng.normal(size=(b, a)) / np.sqrt(a), 0.1 * rng.normal(size=b)) for a, b in pairwise(n)]


def network(weights: list[Tensors]) -> nn.Sequential:
    stages = []
    for s, (w, b) in enumerate(weights):
        linear = nn.Linear(w.shape[1], w.shape[0], dtype=torch.float64)
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(w))
            linear.bias.copy_(torch.from_numpy(b))
        stages.append(linear if s == len(weights) - 1 else nn.Sequential(linear, nn.Tanh()))
    return nn.Sequential(*stages)


def samples(stages: int, count: int, seed: int = 1) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, 3)), rng.normal(size=(count, 2))


def close(got: Any, expected: Any, what: str) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(expected), rtol=TOLERANCE, atol=TOLERANCE, err_msg=what)


def close_weights(model: nn.Module, expected: list[Tensors], when: str) -> None:
    for s, (stage, w) in enumerate(zip(model.children(), expected, strict=True)):
        for got, want in zip(stage.parameters(), w, strict=True):
            close(got.detach(), want, f"weights of stage {s}, {when}")


# -- optimizers: torch's class, the reference's rule, the options both are given -------------------------------------


class Optimizer(NamedTuple):
    torch: type[torch.optim.Optimizer]
    rule: str
    options: Options


OPTIMIZERS = {
    "sgd": Optimizer(torch.optim.SGD, "sgd", {"lr": 0.05}),
    "momentum": Optimizer(torch.optim.SGD, "sgd", {"lr": 0.01, "momentum": 0.9}),
    "nesterov": Optimizer(torch.optim.SGD, "sgd", {"lr": 0.01, "momentum": 0.8, "nesterov": True}),
    "dampening": Optimizer(torch.optim.SGD, "sgd", {"lr": 0.03, "momentum": 0.8, "dampening": 0.3}),
    "adam": Optimizer(torch.optim.Adam, "adam", {"lr": 0.01, "betas": (0.8, 0.95)}),
    "adamw": Optimizer(torch.optim.AdamW, "adamw", {"lr": 0.01, "betas": (0.8, 0.95)}),
    "rmsprop": Optimizer(torch.optim.RMSprop, "rmsprop", {"lr": 0.005, "alpha": 0.9, "eps": 1e-3}),
}
ANY = ("sgd", "momentum", "nesterov", "dampening", "adam", "adamw")
MOMENTS = ("momentum", "nesterov", "dampening", "adam", "adamw")
DIRECTIONS = ("sgd", "momentum", "dampening", "adam", "adamw", "rmsprop")
PLAIN = ("sgd", "momentum", "adam", "adamw")  # where g enters v undamped
VELOCITY = ("momentum",)


def scheduled(options: Options, i: int, s: int) -> dict[str, Any]:
    """The rate of micro-batch i at stage s: it jumps, differs by stage and never repeats."""
    return {**options, "lr": options["lr"] * (0.6 + 0.4 * np.cos(1.1 * i + s)) * (0.5 if i % 7 == 3 else 1.0)}


# -- methods: how the library builds one, how the reference does -----------------------------------------------------


class Pair(NamedTuple):
    library: Callable[[int], Any]  # stages -> Method
    reference: Callable[..., Recurrence]
    optimizers: tuple[str, ...] = ANY


def create(name: str, **options: Any) -> Any:
    return pipeback.methods.create(name, **options)


def plain(name: str, cls: type[Recurrence], slack: int, allowed: tuple[str, ...] = ANY, **options: Any) -> Pair:
    """A method whose options have the same names in the library and in the reference, one micro-batch an update."""
    return Pair(
        lambda _: create(name, slack=slack, **options),
        lambda w, r, **k: cls(w, r, slack=slack, **options, **k),
        allowed,
    )


def flushed(name: str, m: int) -> Pair:
    return Pair(lambda _: create(name, micro_batches=m), lambda w, r, **k: Recurrence(w, r, slack=0, every=m, **k))


def two_bw(more: int, slack: int = 1) -> Pair:
    """Groups of slack · S + more micro-batches."""
    return Pair(
        lambda stages: create("pipedream_2bw", micro_batches=slack * stages + more, slack=slack),
        lambda w, r, **k: TwoBW(w, r, slack=slack, every=slack * len(w) + more, **k),
    )


def pipemare(slack: int, n: int, **options: Any) -> Pair:
    return Pair(
        lambda _: create("pipemare", micro_batches=n, slack=slack, **options),
        lambda w, r, **k: PipeMare(w, r, slack=slack, every=n, **options, **k),
    )


def corrected(name: str, slack: int, allowed: tuple[str, ...], options: dict[str, Any], **reference: Any) -> Pair:
    return Pair(
        lambda _: create(name, slack=slack, **options),
        lambda w, r, **k: Corrected(w, r, slack=slack, **reference, **k),
        allowed,
    )


def lwp(slack: int, form: str, **horizon: Any) -> Pair:
    allowed = VELOCITY if form == "velocity" else ANY
    return corrected("lwp", slack, allowed, dict(form=form, **horizon), predict=form, **horizon)


def sc(slack: int, horizon: float | None = None) -> Pair:
    options = {} if horizon is None else {"horizon": horizon}
    return corrected("sc", slack, PLAIN, options, spike=True, spike_horizon=horizon)


def chained(
    cls: type[Recurrence], names: tuple[str, ...], slack: int, allowed: tuple[str, ...], **reference: Any
) -> Pair:
    return Pair(
        lambda _: pipeback.chain(*(create(name, slack=slack) for name in names)),
        lambda w, r, **k: cls(w, r, slack=slack, **reference, **k),
        allowed,
    )


def xpipe(slack: int, k: int) -> Pair:
    return Pair(
        lambda _: create("pipeoptim", slack=slack, micro_batches=k),
        lambda w, r, **o: OptimizerPrediction(w, r, slack=slack, every=k, **o),
        DIRECTIONS,
    )


def lwp_then_sc(slack: int) -> Pair:
    return Pair(
        lambda _: pipeback.chain(create("lwp", form="weight", slack=slack), create("sc", slack=slack)),
        lambda w, r, **k: Corrected(w, r, slack=slack, predict="weight", spike=True, **k),
        PLAIN,
    )


PAIRS = {
    "sgd": Pair(lambda _: create("sgd"), lambda w, r, **k: Recurrence(w, r, slack=0, **k)),
    "gpipe-1": flushed("gpipe", 1),
    "gpipe-3": flushed("gpipe", 3),
    "gpipe-8": flushed("gpipe", 8),
    "one_f_one_b-2": flushed("one_f_one_b", 2),
    "one_f_one_b-5": flushed("one_f_one_b", 5),
    "zb_h1-3": flushed("zb_h1", 3),
    "zb_h2-8": flushed("zb_h2", 8),
    "pb-0": plain("pb", Recurrence, 0),
    "pb-1": plain("pb", Recurrence, 1),
    "pb-2": plain("pb", Recurrence, 2),
    "pipedream-1": plain("pipedream", PipeDream, 1),
    "pipedream-2": plain("pipedream", PipeDream, 2),
    "pipedream-sync-1": plain("pipedream", PipeDream, 1, vertical_sync=True),
    "pipedream-sync-2": plain("pipedream", PipeDream, 2, vertical_sync=True),
    "2bw-S": two_bw(0),
    "2bw-S+1": two_bw(1),
    "2bw-2S-slack-2": two_bw(0, slack=2),
    "pipemare": pipemare(2, 1, anneal=10),
    "pipemare-slack-1": pipemare(1, 1, anneal=7, decay=0.4),
    "pipemare-groups": pipemare(2, 2, anneal=6, warmup=8),
    "pipemare-groups-of-3": pipemare(2, 3, anneal=5, warmup=6),
    "pipemare-warmup": pipemare(2, 1, anneal=10, warmup=5),
    "pipemare-t1": pipemare(2, 1, anneal=10, t2=False),
    "pipemare-t2": pipemare(2, 1, anneal=10, t1=False),
    "pipemare-t3": pipemare(2, 4, anneal=10, t1=False, t2=False, warmup=8),
    "spectrain-v1": plain("spectrain", SpecTrain, 1, VELOCITY, version=1),
    "spectrain-v1-slack-2": plain("spectrain", SpecTrain, 2, VELOCITY, version=1),
    "spectrain-v2": plain("spectrain", SpecTrain, 1, VELOCITY, version=2),
    "spectrain-v2-slack-2": plain("spectrain", SpecTrain, 2, VELOCITY, version=2),
    "lwp-velocity": lwp(2, "velocity"),
    "lwp-velocity-slack-1": lwp(1, "velocity"),
    "lwp-velocity-T=2.5": lwp(2, "velocity", horizon=2.5),
    "lwp-weight": lwp(2, "weight"),
    "lwp-weight-slack-1": lwp(1, "weight"),
    "lwp-weight-T=3": lwp(2, "weight", horizon=3),
    "sc": sc(2),
    "sc-slack-1": sc(1),
    "sc-T=4": sc(2, horizon=4),
    "cerebras": corrected("cerebras", 2, VELOCITY, {}, predict="velocity", spike=True),
    "cerebras-slack-1": corrected("cerebras", 1, VELOCITY, {}, predict="velocity", spike=True),
    "lwp-weight-then-sc": lwp_then_sc(2),
    "lwp-weight-then-sc-slack-1": lwp_then_sc(1),
    "staleness_lr": plain("staleness_lr", StalenessRates, 2),
    "staleness_lr-p=0.5": plain("staleness_lr", StalenessRates, 1, power=0.5, scale=2.0),
    "ef": plain("ef", ErrorFeedback, 1),
    "ef-T=1.5": plain("ef", ErrorFeedback, 2, horizon=1.5),
    "ef-first": plain("ef", ErrorFeedback, 1, first=True),
    "dc_asgd": plain("dc_asgd", DelayCompensation, 1, strength=0.04),
    "dc_asgd-strong": plain("dc_asgd", DelayCompensation, 2, strength=3.0),
    "dc_asgd-adaptive": plain("dc_asgd", DelayCompensation, 2, strength=2.0, adaptive=True),
    "gap_aware": plain("gap_aware", GapAware, 1, (*ANY, "rmsprop")),
    "gap_aware-slack-2": plain("gap_aware", GapAware, 2, decay=0.9),
    "braking": plain("braking", Braking, 2, MOMENTS),
    "braking-0.5": plain("braking", Braking, 1, MOMENTS, strength=0.5),
    "pipeoptim": plain("pipeoptim", OptimizerPrediction, 1, DIRECTIONS),
    "pipeoptim-slack-2": plain("pipeoptim", OptimizerPrediction, 2, DIRECTIONS),
    "xpipe-2": xpipe(1, 2),
    "xpipe-3-slack-2": xpipe(2, 3),
    "msnag": plain("msnag", DecayedPrediction, 2, ANY),
    "msnag-slack-1": plain("msnag", DecayedPrediction, 1, ANY),
    "msnag-stash": plain("msnag", DecayedPrediction, 2, ANY, stash=True),
    "dc_asgd-then-pipeoptim": chained(CompensatedPrediction, ("dc_asgd", "pipeoptim"), 1, DIRECTIONS, strength=0.04),
    "staleness_lr-then-msnag": chained(SlowPrediction, ("staleness_lr", "msnag"), 2, ANY),
    "staleness_lr-then-lwp": chained(SlowVelocity, ("staleness_lr", "lwp"), 1, VELOCITY, predict="velocity"),
    "braking-then-sc": chained(BrakedSpike, ("braking", "sc"), 2, ("momentum", "adam", "adamw"), spike=True),
    "ef-then-staleness_lr": chained(FedBackRates, ("ef", "staleness_lr"), 1, ANY),
}


# -- the cases: pairwise over stages, decay, schedule and clipping ---------------------------------------------------


class Case(NamedTuple):
    method: str
    optimizer: str
    stages: int
    decay: float = 0.0
    schedule: bool = False
    clip: float | None = None
    maximize: bool = False


# every pair of (stages, decay, schedule, clip) occurs; four stages, where delays differ, have all of decay × schedule
ROWS = [
    (4, 0.0, False, None, False),
    (4, 0.1, False, 0.3, False),
    (4, 0.0, True, 0.3, False),
    (4, 0.1, True, None, False),
    (2, 0.0, False, 0.3, False),
    (2, 0.1, True, None, True),
    (1, 0.1, True, 0.3, False),
]


def cases() -> Iterator[Case]:
    for m, (name, pair) in enumerate(PAIRS.items()):
        for n, optimizer in enumerate(pair.optimizers):
            # momentum SGD is what the papers are written for: all rows. The others take one of two sets, in turn;
            # either has four stages with decay and with changing rates
            rows = ROWS if optimizer == "momentum" else [ROWS[r] for r in ((0, 3, 6), (1, 2, 5))[(m + n) % 2]]
            yield from (Case(name, optimizer, *row) for row in rows)


def usual() -> set[Case]:
    """Every method with momentum SGD at changing rates and in one more row, and with one other optimizer; one method
    with all of them, whose rows have every option.
    """
    found = {case for case in cases() if case.method == "pb-2"}
    for m, (name, pair) in enumerate(PAIRS.items()):
        mine = [case for case in cases() if case.method == name]
        papers = [case for case in mine if case.optimizer == "momentum"]
        found |= {papers[3], papers[[0, 1, 2, 4, 5, 6][m % 6]]}
        others = [optimizer for optimizer in pair.optimizers if optimizer != "momentum"]
        if others:
            found.add(next(case for case in mine if case.optimizer == others[m % len(others)]))
    return found


def label(case: Case) -> str:
    marks = [f"S{case.stages}", "decay" * bool(case.decay), "rates" * case.schedule]
    marks += ["clip" * bool(case.clip), "maximize" * case.maximize]
    return "-".join([case.method, case.optimizer, *filter(None, marks)])


class Both:
    """The pipeline and the recurrence, pushed side by side."""

    def __init__(self, method: Any, recurrence: Recurrence, case: Case, **options: Any) -> None:
        self.case, self.kind = case, OPTIMIZERS[case.optimizer]
        self.options = {**self.kind.options, "weight_decay": case.decay, "maximize": case.maximize}
        self.recurrence = recurrence
        self.pipe = pipeback.Pipeline(
            network([version[0].w for version in recurrence.history]),
            loss=nn.functional.mse_loss,
            optimizer=lambda ps: self.kind.torch(ps, **self.options),
            method=method,
            clip_norm=case.clip,
            **options,
        )
        self.count = 0

    def push(self, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> None:
        snapshot: list[list[Options]] = []
        for s, optimizer in enumerate(self.pipe.optimizers):
            now = scheduled(self.options, self.count, s) if self.case.schedule else self.options
            optimizer.param_groups[0]["lr"] = now["lr"]
            snapshot.append([now, now])
        loss = self.pipe.push(torch.from_numpy(x), torch.from_numpy(y))
        assert loss.ndim == 0
        close(float(loss), self.recurrence.push(x, y, snapshot), f"loss of push {self.count}")
        self.count += 1

    def compare(self, when: str) -> None:
        close_weights(self.pipe.model, self.recurrence.weights(), when)

    def drain(self) -> None:
        self.pipe.drain()
        self.recurrence.drain()


def start(case: Case, **options: Any) -> Both:
    pair = PAIRS[case.method]
    recurrence = pair.reference(initial(case.stages), OPTIMIZERS[case.optimizer].rule, clip=case.clip)
    recurrence.recompute = options.get("activations") == "recompute"
    return Both(pair.library(case.stages), recurrence, case, **options)
