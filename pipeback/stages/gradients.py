"""Gradients: the gradient sums of a stage for its next update, kept where nobody else clears them or adds to them.

Autograd adds to `.grad` of the user's parameters. Users clear these by habit (`model.zero_grad()` before each
batch), and a backward of their own adds to them. So the sums lie in `.grad` only during a backward (B) of the stage.
Where B runs in a thread of our own, the user may clear them even then; in that case autograd returns the gradients of
the first micro-batch, and those of others are added here before they get to `.grad` (intercepted.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeback.private import gradient_hooks, identity, run_backward
from pipeback.stages.intercepted import Intercepts, able, taking
from pipeback.stages.postponed import SplitBackward


class GradientSums(NamedTuple):
    """The gradient sums of one update, and the number of micro-batches (or samples) in them.

    owned: whether each may be changed, since nobody else has it. clipped: whether any was clipped already.
    """

    grads: Sequence[Tensor | None]
    number: float
    owned: Sequence[bool] = ()
    clipped: Tensor | None = None


def sparse_rows(module: nn.Module, params: Sequence[Tensor]) -> list[int]:
    """The numbers of the weights whose gradients are sparse: some rows of a table."""
    tables = [m.weight for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse]
    return [n for n, p in enumerate(params) if any(p is table for table in tables)]


class Gradients:
    """The gradient sums of the parameters `params`, added in micro-batch order.

    rows: see `sparse_rows`. shows: whether the sums stay in `.grad` from a B to the next forward or step (`hide`), for
    a user who computes the loss outside the pipeline and reads or changes them. threaded: whether B runs in a thread of
    our own. The user's thread may then clear and replace `.grad` meanwhile, so that only in-place changes of the sums
    count, and what lies in `.grad` when a step begins.
    """

    def __init__(self, params: Sequence[Tensor], rows: Collection[int] = ()) -> None:
        self.params, self.rows = params, rows
        self.shows = self.threaded = False
        self.values: list[Tensor | None] = [None] * len(params)
        self._made: list[Tensor | None] = [None] * len(params)  # sums that were made here, and may be changed
        self.count = 0.0  # micro-batches (or samples) that they are summed of
        self._shown = False
        self._clipped: Tensor | None = None  # whether the averages were, before the update
        self._intercepts: Intercepts | None = None
        self._checked = False  # that these fit until the next update
        self.split = SplitBackward()  # those that are still to come

    def lend(self) -> None:
        """Before B: put the sums where autograd adds to them."""
        if self._shown:
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
        """Take over gradients that the user has put in the place of the shown sums; sums that were cleared are kept."""
        if self._shown and not self.threaded:
            self.values = [g if p.grad is None else p.grad for p, g in zip(self.params, self.values, strict=True)]

    def show(self) -> None:
        """Put the sums into `.grad`, to be looked at."""
        if self.shows:
            self._shown = True
            for p, g in zip(self.params, self.values, strict=True):
                p.grad = g

    def take_over(self) -> None:
        """Before a step, while no thread works: take what the user has left in `.grad`, where None is no gradient."""
        if self._shown:
            self.values = [p.grad for p in self.params]

    def hide(self) -> None:
        """Remove the sums from `.grad` of every parameter."""
        if self._shown:
            self.adopt()
            self._shown = False
            for p in self.params:
                p.grad = None

    def take(self) -> list[Tensor | None]:
        """Return all sums, and begin new ones."""
        if self._shown:
            self.hide()
        values, self.values = self.values, [None] * len(self.params)
        self._made = [None] * len(self.params)
        self._checked = False
        return values

    def sums(self) -> GradientSums:
        """Return all sums and the number of micro-batches that they are of, and begin new ones."""
        count, self.count = self.count, 0.0
        made, shows = self._made, self.shows
        values = self.take()
        clipped, self._clipped = self._clipped, None
        return GradientSums(values, count, [not shows and g is m for g, m in zip(values, made, strict=True)], clipped)

    def count_more(self, number: float) -> None:
        """Note that the sums are of so many more micro-batches, or samples."""
        self.count += number

    def count_anew(self, number: float = 0.0) -> None:
        """Set the number of micro-batches that the sums are of."""
        self.count = number

    def show_between(self, shows: bool) -> None:
        """Set whether the sums stay in `.grad` between operations."""
        self.shows = shows

    def share(self, threaded: bool) -> None:
        """Set whether B runs in a thread of our own."""
        self.threaded = threaded

    def average(self) -> None:
        """Divide the sums by the number of micro-batches now, and not where the update takes them."""
        if not self.count or self.count == 1:
            return
        count, self.count = self.count, 1.0
        self.take_over()
        self._replace_shown([None if g is None else g / count for g in self.values])

    def clip(self, clip: Callable[[Sequence[Tensor | None]], tuple[Sequence[Tensor | None], Tensor | None]]) -> None:
        """Clip the sums now, where they are averages. clip: returns them clipped, and whether any was."""
        self.take_over()
        values, self._clipped = clip(self.values)
        self._replace_shown(list(values))

    def _replace_shown(self, values: list[Tensor | None]) -> None:
        self.values = values
        if self._shown:
            self.show()

    def put(self, values: Iterable[Tensor | None]) -> None:
        """Replace the sums by these."""
        self.hide()
        self.values, self._made = list(values), [None] * len(self.params)

    def replace(self, values: list[Tensor | None]) -> None:
        """Replace the sums by these, which contain the old ones; only where no sums are shown in `.grad`."""
        self.values = values

    def add(
        self, found: Iterable[Tensor | None], sums: list[Tensor] | None = None, more: list[Tensor] | None = None
    ) -> None:
        """Add the gradients of a micro-batch, which may be somebody else's tensors: they are not changed later on.

        A sum of two is a tensor of our own, to which the third is added in place. sums, more: where given, get the sums
        and what the caller is to add to them.
        """
        for n, (total, new) in enumerate(zip(self.values, found, strict=True)):
            if total is None or new is None:
                self.values[n] = new if total is None else total
            elif sums is not None and more is not None and self._grows(n, new):
                sums.append(total)
                more.append(new)
            else:
                self._add(n, new)

    def _add(self, n: int, new: Tensor) -> None:
        """Add a gradient of one weight."""
        if (total := self.values[n]) is None:
            self.values[n] = torch.empty_like(self.params[n], dtype=new.dtype, requires_grad=False).copy_(new)
        elif self._grows(n, new):
            total.add_(new)
        else:
            self.values[n] = self._made[n] = _sum(total, new)

    def _grows(self, n: int, new: Tensor) -> bool:
        """Whether a gradient may be added to the sum in place."""
        total = self.values[n]
        if total is None or total is not self._made[n]:
            return False
        return total.layout is new.layout is torch.strided and total.dtype == new.dtype

    def intercepts(self) -> Intercepts | None:
        """What adds gradients to sums that are there already, before they get to `.grad`; None if that cannot be."""
        if not self.count or self.shows:
            return None
        if not self._checked:
            # frozen weights may be trained again before the update, and have no node until then
            self._checked = all(p.requires_grad for p in self.params)
            if self._intercepts is not None and not self._intercepts.fit(self.params):
                self._intercepts.remove()
                self._intercepts = None
            if self._intercepts is None and able(self.params):
                self._intercepts = Intercepts(self.params, self._add)
        return self._intercepts

    @property
    def numbers(self) -> int:
        """How many numbers of gradients `packed` returns."""
        return sum(p.numel() for p in self.params) + sum(len(self.params[n]) for n in self.rows)

    def packed(self, told: Sequence[float] = ()) -> Tensor:
        """Return what replicas add up as one vector: all gradients, flags of the weights that have one, the count, and
        what else is told.
        """
        there = [float(g is not None) for g in self.values]
        kind = self.params[0] if self.params else torch.empty(0)
        pairs = list(zip(self.params, self.values, strict=True))
        grads = [torch.zeros_like(p) if g is None else dense(g) for p, g in pairs]
        grads += [_touched(*pairs[n]) for n in self.rows]
        # a half type cannot count far; sums of two replicas in float32 round to the same half
        dtype = torch.promote_types(kind.dtype, torch.float32)
        tail = torch.tensor([*there, self.count, *told], dtype=dtype, device=kind.device)
        return torch.cat([*(g.flatten().to(kind.device, dtype) for g in grads), tail])

    def unpack(self, total: Tensor, told: int = 0) -> Sequence[float]:
        """Replace the sums and the count by those over all replicas; return those of the numbers that were told."""
        n = len(self.params)
        tail: list[float] = total[total.numel() - n - 1 - told :].tolist()
        flags, count, at = tail[:n], tail[n], 0
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
        self.count = count
        return tail[n + 1 :]


def nothing(set_to_none: bool = True) -> None:
    """Do nothing, as `zero_grad` of a stage's optimizer does, since a step that calls it still needs its gradients."""


def differentiate(
    roots: Sequence[Any], seeds: Sequence[Tensor], leaves: Sequence[Tensor], every: Sequence[Gradients]
) -> None:
    """Differentiate the graphs of any number of stages in one autograd call, and add to the gradients of `every` stage.

    roots: tensors, or the edges of graphs whose outputs are gone. leaves: the inputs of the stages, which get their
    gradients in `.grad`.
    """
    # hooks of the user that run after `.grad` was accumulated need it to be there
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
    roots: Sequence[Any], seeds: Sequence[Tensor], leaves: Sequence[Tensor], every: Sequence[Gradients]
) -> None:
    params = [p for each in every for p in each.params]
    inputs = [t for t in (*leaves, *params) if t.requires_grad]
    if not roots or not inputs:
        return
    if (hooks := intercepts(every)) is not None:
        with taking(hooks):
            run_backward(
                tuple(roots), tuple(seeds), False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=True
            )
        return
    found = run_backward(
        tuple(roots), tuple(seeds), False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )
    # one tensor may be the gradient of several leaves, where autograd would have made a copy
    seen = identities(seeds)
    grads = {id(leaf): own(leaf, g, seen) for leaf, g in zip(inputs, found, strict=True) if g is not None}
    for leaf in leaves:
        if leaf.requires_grad:
            leaf.grad = grads.get(id(leaf))
    sums: list[Tensor] = []
    more: list[Tensor] = []
    for each in every:
        each.add([grads.get(id(p)) for p in each.params], sums, more)
        each.show()
    if sums:
        torch._foreach_add_(sums, more)


def intercepts(every: Iterable[Gradients]) -> list[Intercepts] | None:
    """What adds gradients to the sums of all of these; None if one of them cannot have it."""
    some = [each.intercepts() for each in every]
    there = [one for one in some if one is not None]
    return there if len(there) == len(some) else None


def identities(tensors: Iterable[Tensor]) -> set[int]:
    """The memory that these tensors lie in."""
    return {identity(t) for t in tensors if t.layout is torch.strided}


def own(leaf: Tensor, gradient: Tensor, seen: set[int]) -> Tensor:
    """Return the gradient as autograd would put it into `.grad`: with the leaf's strides, in memory of its own."""
    if gradient.layout is not torch.strided:
        return gradient.detach()
    storage = identity(gradient)
    if storage in seen or not (gradient.stride() == leaf.stride() or _alike(gradient, leaf)):
        gradient = torch.empty_like(leaf, dtype=gradient.dtype, requires_grad=False).copy_(gradient)
        storage = identity(gradient)
    seen.add(storage)
    return gradient.detach() if gradient.requires_grad else gradient


def _alike(gradient: Tensor, leaf: Tensor) -> bool:
    """Whether they have the same strides, where these say anything."""
    return not any(a != b and n > 1 for a, b, n in zip(gradient.stride(), leaf.stride(), leaf.shape, strict=True))


def dense(gradient: Tensor) -> Tensor:
    """The gradient as a dense tensor."""
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def _touched(p: Tensor, gradient: Tensor | None) -> Tensor:
    """1 for each row of a table that has a gradient, 0 for the others."""
    if gradient is None or gradient.layout is torch.strided:
        return torch.full((len(p),), float(gradient is not None), device=p.device)
    return torch.zeros(len(p), device=p.device).index_fill_(0, gradient.coalesce().indices()[0], 1.0)


def _sum(total: Tensor, new: Tensor) -> Tensor:
    if total.layout is not torch.strided and new.layout is torch.strided:
        return new + total  # the only order that torch has for a sparse and a dense one
    return total + new
