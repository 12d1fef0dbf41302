"""The step of momentum SGD over rows: what one kernel does, and gradients that are products of columns with rows."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import pipeback
from pipeback.vectorized.stacks.eager_tick import steps_together
from pipeback.vectorized.stacks.stack import Stack
from pipeback.vectorized.steps.row_tensors import RowTensors
from pipeback.vectorized.steps.sgd_rows import Step

ROWS = 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rates", [[0.1] * ROWS, [0.1, 0.2, 0.3]], ids=["one rate", "rates"])
@pytest.mark.parametrize("decays", [(0.0, 0.0), (0.5, 0.5), (0.5, 0.0)], ids=str)
@pytest.mark.parametrize("some", [None, [1]], ids=["all", "some"])
@pytest.mark.parametrize("apart", [False, True], ids=["dense", "with gaps"])
def test_a_step_whose_gradients_are_in_the_velocities(dtype, rates, decays, some, apart):
    """v ← v + λ·w, then w ← w − η·v, whatever the weights' memory is like."""
    weights = [torch.randn(ROWS, 4, 6, dtype=dtype) for _ in decays]
    if apart:
        weights = [w[..., :5] for w in weights]
    velocities = [torch.randn_like(w) for w in weights]
    rows = RowTensors(weights, range(len(decays)), [], lambda *_: [velocities])
    before = [(w.double().clone(), v.double().clone()) for w, v in zip(weights, velocities, strict=True)]
    step = Step(0.9, decays, [rates] * len(decays), weights)
    rows.follow(step, some)
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 5e-2}[dtype]
    eta = torch.tensor(rates, dtype=torch.float64)[:, None, None]
    for n, (w, v) in enumerate(before):
        if some is None or n in some:
            v = v + decays[n] * w
            w = w - eta * v
        torch.testing.assert_close(velocities[n].double(), v, rtol=0, atol=tolerance)
        torch.testing.assert_close(weights[n].double(), w, rtol=0, atol=tolerance)


@pytest.mark.parametrize("samples", [1, 4])
def test_gradients_of_one_sample_are_columns_times_rows(samples, monkeypatch):
    """A library for products of matrices takes three times as long for them as a broadcast multiplication."""
    found = []
    hold = Stack._hold
    monkeypatch.setattr(Stack, "_hold", lambda stack, kept: (found.append((stack, kept)), hold(stack, kept)))
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)], nn.Linear(8, 3))
    pipe = pipeback.Pipeline(
        model, loss=nn.functional.mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        method="pb", micro_batch_size=samples, vectorize=True,
    )  # fmt: skip
    pipe.push(torch.randn(samples, 8), torch.randn(samples, 3))
    ((stack, waiting),) = found
    graph = waiting.written.backward.__self__.graph
    inner = [n.args[0].meta["val"].shape[-1] for n in graph.nodes if n.target is torch.ops.aten.bmm.default]
    assert sorted(inner) == ([8] if samples == 1 else [4, 8])
    assert steps_together(waiting.written, stack.rows.whole) is (samples == 1)


def test_spike_compensation_without_the_gradients():
    """Where F ran on w + c·v, its weights hold the old v, so that v' and they make the step."""
    m, decay, rates, late = 0.9, 0.3, [0.1, 0.2, 0.3], [4.0, 2.0, 0.0]
    w, v, g = torch.randn(3, ROWS, 4, 6, dtype=torch.float64).unbind()
    c = torch.tensor([-rate * D for rate, D in zip(rates, late, strict=True)], dtype=torch.float64)[:, None, None]
    step = Step(m, (decay,), [rates], [w], late=[late], ahead=[c])
    fore, moved, plain = w + c * v, w.clone(), w.clone()
    velocities = [v * m + g]
    RowTensors([moved], [0], [], lambda *_: [velocities]).follow(step, fore=[fore])
    others = [v.clone()]
    RowTensors([plain], [0], [], lambda *_: [others]).move(step, [g])
    torch.testing.assert_close(velocities, others, rtol=0, atol=1e-14)
    torch.testing.assert_close(moved, plain, rtol=0, atol=1e-14)
    at_once, these = w.clone(), [v.clone()]  # velocities are decayed and stepped in one pass
    rows = RowTensors([at_once], [0], [], lambda *_: [these])
    assert rows.decays(step) and not rows.decays(replace(step, decays=(0.0,)))
    rows.undo(step, [fore], [g.mT.contiguous().mT])
    torch.testing.assert_close(these, others, rtol=0, atol=1e-14)
    torch.testing.assert_close(at_once, plain, rtol=0, atol=1e-14)


@pytest.mark.parametrize("changes", [
    {"ahead": []}, {"varies": True}, {"late": []}, {"momentum": 0.0}, {"ahead": [torch.full((ROWS, 1), -1e-3)]},
    {"like": [torch.ones(ROWS, 4, dtype=torch.bfloat16)]},
], ids=lambda changes: next(iter(changes)))  # fmt: skip
def test_where_the_old_velocity_cannot_be_had(changes):
    """Of F's weights: they are not there, or c is so small that rounding would show."""
    w = torch.randn(ROWS, 4)
    how = {"momentum": 0.9, "like": [w], "late": [[2.0] * ROWS], "ahead": [torch.full((ROWS, 1), -0.2)]}
    made = [Step(decays=(0.0,), rates=[[0.1] * ROWS], **{**how, **some}) for some in ({}, changes)]
    assert [bool(step.undone) for step in made] == [True, False]
