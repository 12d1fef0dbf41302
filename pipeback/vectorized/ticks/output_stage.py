"""Output stage: the last stage as a graph of F (forward) and one of B (backward), where the loss is computed outside of
the pipeline, between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeback.stages.stage import Stage
from pipeback.vectorized.making.verify import examples, verified
from pipeback.vectorized.steps.row_tensors import AnyStep
from pipeback.vectorized.steps.rows import Rows
from pipeback.vectorized.ticks.loss_stage import form
from pipeback.vectorized.tracing.forms import Kind, floating, leaves, packed
from pipeback.vectorized.tracing.graphs import direct

Left = tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]  # weights, outputs, and what F has saved


class OutputStage:
    """The last stage as graphs, since its F and B are of the same micro-batch."""

    def __init__(self, stage: Stage, rows: Rows, x: Any) -> None:
        """rows: the stage's weights. x: an input. Raises `Unfit` where the stage cannot be written as graphs."""
        self.stage, self.rows, self.form = stage, rows, form(x)
        xs = leaves(x)
        kind = Kind(tuple((tuple(v.shape), v.dtype) for v in xs), type(x) is tuple, 0, stage.learnt.casts)
        made = examples(kind, 1, xs[0].device)
        some = [a if floating(a.dtype) else v for a, v in zip(made, xs, strict=True)]
        self._graphs = verified([stage], rows.weights, rows.trained, some, kind, [0], 1).written.each(direct)
        self._packed = kind.packed

    def eager(self, x: Any, step: AnyStep, judged: Callable[[Any], Any]) -> tuple[Any, list[Tensor]]:
        """Return the gradient of the input, and those of the weights. judged: its output -> the gradient of that."""
        output, left = self.forward(x, step)
        return self.backward(left, judged(output))

    def forward(self, x: Any, step: AnyStep) -> tuple[Any, Left]:
        """Return the output, and what waits for the backward."""
        graphs, weights = self._graphs, self.rows.whole.shifted(step.ahead)
        found = graphs.forward(*weights, *leaves(x))
        ys, saved = found[: graphs.outputs], found[graphs.outputs :]
        return packed(ys, graphs.packs), (weights, ys, saved)

    def backward(self, left: Left, gradient: Any) -> tuple[Any, list[Tensor]]:
        """Return the gradient of the input, and those of the weights. gradient: of the output."""
        graphs, (weights, ys, saved), gs = self._graphs, left, leaves(gradient)
        given = [torch.zeros_like(ys[n]) if gs[n] is None else gs[n].contiguous() for n in graphs.gives]
        back = graphs.backward(*saved, *graphs.made(*weights), *given)
        return packed(back[len(weights) :], self._packed), [back[n] for n in self.rows.trained]
