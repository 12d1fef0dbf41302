"""Gradients: the sums of a stage's gradients for its coming update, where nobody else clears them or adds to them.

Autograd adds to `.grad` of the user's parameters. Users clear these by habit (`model.zero_grad()` before each
batch), and a backward of their own adds to them. So the sums lie there during a B only. Where B runs in a thread of our
own, the user may clear them even then; there autograd hands the gradients over, and they are added here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeback.private import gradient_hooks, identity, run_backward


class GradientSums(NamedTuple):
    """Gradient sums of one update, and how many micro-batches (or samples) they are of."""

    grads: Sequence[Tensor | None]
    number: float


def sparse_rows(module: nn.Module, params: Sequence[Tensor]) -> list[int]:
    """The numbers of the weights whose gradients are sparse: some rows of a table."""
    tables = [m.weight for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse]
    return [n for n, p in enumerate(params) if any(p is table for table in tables)]


class Gradients:
    """Of the parameters `params`, in micro-batch order.

    rows: see `sparse_rows`. shows: they stay in `.grad` from a B to the next forward or step (`hide`), for whoever
    computes the loss outside and looks at them, or changes them. threaded: B is done in a thread of our own, while the
    user's may clear and replace what is in `.grad`: the sums are shown there, and only changes in place count.
    """

    def __init__(self, params: Sequence[Tensor], rows: Collection[int] = ()) -> None:
        self.params, self.rows = params, rows
        self.shows = self.threaded = False
        self.values: list[Tensor | None] = [None] * len(params)
        self._shown = False

    def lend(self) -> None:
        """Before B: put the sums where autograd adds to them."""
        self.adopt()
        for p, g in zip(self.params, self.values, strict=True):
            p.grad = g  # whatever others may have left there

    def keep(self) -> None:
        """After B: take the sums back."""
        self.values = [p.grad for p in self.params]
        if self.shows:
            self._shown = True
        else:
            for p in self.params:
                p.grad = None

    def adopt(self) -> None:
        """Take what somebody has put in the place of those that were shown; those that were cleared are kept."""
        if self._shown and not self.threaded:
            self.values = [g if p.grad is None else p.grad for p, g in zip(self.params, self.values, strict=True)]

    def show(self) -> None:
        """Put the sums into `.grad`, to be looked at."""
        if self.shows:
            self._shown = True
            for p, g in zip(self.params, self.values, strict=True):
                p.grad = g

    def hide(self) -> None:
        """Have no parameter show a gradient."""
        if self._shown:
            self.adopt()
            self._shown = False
            for p in self.params:
                p.grad = None

    def take(self) -> list[Tensor | None]:
        """Give all sums away; new ones begin."""
        self.hide()
        values, self.values = self.values, [None] * len(self.params)
        return values

    def put(self, values: Iterable[Tensor | None]) -> None:
        """Have these sums instead."""
        self.hide()
        self.values = list(values)

    def add(self, found: Iterable[Tensor | None]) -> None:
        """Add the gradients of a micro-batch, which may be somebody else's tensors: they are not changed later on."""
        self.values = [_sum(g, new) for g, new in zip(self.values, found, strict=True)]

    def packed(self, count: float) -> Tensor:
        """What replicas add up, in one vector: all gradients, then which weights have one, then the count."""
        there = [float(g is not None) for g in self.values]
        kind = self.params[0] if self.params else torch.empty(0)
        pairs = list(zip(self.params, self.values, strict=True))
        grads = [torch.zeros_like(p) if g is None else dense(g) for p, g in pairs]
        grads += [_touched(*pairs[n]) for n in self.rows]
        # a half type cannot count far; sums of two replicas in float32 round to the same half
        dtype = torch.promote_types(kind.dtype, torch.float32)
        tail = torch.tensor([*there, count], dtype=dtype, device=kind.device)
        return torch.cat([*(g.flatten().to(kind.device, dtype) for g in grads), tail])

    def unpack(self, total: Tensor) -> float:
        """Take the sum of all replicas for one's own; returns the count."""
        n = len(self.params)
        flags: list[float] = total[total.numel() - n - 1 :].tolist()
        count, at = flags.pop(), 0
        values: list[Tensor | None] = []
        for p, there in zip(self.params, flags, strict=True):
            values.append(total[at : at + p.numel()].view_as(p).to(p) if there else None)
            at += p.numel()
        for row in self.rows:
            p, g = self.params[row], values[row]
            touched, at = total[at : at + len(p)].nonzero().T.to(p.device), at + len(p)
            values[row] = (
                None if g is None else torch.sparse_coo_tensor(touched, g[touched[0]], p.shape, check_invariants=False)
            )
        self.put(values)
        return count


def nothing(set_to_none: bool = True) -> None:
    """What `zero_grad` of a stage's optimizer does: a step that calls it still needs its gradients."""


def differentiate(
    roots: Sequence[Tensor], seeds: Sequence[Tensor], leaves: Sequence[Tensor], every: Sequence[Gradients]
) -> None:
    """One autograd call through the graphs of any number of stages, whose gradients are added to `every` one's.

    leaves: the inputs of the stages, which get theirs in `.grad`.
    """
    # the user's hooks that are called once `.grad` is there need it to be there
    if every[0].threaded and not any(gradient_hooks(p) for each in every for p in each.params):
        return _handed_over(roots, seeds, leaves, every)
    for each in every:
        each.lend()
    try:
        if roots:
            run_backward(tuple(roots), tuple(seeds), False, False, (), allow_unreachable=True, accumulate_grad=True)
    finally:
        for each in every:
            each.keep()


def _handed_over(
    roots: Sequence[Tensor], seeds: Sequence[Tensor], leaves: Sequence[Tensor], every: Sequence[Gradients]
) -> None:
    params = [p for each in every for p in each.params]
    inputs = [t for t in (*leaves, *params) if t.requires_grad]
    if not roots or not inputs:
        return
    found = run_backward(
        tuple(roots), tuple(seeds), False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )
    # one tensor may be the gradient of several leaves, where autograd would have made a copy
    seen = {identity(g) for g in seeds if g.layout is torch.strided}
    grads: dict[int, Tensor | None] = {}
    for leaf, g in zip(inputs, found, strict=True):
        grads[id(leaf)] = None if g is None else _own(leaf, g.detach(), seen)
    for leaf in leaves:
        if leaf.requires_grad:
            leaf.grad = grads[id(leaf)]
    for each in every:
        each.add([grads.get(id(p)) for p in each.params])
        each.show()


def _own(leaf: Tensor, gradient: Tensor, seen: set[int]) -> Tensor:
    """As autograd puts it into `.grad`: strides of the leaf, and memory of its own."""
    if gradient.layout is not torch.strided:
        return gradient
    storage = identity(gradient)
    sizes = zip(gradient.stride(), leaf.stride(), leaf.shape, strict=True)
    if storage in seen or any(mine != wanted and n > 1 for mine, wanted, n in sizes):
        gradient = torch.empty_like(leaf, dtype=gradient.dtype, requires_grad=False).copy_(gradient)
        storage = identity(gradient)
    seen.add(storage)
    return gradient


def dense(gradient: Tensor) -> Tensor:
    """The gradient with its zeros."""
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def _touched(p: Tensor, gradient: Tensor | None) -> Tensor:
    """1 for each row of a table that has a gradient, 0 for the others."""
    if gradient is None or gradient.layout is torch.strided:
        return torch.full((len(p),), float(gradient is not None), device=p.device)
    return torch.zeros(len(p), device=p.device).index_fill_(0, gradient.coalesce().indices()[0], 1.0)


def _bounded(gradient: Tensor, value: float) -> tuple[Tensor, Tensor]:
    """Clamped to ±value, and whether any entry was beyond."""
    if gradient.layout is torch.strided:
        return gradient.clamp(-value, value), (gradient.abs() > value).any()
    whole = gradient.coalesce()
    bounded, over = _bounded(whole.values(), value)
    return torch.sparse_coo_tensor(
        whole.indices(), bounded, whole.shape, is_coalesced=True, check_invariants=False
    ), over


def _sum(total: Tensor | None, new: Tensor | None) -> Tensor | None:
    if total is None or new is None:
        return new if total is None else total
    if total.layout is not torch.strided and new.layout is torch.strided:
        return new + total  # the only order that torch has for a sparse and a dense one
    return total + new


def clipped(
    grads: Sequence[Tensor | None],
    norm: float | None,
    value: float | None,
    total: Tensor | None = None,
) -> tuple[Sequence[Tensor | None], Tensor | None]:
    """Gradients, clipped by norm and by value, and whether any was, as a 0-d tensor; None where nothing clips.

    total: the norm where others have the rest of the gradient.
    """
    there = [g for g in grads if g is not None]
    if not there:
        return grads, None
    found = None
    if norm is not None:
        if total is None:  # torch knows the norm of a sparse gradient from 2.13 on
            total = torch.nn.utils.get_total_norm([g.coalesce().values() if g.is_sparse else g for g in there])
        # not clip_grad_norm_, which would change a gradient that was just sent upstream
        scale = torch.clamp(norm / (total + 1e-6), max=1.0)
        grads = [None if g is None else g * scale.to(g.dtype) for g in grads]
        found = scale < 1
    if value is not None:
        pairs = [None if g is None else _bounded(g, value) for g in grads]
        grads = [None if pair is None else pair[0] for pair in pairs]
        over = torch.stack([pair[1] for pair in pairs if pair is not None]).any()
        found = over if found is None else found | over
    return grads, found
