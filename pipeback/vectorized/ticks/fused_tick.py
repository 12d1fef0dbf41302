"""Fused tick: all that stacks and the last stage do at a tick, as one compiled function or as a CUDA graph.

In a graph the tensors that F (forward) saves for B (backward) are put into their rings, too, and what stacks of the
same turn hand to each other is copied to where the graph reads it at the next tick.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from pipeback.vectorized.making.cuda_graph import CudaGraphed, Pair, copy_each, side_by_side
from pipeback.vectorized.steps.row_tensors import AnyStep
from pipeback.vectorized.steps.step_form import How
from pipeback.vectorized.ticks.loss_stage import LossStage
from pipeback.vectorized.ticks.tick import Piece, StackTick


def fused(
    moving: Sequence[StackTick],
    judge: LossStage | None,
    steps: Sequence[AnyStep],
    compile: Callable[[Any], Any],
) -> Callable[..., Any]:
    """Return all stacks and the last stage as one compiled function: (fixed, changing) -> the outputs of `compiled`.

    steps: one for each stack and the last stage, of the form for which the function is compiled.
    """
    parts: list[StackTick | LossStage] = [*moving, *([] if judge is None else [judge])]
    calls = [partial(one.compiled, How.of(step)) for one, step in zip(parts, steps, strict=True)]
    cuda = moving[0].rings.device.type == "cuda"

    def tick(fixed: Sequence[tuple[Any, ...]], changing: Sequence[tuple[Any, ...]]) -> list[Any]:
        every = [partial(call, *some, *rest) for call, some, rest in zip(calls, fixed, changing, strict=True)]
        return side_by_side(every, cuda)

    def then(found: Sequence[Any], changing: Sequence[tuple[Any, ...]]) -> None:
        puts = [
            partial(one.rings.put_at, waits.write, saved)
            for one, (waits, *_), (_, saved, *_) in zip(moving, changing, found, strict=False)
        ]
        side_by_side([*puts, partial(copy_each, _handed_on(moving, judge, found, changing))], cuda)

    tick.__code__ = tick.__code__.replace(co_name="tick")  # torch counts recompilations per code object
    compiled: Callable[..., Any] = compile(tick)
    if isinstance(compiled, CudaGraphed):
        compiled.then = then
    return compiled


def hands_on(moving: Sequence[StackTick], judge: LossStage | None) -> bool:
    """Whether a graph of these stacks and the last stage hands on all they need at the next tick, but for the input of
    the pipeline and the target.
    """
    pieces = [piece for one in moving for some in one.pieces[one.all] for piece in some]
    inside = all(piece.late == 1 and piece.source in moving for piece in pieces if piece.source is not None)
    ends = sorted(piece.stage for piece in pieces if piece.source is None)
    return inside and judge is not None and ends == [0, judge.stage.index - 1]


def _handed_on(
    moving: Sequence[StackTick], judge: LossStage | None, found: Sequence[Any], changing: Sequence[tuple[Any, ...]]
) -> Iterator[Pair]:
    """Yield each place where the graph reads what another stack of it sends, and the tensor that is sent."""
    sent = {one: (ys, gxs) for one, (ys, _, gxs, _) in zip(moving, found, strict=False)}
    for one, (_, _, xs, gs, *_) in zip(moving, changing, strict=False):
        inward, back = one.pieces[one.all]
        for m, piece in enumerate(inward):
            if piece.source in sent:
                yield from ((some[m], y) for some, y in zip(xs, sent[piece.source][0], strict=True))
        for m, piece in enumerate(back):
            gradients = _gradients(piece, judge, sent, found)
            if gradients is not None:
                yield from ((some[m], gradients[n]) for some, n in zip(gs, one.written.gives, strict=True))
    if judge is not None:
        for one in moving:
            if one.stack.last == judge.stage.index - 1:
                row = None if one.stack.alone else one.stack.numbers.index(judge.stage.index - 1)
                ys = sent[one][0] if row is None else [y[row] for y in sent[one][0]]
                yield from zip(changing[-1][0], ys, strict=True)


def _gradients(piece: Piece, judge: LossStage | None, sent: dict[Any, Any], found: Sequence[Any]) -> Any:
    """Return what comes back through a piece; None if it comes from outside of the graph."""
    if piece.source in sent:
        return sent[piece.source][1]
    from_judge = judge is not None and piece.source is None and piece.stage + 1 == judge.stage.index
    return found[-1][1] if from_judge else None
