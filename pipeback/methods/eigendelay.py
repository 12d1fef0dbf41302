"""EigenDelay: AdamW under long delays.

    basis   L ← β_s·L + (1 − β_s)·G·Gᵀ,  R ← β_s·R + (1 − β_s)·Gᵀ·G;  U, V: eigenvectors of L and R at the updates 1 and
            `refresh`, then Q ← qr(L·Q).Q every `refresh` + `refresh_by_delay`·D updates
            g̃ = Uᵀ·G·V,  m̃ = Uᵀ·m·V,  v ← β₂·v + (1 − β₂)·g̃²
    turn    v ← (U′ᵀ·U)²·v·(Vᵀ·V′)², squares by entry, when the second bases U′, V′ follow the first ones
    over    c = 1 / max(1, v̂/mean(v̂))  where D > 0, else 1      sharp directions are left to stages with short delays
    spike   z = β₁^D·m̃̂ + (1 − β₁^D)·g̃                            what is late does not wait for momentum as well
    rate    η_s = κ·η / (1 + D)^p
    update  w ← w − η_s·(λ·w + U·[c·z/(√v̂ + ε)]·Vᵀ)
    F       on ŵ = w − η_s·Σ_{j=1…D} β₁ʲ·U·[c·m̃̂/(√v̂ + ε)]·Vᵀ    what momentum has already committed to
    B       on w_t, or with `stash` on what F used

G is the gradient of a weight matrix, or of a kernel taken as one, m the first moment as torch keeps it, and hats
correct the bias; v is kept in the basis, in torch's `exp_avg_sq`. The turn gives what the second moments of the new
coordinates are if those of the old ones are not correlated; `second_moment` names others: "bounded" begins v anew with
max(g̃², m̃̂²), "anew" with g̃² alone, which bounds no step where that one gradient is nearly 0 and m is not, and "kept"
leaves v as it is. Vectors, and sides longer than `largest`, have no basis; where a weight has none at all, c = 1. With
`block`, a side that is a multiple of it has a basis per so many rows or columns, such as the heads of an attention: L,
R, U and V are block-diagonal. F is the forward, B the backward; D is the stage's delay in updates.
Constants: β_s = 0.99, refresh = 10, refresh_by_delay = 0, κ = 4, p = 1. Each part can be switched off: `sides`, `over`,
`spike`, `predict`, and `power=0, scale=1` for the rate.

It is our own method, and not published elsewhere. The bases are those of SOAP (Vyas et al., arXiv 2409.11321) and of
basis rotation (Jung et al., arXiv 2602.03515), the spike is that of Kosson et al. (arXiv 2003.11666). Adam, AdamW.
Weight copies: 1 and a scratch buffer. State of a matrix of r × c numbers: 2·(r² + c²), in blocks of b 2·b·(r + c), and
two more copies: m̃, and what F adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from pipeback.methods.adam import adam_spike, adam_state, adam_step, moments, require_adam
from pipeback.methods.base import Chosen, Correction, Method, OptimizerLike, Shift, State, Weights, When
from pipeback.methods.columns import Number, added, positive
from pipeback.methods.gradients import decoupled, entering
from pipeback.methods.option_checks import check_number, check_share, require_real
from pipeback.schedules.programs import flowing
from pipeback.schedules.timeline import in_flight
from pipeback.tensors import eigenbasis
from pipeback.tensors.eigenbasis import as_matrix, rotated

SIDES = "left", "right"  # U and V in the state; "left covariance" and "right covariance" are L and R
MEAN = "turned mean"  # m̃ in the state: of g̃ from one renewal of the bases to the next, and of m at a renewal

SECOND_MOMENTS = "turned", "bounded", "kept", "anew"


@dataclass(repr=False)
class EigenDelay(Method):
    """scale: κ. power: p. decay: β_s. slack: 2 for PB's delays. The others are in the equations."""

    scale: float = 4.0
    power: float = 1.0
    decay: float = 0.99
    refresh: int = 10
    refresh_by_delay: float = 0.0
    block: int | None = None
    sides: Literal[0, 1, 2] = 2
    second_moment: Literal["turned", "bounded", "kept", "anew"] = "turned"
    largest: int = 1024
    over: bool = True
    spike: bool = True
    predict: bool = True
    stash: bool = False
    slack: int = 2

    def __post_init__(self) -> None:
        check_number("eigendelay", "scale", self.scale, above=True)
        check_number("eigendelay", "power", self.power)
        check_share("eigendelay", "decay", self.decay)
        check_number("eigendelay", "refresh_by_delay", self.refresh_by_delay)
        if self.sides not in (0, 1, 2):
            raise ValueError(f"eigendelay: sides must be 0, 1 or 2, but is {self.sides!r}")
        if self.second_moment not in SECOND_MOMENTS:
            raise ValueError(
                f"eigendelay: second_moment must be one of {SECOND_MOMENTS}, but is {self.second_moment!r}"
            )
        for name in ("refresh", "largest", *(["block"] if self.block is not None else [])):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(
                    f"eigendelay: {name} must be a whole number of at least 1, but is {getattr(self, name)!r}"
                )
        self.schedule = flowing(self.slack)
        self.copies = "stash" if self.stash else "scratch" if self.predict else "live"
        self.state_copies = int(self.predict)
        self.merges = self.steps_itself = self.takes_rows = True
        self.elementwise, self.turns_moments = not self.sides, bool(self.sides)

    def check(self, optimizer: torch.optim.Optimizer, stages: int) -> None:
        require_adam(optimizer, "eigendelay", 'method="staleness_lr"')
        require_real(optimizer, "eigendelay")

    def held(self, stage: int, stages: int) -> int:
        if not (self.stash and self.predict):
            return super().held(stage, stages)
        return 1 + in_flight(self.schedule, stages)[stage] if self.delays(stages)[stage] else 1

    def state_numbers(self, shape: Sequence[int]) -> float:
        lengths = (shape[0], torch.Size(shape[1:]).numel()) if len(shape) > 1 else (0, 0)
        has = eigenbasis.sides(shape, self.largest, self.sides, self.block)
        turned = lengths[0] * lengths[1] * any(has)
        bases = sum(
            2 * n * n // eigenbasis.blocks(n, self.block) for n, wanted in zip(lengths, has, strict=True) if wanted
        )
        return super().state_numbers(shape) + turned + bases

    def init(self, weights: Weights) -> State:
        state: State = {f"{name}{what}": [None] * len(weights) for name in SIDES for what in ("", " covariance")}
        state[MEAN] = [None] * len(weights)
        for n, w in enumerate(weights):
            lengths = as_matrix(w).shape if w.dim() > 1 else (0, 0)
            if self.sides and max(n // eigenbasis.blocks(n, self.block) for n in lengths) > self.largest:
                eigenbasis.tell_too_large("eigendelay", tuple(w.shape), self.largest)
            has = eigenbasis.sides(w.shape, self.largest, self.sides, self.block)
            if any(has):
                state[MEAN][n] = w.new_zeros(lengths)
            for name, length in [
                (name, size) for name, size, wanted in zip(SIDES, lengths, has, strict=True) if wanted
            ]:
                count = eigenbasis.blocks(length, self.block)
                basis = torch.eye(length // count, dtype=w.dtype, device=w.device)
                state[name][n] = basis.repeat(count, 1, 1) if count > 1 else basis
                state[f"{name} covariance"][n] = torch.zeros_like(state[name][n])
        return {**state, "ahead": [torch.zeros_like(w) for w in weights]} if self.predict else state

    def forward_weights(self, weights: Weights, state: State, when: When) -> Chosen:
        if not self.predict or (self.stash and not when.delay):
            return weights
        return Shift(weights, self._shifts(when), state["ahead"])

    def backward_weights(self, weights: Weights, used: Weights | None, state: State, when: When) -> Chosen:
        if not self.stash:
            return weights
        assert used is not None
        return used

    def update(self, weights: Weights, optimizer: OptimizerLike, state: State, when: When) -> State:
        place = {id(w): n for n, w in enumerate(weights)}
        rates = [rate for rate, _ in self._rates(when)]
        turned = {n for n in range(len(weights)) if any(state[name][n] is not None for name in SIDES)}
        plain = [w for n, w in enumerate(weights) if n not in turned]
        horizons = {id(w): when.delays[place[id(w)]] if self.spike else 0 for w in plain}
        adam_step(optimizer, horizons, rates={id(w): rates[place[id(w)]] for w in plain})
        for group in optimizer.param_groups:
            stepped = [(w, place[id(w)]) for w in group["params"] if w.grad is not None and id(w) in place]
            with eigenbasis.exact(weights):
                for w, n in stepped:
                    if n in turned:
                        self._turn(
                            w, n, adam_state(optimizer, w, group), group, state, rates[n], when.delays[n], when.rows
                        )
            late = [(w, n) for w, n in stepped if n not in turned and positive(when.delays[n])] if self.predict else []
            if late:
                self._ahead(optimizer, group, late, state, when)
        return state

    def correction(self, when: When, state: State) -> Correction:
        if not self.predict:
            return Correction(used=self.stash, own=True)
        return Correction(self._shifts(when), used=self.stash, along="ahead", own=True)

    def _turn(
        self, w: Tensor, n: int, entry: dict[str, Any], group: dict[str, Any], state: State, rate: Number, D: Number,
        rows: int,
    ) -> None:  # fmt: skip
        """Step matrix n in its bases, and note what F of coming micro-batches adds to it, but for the rate.

        Factors that a whole row has in common are multiplied first, since each of them alone would take a pass through
        memory: with e = sqrt(1 − β₂ᵗ) and C the sum of the prediction, `below` is (√v̂ + ε)·(1 − β₁ᵗ)/(c·C).
        """
        (beta1, beta2), late = map(float, group["betas"]), positive(D)
        g, t = _matrix(entering(w, group), rows), entry["step"].add_(1)
        counts = t.tolist() if rows else [float(t)]
        horizons = D.flatten().tolist() if rows else [D]
        entry["exp_avg"].lerp_(g.view(w.shape), 1 - beta1)
        bases = [state[name][n] for name in SIDES]
        for name in SIDES:
            if (covariances := state[f"{name} covariance"][n]) is not None:
                eigenbasis.add_covariance(covariances, g, self.decay, left=name == "left")
        second = [r for r, t in enumerate(counts) if t == self.refresh]
        some_second = _chosen(second, rows)
        first_bases = [None if basis is None else basis[some_second].clone() for basis in bases] if second else []
        renewed = self._renewed(n, state, counts, horizons, rows)
        turned, mean = rotated(g, *bases), state[MEAN][n]
        mean.lerp_(turned, 1 - beta1)
        if renewed:
            moment, some = _matrix(entry["exp_avg"], rows), _chosen(renewed, rows)
            mean[some] = rotated(moment[some], *(None if basis is None else basis[some] for basis in bases))
        squares = _matrix(entry["exp_avg_sq"], rows)
        if second and self.second_moment == "turned":
            second_bases = [None if basis is None else basis[some_second] for basis in bases]
            squares[some_second] = _turned_squares(squares[some_second], first_bases, second_bases)
        elif second and self._begins:
            squares[some_second] = 0
        squares.mul_(beta2).addcmul_(turned, turned, value=1 - beta2)
        if second and self.second_moment == "bounded":
            least = (mean[some_second] / (1 - beta1**self.refresh)).square_().mul_(1 - beta2)
            squares[some_second] = torch.maximum(squares[some_second], least)
        if not w.is_contiguous():
            entry["exp_avg_sq"].copy_(squares.view(w.shape))

        ahead = late and self.predict
        sums = [_committed(beta1, d) if ahead else 1.0 for d in horizons]
        firsts, seconds = [1 - beta1**k for k in counts], [(1 - beta2 ** self._since(k)) ** 0.5 for k in counts]
        sizes = [first / (total * e) for first, total, e in zip(firsts, sums, seconds, strict=True)]
        tiny = [group["eps"] * e * size for e, size in zip(seconds, sizes, strict=True)]
        below = squares.sqrt().mul_(_numbers(sizes, g, rows)).add_(_numbers(tiny, g, rows))
        if late and self.over:
            average = squares.mean((-2, -1), keepdim=True).clamp_min_(torch.finfo(squares.dtype).tiny)
            below.mul_((squares / average).clamp_min_(1))

        if group["weight_decay"] and decoupled(group):
            w.mul_(1 - rate * group["weight_decay"])
        rates = rate.flatten().tolist() if rows else [float(rate)]
        along, whole = mean / below, [-rate / total for rate, total in zip(rates, sums, strict=True)]
        if ahead:
            _restore(along, bases, state["ahead"][n], rows, keep=0)
        if self.spike and late:
            spikes = [adam_spike(beta1, d) for d in horizons]
            a = [size * a for size, (a, _) in zip(whole, spikes, strict=True)]
            b = [size * b * first for size, (_, b), first in zip(whole, spikes, firsts, strict=True)]
            turned.mul_(_numbers(b, g, rows)).div_(below)
            added(turned, along, _numbers(a, g, rows))
        else:
            turned = along.mul_(_numbers(whole, g, rows))
        _restore(turned, bases, w, rows)

    def _since(self, t: float) -> float:
        """Of how many updates the second moment is."""
        return t - self.refresh + 1 if self._begins and t >= self.refresh else t

    @property
    def _begins(self) -> bool:
        """Whether the second moment begins anew at the second bases."""
        return self.second_moment in ("bounded", "anew")

    def _due(self, t: float, D: float) -> bool:
        """Whether bases are renewed at update t."""
        since, every = t - self.refresh, self.refresh + round(self.refresh_by_delay * D)
        return t == 1 or (since >= 0 and since % every == 0)

    def _renewed(
        self, n: int, state: State, counts: Sequence[float], delays: Sequence[float], rows: int
    ) -> list[int]:  # fmt: skip
        """Renew the bases of matrix n in those rows whose number of updates asks for it; return these rows."""
        due = [r for r, (t, D) in enumerate(zip(counts, delays, strict=True)) if self._due(t, D)]
        firsts = [r for r in due if counts[r] in (1, self.refresh)]
        for some, found in (
            (firsts, eigenbasis.eigenvectors),
            ([r for r in due if r not in firsts], eigenbasis.iterated),
        ):
            for name in SIDES:
                if some and (basis := state[name][n]) is not None:
                    chosen = _chosen(some, rows)
                    basis[chosen] = found(state[f"{name} covariance"][n][chosen], basis[chosen])
        return due

    def _ahead(
        self, optimizer: OptimizerLike, group: dict[str, Any], late: list[tuple[Tensor, int]], state: State, when: When
    ) -> None:
        """The same note for weights without a basis, after their step."""
        of = moments(optimizer, group, [w for w, _ in late])
        sums = [_committed(float(group["betas"][0]), when.delays[n]) for _, n in late]
        found = torch._foreach_div(of.first, of.roots(group["eps"]))
        torch._foreach_mul_(found, [total / c for total, c in zip(sums, of.first_corrections, strict=True)])
        torch._foreach_copy_([state["ahead"][n] for _, n in late], found)

    def _rates(self, when: When) -> list[tuple[Number, Number]]:
        """η_s and D of every weight."""
        return [(self.scale * rate / (1 + D) ** self.power, D) for rate, D in zip(when.rates, when.delays, strict=True)]

    def _shifts(self, when: When) -> list[float]:
        return [-rate if D else 0.0 for rate, D in self._rates(when)]


def _matrix(x: Tensor, rows: int) -> Tensor:
    """A weight as a matrix, or rows of weights as matrices (n, …): the same memory if x is contiguous."""
    return x.reshape(rows, x.shape[1], -1) if rows else as_matrix(x)


def _turned_squares(squares: Tensor, old: Sequence[Tensor | None], new: Sequence[Tensor | None]) -> Tensor:
    """Second moments of entries that are not correlated, in new bases in place of old ones."""
    turns = [None if a is None or b is None else (a.mT @ b).square_() for a, b in zip(old, new, strict=True)]
    return rotated(squares, *turns)


def _restore(x: Tensor, bases: Sequence[Tensor | None], into: Tensor, rows: int, *, keep: int = 1) -> None:
    """Add a matrix of the bases to a weight, or to what has its shape."""
    moved = _matrix(into, rows)
    eigenbasis.add_restored(moved, x, *bases, keep=keep)
    if not into.is_contiguous():
        into.copy_(moved.view(into.shape))


def _chosen(some: list[int], rows: int) -> Any:
    """What takes these rows, or all of a single matrix."""
    return some if rows else ...


def _numbers(numbers: Sequence[float], like: Tensor, rows: int) -> Number:
    """A number for a matrix, or a column for rows of matrices."""
    return torch.tensor(numbers, dtype=like.dtype, device=like.device).view(-1, 1, 1) if rows else numbers[0]


def _committed(beta: float, delay: Number) -> Number:
    """Σ β₁ʲ over j = 1 … D."""
    return (beta - beta ** (delay + 1)) / (1 - beta)
