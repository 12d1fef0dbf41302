"""Law: methods are their equations. Each equals the float64 recurrence of `reference.py` to 1e-12.

Compared are the loss of every push, the weights in flight (quiesced), after a drain, on the way after it, and after
the second drain, and which version every F and B used.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pipeback
from tests.helpers.choice import mostly_rare
from tests.laws.equations import (
    BATCH,
    PAIRS,
    Both,
    Case,
    cases,
    close,
    close_weights,
    create,
    initial,
    label,
    network,
    samples,
    scheduled,
    start,
    usual,
)
from tests.laws.reference import Options, Recurrence, Snapshot

OF_EACH_KIND = (
    "sgd", "gpipe-3", "one_f_one_b-5", "pb-2", "pipedream-1", "pipedream-sync-2", "2bw-S+1", "pipemare-groups",
    "pipemare", "spectrain-v1", "spectrain-v2", "lwp-velocity", "lwp-weight", "sc", "cerebras", "lwp-weight-then-sc",
)  # fmt: skip
PUSHES, MORE = 25, 11  # micro-batches before the first drain, and after it


@pytest.mark.parametrize("case", mostly_rare(cases(), *usual()), ids=label)
def test_method_is_its_equations(case: Case) -> None:
    compare(start(case), case)


@pytest.mark.parametrize("name", mostly_rare(PAIRS, *OF_EACH_KIND))
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
        *((n, torch.optim.Adam, {"lr": 0.1}) for n in ("lwp", "cerebras", "spectrain")),
        *((n, torch.optim.AdamW, {"lr": 0.1}) for n in ("lwp", "cerebras")),
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
