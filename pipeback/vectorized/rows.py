"""Rows: keeps the weights of stages that are alike as rows of tensors, and steps all rows at once.

F is the forward, B the backward, U the update, of one micro-batch. The step of Adam is in `adam_rows`. The step of
momentum SGD, with F on predicted weights, is here:

g ← ∇f + λ·w        v ← m·v + g        w ← w − η·(a·v + b·g)        F on w + c·v        η, a, b, c: a number per row
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from operator import is_
from typing import Any, TypeVar

import torch
from torch import Tensor

from pipeback.methods.base import Correction
from pipeback.methods.momentum import plain_sgd, spike
from pipeback.private import hooked
from pipeback.stages.joint_optimizer import Options, groups_of, rates_of
from pipeback.stages.stage import Stage
from pipeback.vectorized.adam_rows import FIRST, SECOND, STEP, AdamStep, columns, settings

T = TypeVar("T")


@dataclass
class Step:
    """The numbers of a step of momentum SGD for all rows. Lists of tensors have one tensor (n, 1, …) per weight, with
    one number per row; an empty list means that the method does not use it.
    """

    momentum: float
    decays: tuple[float, ...]  # λ of every weight
    rates: list[list[float]]  # η of every row, of every weight
    like: Sequence[Tensor]  # the weights
    late: list[list[float]] = field(default_factory=list)  # T of spike compensation, of every row, of every weight
    ahead: Sequence[Tensor] = ()  # c of F on w + c·v
    back: Sequence[Tensor] = ()  # c of B on w + c·v, or on w + c·δ
    drift: Sequence[Tensor] = ()  # 1 − γ of δ ← γ·δ + (1 − γ)·(w' − w)
    varies: bool = False  # whether its rates hold for one update only

    @cached_property
    def rate(self) -> float | None:
        """η, if it is one number and the step is that of torch.optim.SGD; else None."""
        distinct = {rate for same in self.rates for rate in same}
        return distinct.pop() if len(distinct) == 1 and not self.late else None

    @cached_property
    def along(self) -> list[Tensor]:
        """−η·a of every weight, the factor of v."""
        return columns([[-rate * a for rate, (a, _) in some] for some in self._spikes], self.like)

    @cached_property
    def against(self) -> list[Tensor]:
        """−η·b of every weight, the factor of g; empty if g is not added."""
        late = [[-rate * b for rate, (_, b) in some] for some in self._spikes] if self.late else []
        return columns(late, self.like) if late else []

    @property
    def form(self) -> tuple[Any, ...]:
        """The properties of a step that a compiled function relies on."""
        return bool(self.momentum), self.decays, bool(self.late), bool(self.ahead), bool(self.back)

    @property
    def _spikes(self) -> list[list[tuple[float, tuple[float, float]]]]:
        late = self.late or [[0.0] * len(same) for same in self.rates]
        return [
            [(rate, spike(self.momentum, T)) for rate, T in zip(*pair, strict=True)]
            for pair in zip(self.rates, late, strict=True)
        ]


class Rows:
    """The weights of `stages`, upstream first, as tensors (n, …); the stages' own weights become rows of these.

    With one stage alone (n = 1) the tensors are the stage's own, without the dimension of the rows.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = list(stages)
        self.weights = self._whole()
        self.scratch = self._buffers()
        self.trained = [n for n, p in enumerate(stages[0].module.parameters()) if p.requires_grad]
        self.stepped = [self.weights[n] for n in self.trained]
        self.sums: list[Tensor] | None = None  # gradients of one micro-batch per stage, if stages have none
        self._summed: set[int] = set()  # stages whose own gradients are sums over micro-batches
        self._known: tuple[list[Options], Step | AdamStep | None] = ([], None)
        self.alone = False  # whether nobody else can change the optimizers' state now
        self._number: tuple[float, Tensor] | None = None
        self._kept: list[Any] = []
        self._state: dict[str, tuple[list[Tensor], list[list[Tensor]]]] = {}
        self._first_rows: Sequence[Tensor | None] = [None] * len(self.stages)  # rows of the first weight's momentum

    @torch.no_grad()
    def _whole(self) -> list[Tensor]:
        if len(self.stages) == 1:
            return [p.data for p in self.stages[0].module.parameters()]
        found = []
        for same in zip(*(list(stage.module.parameters()) for stage in self.stages), strict=True):
            whole = torch.stack([p.data for p in same])
            for p, row in zip(same, whole.unbind(), strict=True):
                p.data = row
            found.append(whole)
        for stage in self.stages:
            stage.moved()
        return found

    def _buffers(self) -> list[Tensor]:
        """The buffers for shifted weights, if the method uses them; the stages' own buffers become rows of these."""
        if not any(stage.versions.scratch for stage in self.stages):
            return []
        wholes, rows = _laid([stage.versions.scratch or () for stage in self.stages])
        for stage, mine in zip(self.stages, rows, strict=True):
            stage.versions.lay(mine)
        return wholes

    @torch.no_grad()
    def lay(self, change: Callable[[Tensor], Tensor]) -> None:
        """Lay the weights of a single stage in memory as this function does."""
        (stage,) = self.stages
        for p in stage.module.parameters():
            p.data = change(p.data)
        stage.moved()
        self.weights = self._whole()
        self.stepped = [self.weights[n] for n in self.trained]
        if stage.versions.scratch is not None:
            stage.versions.lay([torch.empty_like(w) for w in self.stepped])
            self.scratch = self._buffers()

    def of(self, whole: Tensor) -> Sequence[Tensor]:
        """Return the rows of a tensor (n, …)."""
        return _rows(whole, len(self.stages))

    def add(self, grads: list[Tensor], rows: Sequence[int]) -> None:
        """Add gradients (n, …), one micro-batch for each of these rows, to the gradient sums of the stages."""
        whole = len(rows) == len(self.stages)
        if whole and all(not stage.gradients.count for stage in self.stages):
            self.sums = grads
        else:
            self.spread()
            self._add_apart([self.of(g) for g in grads], rows)
        for r in rows:
            self.stages[r].gradients.count_more(1)

    def _add_apart(self, grads: Sequence[Sequence[Tensor]], rows: Sequence[int]) -> None:
        """Add to each stage's own sum: in place if it is a sum already, and not somebody else's gradient."""
        begun = [r for r in rows if self.stages[r].gradients.count]
        for r in rows:
            values = self.stages[r].gradients.values
            if r not in begun:
                self._summed.discard(r)
                self.stages[r].gradients.replace([some[r] for some in grads])
            elif any(g is None for g in values):  # the stage has run the micro-batch on its own
                zeros = [torch.zeros_like(some[r]) for some in grads]
                self.stages[r].gradients.replace([z if g is None else g for z, g in zip(zeros, values, strict=True)])
        for ours in (True, False):
            some = [r for r in begun if (r in self._summed) == ours]
            old: list[Any] = [g for r in some for g in self.stages[r].gradients.values]
            new = [rows[r] for r in some for rows in grads]
            if ours and old:
                torch._foreach_add_(old, new)
            elif old:
                totals = torch._foreach_add(old, new)
                for n, r in enumerate(some):
                    self.stages[r].gradients.replace(list(totals[n * len(grads) : (n + 1) * len(grads)]))
        self._summed.update(begun)

    def apart(self, rows: Sequence[int]) -> None:
        """Give these stages gradient sums of their own, since autograd is about to add to them in place."""
        self.spread()
        for r in rows:
            if self.stages[r].gradients.count and r not in self._summed:
                own = self.stages[r].gradients
                own.replace([None if g is None else g.clone() for g in own.values])
            self._summed.discard(r)

    def spread(self) -> None:
        """Give every stage its own gradient sums."""
        sums, self.sums = self.sums, None
        if sums is not None:
            self._summed.clear()
        for n, whole in enumerate(sums or ()):
            for stage, row in zip(self.stages, self.of(whole), strict=True):
                stage.gradients.values[n] = row

    def step(self) -> bool:
        """Do U of all stages at once, if each is a step of Adam or of momentum SGD; return whether it was done.

        With momentum SGD the bits are those of one step per stage.
        """
        sums, count = self.sums, self.stages[0].gradients.count
        if sums is None or any(stage.gradients.count != count for stage in self.stages):
            return False
        step = self.plain([stage.options for stage in self.stages])
        if step is None:
            return False
        with torch.no_grad():
            self.move(step, sums if count == 1 else torch._foreach_div(sums, float(count)))
        self.sums = None
        for stage in self.stages:
            stage.gradients.count_anew()
        return True

    def shifted(self, by: Sequence[Tensor], along: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Return w + c·v, on which F or B runs, valid until the next call; the weights themselves if `by` is empty.

        along: added instead of v.
        """
        if not by:
            return self.weights
        found = list(self.weights)
        if along is None:
            along = self.velocities()
        for n, w, x, c, out in zip(self.trained, self.stepped, along, by, self.scratch, strict=True):
            found[n] = torch.addcmul(w, x, c, out=out)
        return found

    def follow(self, step: Step, some: Sequence[int] | None = None) -> None:
        """Finish a step whose gradients are already added to the velocities, but whose decay is not.

        some: the numbers of the weights to step, among the trainable ones; None: all.
        """
        velocities, weights = self._chosen(some, self.velocities()), self._chosen(some, self.stepped)
        for v, w, decay in zip(velocities, weights, self._chosen(some, step.decays), strict=True):
            if decay:
                v.add_(w, alpha=decay)
        self._along(step, velocities, some)

    def _along(self, step: Step, directions: Sequence[Tensor], some: Sequence[int] | None) -> None:
        weights = list(self._chosen(some, self.stepped))
        if not weights:
            return
        if step.rate is None:
            torch._foreach_addcmul_(weights, list(directions), list(self._chosen(some, step.along)))
        else:
            torch._foreach_add_(weights, list(directions), alpha=-step.rate)

    @staticmethod
    def _chosen(some: Sequence[int] | None, values: Sequence[T]) -> Sequence[T]:
        return values if some is None else [values[n] for n in some]

    def number(self, value: float) -> Tensor:
        """Return a number as a tensor on the device of the weights, always the same tensor for a number."""
        if self._number is None or self._number[0] != value:
            like = self.stepped[0] if self.stepped else torch.zeros(())
            self._number = value, torch.tensor(value, dtype=like.dtype, device=like.device)
        return self._number[1]

    def move(self, step: Step | AdamStep, grads: Sequence[Tensor], some: Sequence[int] | None = None) -> None:
        """Step the weights with these gradients. some: see `follow`."""
        if isinstance(step, AdamStep):
            first, second, steps = self.kept(step)
            step.move(self.stepped, first, second, steps, grads)
            return
        if any(step.decays):
            both = zip(self._chosen(some, self.stepped), self._chosen(some, step.decays), strict=True)
            grads = [torch.add(g, w, alpha=decay) if decay else g for g, (w, decay) in zip(grads, both, strict=True)]
        if not step.momentum:
            self._along(step, grads, some)
            return
        velocities = list(self._chosen(some, self.velocities()))
        torch._foreach_mul_(velocities, self.number(step.momentum))
        torch._foreach_add_(velocities, list(grads))
        self._along(step, velocities, some)
        if step.against:
            weights, against = self._chosen(some, self.stepped), self._chosen(some, step.against)
            torch._foreach_addcmul_(list(weights), list(grads), list(against))

    def plain(
        self, options: Sequence[Options], corrected: Callable[[], Correction] | None = None, *others: Options
    ) -> Step | AdamStep | None:
        """Return the step that the stages' options ask for; None unless all ask for the same Adam or momentum SGD.

        The rates may differ. corrected: a method's correction of the step; it is computed anew if any options change.
        """
        if any(hooked(stage.optimizer) for stage in self.stages):
            return None
        known, step = self._known
        asked = [*options, *others]
        if len(known) != len(asked) or any(a is not b for a, b in zip(known, asked, strict=True)):
            step = self._uncorrected(options)
            if step is not None and corrected is not None:
                step = self._corrected(step, corrected())
            self._known = asked, step
        elif step is not None and step.varies and corrected is not None:
            correction = corrected()
            step = replace(step, rates=self._by_weight(correction.rates), varies=correction.varies)
            self._known = asked, step
        return step

    def _uncorrected(self, options: Sequence[Options]) -> Step | AdamStep | None:
        if not self.stepped:
            return Step(0.0, (), [], [])
        of_stages = [rates_of(stage, some) for stage, some in zip(self.stages, options, strict=True)]
        rates = [[of_stage[n] for of_stage in of_stages] for n in range(len(self.stepped))]
        same = self._common(settings, options)
        if same is not None:
            return AdamStep(same, rates, self.stepped)
        groups = self._common(_groups, options)
        if groups is None or len({momentum for momentum, _ in groups}) != 1:
            return None
        return Step(groups[0][0], tuple(decay for _, decay in groups), rates, self.stepped)

    def _corrected(self, step: Step | AdamStep, correction: Correction) -> Step | AdamStep | None:
        ahead, late, back, drift = map(self._by_weight, correction[:4])
        drifts, moved = any(rho != 1 for some in drift for rho in some), any(map(any, back))
        mine: dict[str, Any] = {
            "rates": self._by_weight(correction.rates) or step.rates,
            "back": columns(back, self.stepped) if moved else (),
            "drift": columns([[1 - rho for rho in some] for some in drift], self.stepped) if drifts else (),
            "varies": correction.varies,
        }
        if isinstance(step, AdamStep):
            by_velocity = any(map(any, [*late, *ahead])) or (moved and not drifts)
            return None if by_velocity else replace(step, **mine)
        spiked = step.momentum and any(map(any, late))
        return replace(
            step, late=late if spiked else [], ahead=columns(ahead, self.stepped) if any(map(any, ahead)) else (),
            **mine,
        )  # fmt: skip

    def _by_weight(self, numbers: Sequence[float]) -> list[list[float]]:
        """Turn lists of numbers per stage into lists per weight; an empty list stays empty."""
        count = len(self.stepped)
        return [list(numbers[n::count]) for n in range(count)] if numbers else []

    def _common(self, ask: Callable[[Stage, Options], T | None], options: Sequence[Options]) -> T | None:
        """Return what `ask` gives for every stage, if it is the same for all; else None."""
        first, *others = (ask(stage, some) for stage, some in zip(self.stages, options, strict=True))
        return first if all(one == first for one in others) else None

    def velocities(self) -> list[Tensor]:
        """Return the momentum buffers of all stages, as rows."""
        buffers: list[Tensor] = self._beside("momentum_buffer")[0]
        return buffers

    def kept(self, step: Step | AdamStep) -> list[Any]:
        """Return the state of the optimizers as rows: velocities, or p, q and the numbers of updates."""
        if isinstance(step, AdamStep):
            return self._beside(FIRST, SECOND, STEP)
        return self.velocities() if step.momentum else []

    def state(self, name: str) -> list[Tensor]:
        """Return the method's state of this name as rows (n, …); the stages' own state becomes these rows."""
        own = [stage.state[name] for stage in self.stages]
        found = self._state.get(name)
        if found is None or not all(map(is_, chain(*own), chain(*found[1]))):
            found = self._state[name] = _laid(own)
            for stage, mine in zip(self.stages, found[1], strict=True):
                stage.put_state({**stage.state, name: mine})
        return found[0]

    def _beside(self, *names: str) -> list[Any]:
        """Return the state of all optimizers as rows; their own state becomes these rows.

        `STEP` is one matrix (weights, n); every other entry is a list of tensors (n, …).
        """
        if not self.stepped:
            return [[] for _ in names]
        if not self.alone and any(
            row is None or stage.optimizer.state.get(stage.weights[0], {}).get(names[0]) is not row
            for stage, row in zip(self.stages, self._first_rows, strict=True)
        ):
            steps = torch.zeros(len(self.stepped), len(self.stages))
            kept: list[Any] = [steps if name == STEP else list(map(torch.zeros_like, self.stepped)) for name in names]
            for m in range(len(self.stepped)):
                rows = [
                    whole[m].unbind() if name == STEP else self.of(whole[m])
                    for name, whole in zip(names, kept, strict=True)
                ]
                for stage, *mine in zip(self.stages, *rows, strict=True):
                    entry = stage.optimizer.state.get(stage.weights[m], {})
                    for name, row in zip(names, mine, strict=True):
                        if entry.get(name) is not None:
                            row.copy_(entry[name])
                    # a new dictionary, so that caches of the old one are not used
                    stage.optimizer.state[stage.weights[m]] = {**entry, **dict(zip(names, mine, strict=True))}
                self._first_rows = rows[0] if not m else self._first_rows
            self._kept = kept
            for stage in self.stages:
                stage.weights.velocities = None
        return self._kept


def _laid(lists: Sequence[Sequence[Tensor]]) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Return lists of tensors of equal shapes, one list per stage, as tensors (n, …), and as lists of their rows."""
    if len(lists) == 1:
        return list(lists[0]), [list(lists[0])]
    wholes = [torch.stack(list(same)) for same in zip(*lists, strict=True)]
    return wholes, [list(rows) for rows in zip(*(whole.unbind() for whole in wholes), strict=True)]


def _rows(whole: Tensor, count: int) -> Sequence[Tensor]:
    return (whole,) if count == 1 else whole.unbind()


def _groups(stage: Stage, options: Options) -> list[tuple[float, float]] | None:
    """Return momentum and weight decay of every weight; None unless the optimizer is plain momentum SGD."""
    groups = groups_of(stage, options)
    if type(stage.optimizer) is not torch.optim.SGD or not all(
        group and plain_sgd(group) and not group["maximize"] and not isinstance(group["lr"], Tensor) for group in groups
    ):
        return None
    return [(group["momentum"], group["weight_decay"]) for group in groups if group]
