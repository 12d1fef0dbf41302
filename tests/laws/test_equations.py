"""Law: methods are their equations. Each equals the float64 recurrence of `reference.py` to 1e-12.

Compared are the loss of every push, the weights in flight (quiesced), after a drain, on the way after it, and after
the second drain, and which version every F and B used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import pipeback
from pipeback import schedules
from pipeback.schedules import timeline
from tests.choice import mostly_rare

from .reference import (
    Corrected,
    Options,
    PipeDream,
    PipeMare,
    Recurrence,
    Snapshot,
    SpecTrain,
    Tensors,
    TwoBW,
    backward,
    forward,
)

TOLERANCE = 1e-12
BATCH = 2
PUSHES, MORE = 25, 11  # micro-batches before the first drain, and after it


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
}
ANY = ("sgd", "momentum", "nesterov", "dampening", "adam", "adamw")
PLAIN = ("sgd", "momentum")  # where g enters v undamped
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


@pytest.mark.parametrize("case", mostly_rare(cases(), *usual()), ids=label)
def test_method_is_its_equations(case: Case) -> None:
    compare(start(case), case)


@pytest.mark.parametrize("name", PAIRS)
def test_with_recomputed_activations(name: str) -> None:
    """B's activations belong to the weights that B runs on."""
    case = Case(name, "momentum", 4, decay=0.1, schedule=True)
    compare(start(case, activations="recompute"), case)


def compare(both: Both, case: Case) -> None:
    xs, ys = samples(case.stages, BATCH * (PUSHES + MORE))
    assert list(both.pipe.delays) == [both.recurrence.delay(s) for s in range(case.stages)]
    for i, (x, y) in enumerate(zip(xs.reshape(-1, BATCH, 3), ys.reshape(-1, BATCH, 2))):
        if i == PUSHES:
            both.drain()
            both.compare("drained")
        both.push(x, y)
        if i % 5 == 3 or i == PUSHES - 1:
            both.compare(f"in flight after push {i}")
    both.compare("in flight, refilled")
    both.drain()
    both.compare("drained again")


@pytest.mark.parametrize("name", PAIRS)
def test_versions_used_are_those_of_the_recurrence(name: str) -> None:
    both = start(Case(name, PAIRS[name].optimizers[-1] if "momentum" not in PAIRS[name].optimizers else "momentum", 4))
    xs, ys = samples(4, BATCH * 30)
    for i, (x, y) in enumerate(zip(xs.reshape(-1, BATCH, 3), ys.reshape(-1, BATCH, 2))):
        if i == 17:
            both.drain()
        both.push(x, y)
    both.drain()
    used = {(r.stage, r.kind, r.mb): r.version for r in both.pipe.ledger}
    assert used == {(s, kind, i): version for s, kind, i, version in both.recurrence.ledger}


# -- options beyond the table ----------------------------------------------------------------------------------------

FLOWING = ("pb-2", "pipedream-1", "pipemare", "spectrain-v1", "lwp-velocity", "lwp-weight", "sc", "cerebras")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["W-b", "b-W"])
@pytest.mark.parametrize("name", [*FLOWING, "lwp-weight-then-sc", "spectrain-v2"])
def test_parameter_groups_keep_their_own_options(name: str, order: tuple[int, int]) -> None:
    """W and b of a stage in two groups: rates, momenta and decays of their own, all of them changing at every push."""
    pair, weights = PAIRS[name], initial(4)
    recurrence = pair.reference(weights, "sgd")

    def options(i: int, s: int, p: int) -> dict[str, Any]:
        momentum, decay = (0.9 - 0.02 * (i % 4), 0.0) if p else (0.7 + 0.02 * ((i + s) % 5), 0.05)
        base = {"lr": 0.03 if p else 0.01, "momentum": momentum, "weight_decay": decay}
        return scheduled(base, i + 3 * p, s)

    def optimizer(ps: Any) -> torch.optim.Optimizer:
        w, b = list(ps)
        groups = [{"params": [w], "lr": 0.01}, {"params": [b], "lr": 0.03}]
        return torch.optim.SGD([groups[p] for p in order], lr=1.0, momentum=0.5)

    pipe = pipeback.Pipeline(network(weights), loss=nn.functional.mse_loss, optimizer=optimizer, method=pair.library(4))
    xs, ys = samples(4, BATCH * PUSHES)
    for i, (x, y) in enumerate(zip(xs.reshape(-1, BATCH, 3), ys.reshape(-1, BATCH, 2))):
        snapshot: Snapshot = [[options(i, s, p) for p in range(2)] for s in range(4)]
        for s, opt in enumerate(pipe.optimizers):
            for p, group in zip(order, opt.param_groups, strict=True):
                group.update(snapshot[s][p])
        loss = pipe.push(torch.from_numpy(x), torch.from_numpy(y))
        close(float(loss), recurrence.push(x, y, snapshot), f"loss of push {i}")
    close_weights(pipe.model, recurrence.weights(), "in flight")
    pipe.drain()
    recurrence.drain()
    close_weights(pipe.model, recurrence.weights(), "drained")


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
def test_a_flush_a_push_whatever_its_length(name: str) -> None:
    """micro_batches=None: pushes of 3, 1 and 5 micro-batches, the last of each short; micro-batches weigh equally."""
    weights = initial(4)
    recurrence = Recurrence(weights, "sgd", slack=0, every=None)
    options = {"lr": 0.05, "momentum": 0.9}
    pipe = pipeback.Pipeline(
        network(weights),
        loss=nn.functional.mse_loss,
        optimizer=lambda ps: torch.optim.SGD(ps, **options),
        method=name,
        micro_batch_size=BATCH,
    )
    rows = 0
    xs, ys = samples(4, 64)
    for size in (5, 1, 9, 5, 2, 6):
        x, y = xs[rows : rows + size], ys[rows : rows + size]
        rows += size
        loss = pipe.push(torch.from_numpy(x), torch.from_numpy(y))
        cuts = range(0, size, BATCH)
        parts = [recurrence.push(x[c : c + BATCH], y[c : c + BATCH], [[options] * 2] * 4) for c in cuts]
        recurrence.drain()
        close(float(loss), np.mean(parts), f"loss of a push of {size} samples")
        close_weights(pipe.model, recurrence.weights(), f"after a push of {size} samples")


@pytest.mark.parametrize("name", ["pb-2", "cerebras", "gpipe-3", "2bw-S", "pipemare-groups", "spectrain-v1"])
def test_a_push_of_several_micro_batches_is_that_many_pushes(name: str) -> None:
    pair, weights = PAIRS[name], initial(4)
    recurrence = pair.reference(weights, "sgd")
    options = {"lr": 0.01, "momentum": 0.9}
    pipe = pipeback.Pipeline(
        network(weights),
        loss=nn.functional.mse_loss,
        optimizer=lambda ps: torch.optim.SGD(ps, **options),
        method=pair.library(4),
        micro_batch_size=BATCH,
    )
    rows = 0
    xs, ys = samples(4, 64)
    for n, size in enumerate((7, 2, 1, 12, 8, 5, 16)):
        now = scheduled(options, n, 0)
        for opt in pipe.optimizers:
            opt.param_groups[0]["lr"] = now["lr"]
        x, y = xs[rows : rows + size], ys[rows : rows + size]
        rows += size
        loss = pipe.push(torch.from_numpy(x), torch.from_numpy(y))
        parts = [recurrence.push(x[c : c + BATCH], y[c : c + BATCH], [[now] * 2] * 4) for c in range(0, size, BATCH)]
        close(float(loss), np.mean(parts), f"loss of a push of {size} samples")
        close_weights(pipe.model, recurrence.weights(), f"in flight after a push of {size} samples")
    pipe.drain()
    recurrence.drain()
    close_weights(pipe.model, recurrence.weights(), "drained")


@pytest.mark.parametrize("warmup", [40, 200])
def test_a_long_warmup_hides_no_delay(warmup: int) -> None:
    """D of PipeMare is that of the flowing part, however late it begins."""
    pipe = pipeback.Pipeline(
        network(initial(2)),
        loss=nn.functional.mse_loss,
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.01),
        method=create("pipemare", anneal=10, warmup=warmup, micro_batches=4),
    )
    assert list(pipe.delays) == [1, 0]  # ⌈2 (S − 1 − s) / 4⌉
    pipe = pipeback.Pipeline(
        network(initial(2)),
        loss=nn.functional.mse_loss,
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.01),
        method=create("pipemare", anneal=10, warmup=warmup),
    )
    assert list(pipe.delays) == [2, 0]


@pytest.mark.parametrize("drained_at", [3, 4, 7])
def test_a_drain_does_not_begin_the_warmup_anew(drained_at: int) -> None:
    """A drain inside T3, in mid-flush and at the end of one: the warm-up goes on where it was."""
    both = start(Case("pipemare-groups", "momentum", 4, schedule=True))
    xs, ys = samples(4, BATCH * PUSHES)
    for i, (x, y) in enumerate(zip(xs.reshape(-1, BATCH, 3), ys.reshape(-1, BATCH, 2))):
        if i == drained_at:
            both.drain()
        both.push(x, y)
        both.compare(f"after push {i}")
    both.drain()
    both.compare("drained")


# -- what the equations do not allow ---------------------------------------------------------------------------------

NESTEROV = {"lr": 0.1, "momentum": 0.9, "nesterov": True}
DAMPENING = {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        *((n, torch.optim.SGD, o) for n in ("sc", "lwp", "cerebras", "spectrain") for o in (NESTEROV, DAMPENING)),
        *((n, torch.optim.Adam, {"lr": 0.1}) for n in ("sc", "lwp", "cerebras", "spectrain")),
        *((n, torch.optim.AdamW, {"lr": 0.1}) for n in ("sc", "lwp", "cerebras")),
        *((n, torch.optim.SGD, {"lr": 0.1}) for n in ("lwp", "cerebras")),
    ],
)
def test_what_the_equations_do_not_allow_is_refused_and_the_weight_form_named(
    name: str, kind: type[torch.optim.Optimizer], options: Options
) -> None:
    with pytest.raises(ValueError, match=r"(?s)lwp.*weight|weight.*lwp"):
        pipeback.Pipeline(
            network(initial(2)),
            loss=nn.functional.mse_loss,
            optimizer=lambda ps: kind(ps, **options),
            method=create(name),
        )


def test_two_bw_needs_a_group_as_long_as_the_pipeline() -> None:
    with pytest.raises(ValueError, match="4"):
        pipeback.Pipeline(
            network(initial(4)),
            loss=nn.functional.mse_loss,
            optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1),
            method=create("pipedream_2bw", micro_batches=3),
        )


# -- the reference itself, against torch alone -----------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("every", [1, 3])
def test_the_reference_without_delay_is_torch(optimizer: str, clip: float | None, maximize: bool, every: int) -> None:
    kind, weights, stages = OPTIMIZERS[optimizer], initial(4), 4
    options = {**kind.options, "weight_decay": 0.1, "maximize": maximize}
    recurrence = Recurrence(weights, kind.rule, slack=0, every=every, clip=clip)
    model = network(weights)
    opts = [kind.torch(stage.parameters(), **options) for stage in model]
    xs, ys = samples(4, 24 * BATCH)
    for i, (x, y) in enumerate(zip(xs.reshape(-1, BATCH, 3), ys.reshape(-1, BATCH, 2))):
        snapshot = [[scheduled(options, i, s)] * 2 for s in range(stages)]
        loss = nn.functional.mse_loss(model(torch.from_numpy(x)), torch.from_numpy(y))
        (loss / every).backward()
        close(loss.item(), recurrence.push(x, y, snapshot), f"loss {i}")
        if i % every == every - 1:
            for s, (stage, opt) in enumerate(zip(model, opts, strict=True)):
                if clip:
                    nn.utils.clip_grad_norm_(stage.parameters(), clip)
                opt.param_groups[0]["lr"] = snapshot[s][0]["lr"]
                opt.step()
                opt.zero_grad()
        close_weights(model, recurrence.weights(), f"after {i}")


def test_the_reference_differentiates_as_torch_does_when_contents_are_swapped() -> None:
    """Forward on w_F, other contents in the same storage, backward: torch's dx is dz · W_B, of the swapped ones."""
    used, newer = initial(3, seed=2), initial(3, seed=3)
    model = network(used)
    x, y = samples(3, BATCH)
    loss = nn.functional.mse_loss(model(torch.from_numpy(x)), torch.from_numpy(y))
    for stage, w in zip(model, newer, strict=True):
        for p, value in zip(stage.parameters(), w, strict=True):
            p.data.copy_(torch.from_numpy(value))  # .data: the graph's version counter does not see it
    loss.backward()
    ys = [x]
    for s, w in enumerate(used):
        ys.append(forward(w, ys[-1], s == 2))
    g = 2 * (ys[-1] - y) / y.size
    for s in (2, 1, 0):
        gradients, g = backward(newer[s], ys[s], ys[s + 1], g, s == 2)
        for p, want in zip(model[s].parameters(), gradients, strict=True):
            close(p.grad, want, f"gradient of stage {s}")


def test_the_reference_counts_the_delays_that_the_programs_have() -> None:
    """Its formulas for D and for SpecTrain's horizons, against those counted on the timeline."""
    for stages in (1, 2, 3, 4, 5, 8):
        for slack in (1, 2):
            counted = timeline.horizons(schedules.flowing(slack), stages)
            assert counted == [(slack * (stages - 1 - s) + s // 2, s // 2) for s in range(stages)]
            for every in (1, 2, 3, 4):
                recurrence = Recurrence(initial(min(stages, 5)), "sgd", slack=slack, every=every)
                recurrence.stages = stages
                assert [recurrence.delay(s) for s in range(stages)] == timeline.delays(
                    schedules.flowing(slack, every), stages
                )
