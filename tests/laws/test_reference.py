"""The reference itself, against torch alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeback import schedules
from pipeback.schedules import timeline
from tests.laws.equations import BATCH, OPTIMIZERS, close, close_weights, initial, network, samples, scheduled
from tests.laws.reference import Recurrence, backward, forward


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
