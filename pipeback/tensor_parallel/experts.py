"""Experts: a block of experts that are spread over the ranks; tokens travel to their experts and back.

    router      every rank chooses the experts of its share of the tokens, t = 1 … N/T
    there       (x_t, e) → the rank that has expert e             an exchange of rows, all ranks to all
    experts     y_te = f_e(x_t)                                   on the rank that has e
    back        y_te → the rank whose token it is                 the same exchange backwards
    output      y_t = Σ_e g_te y_te, put together on every rank

Of N tokens with E experts and k choices each, an expert takes at most ⌈capacity · k · N / E⌉, counted in the order of
the tokens of the micro-batch; the others are dropped (GShard, Lepikhin et al., 2020, arXiv 2006.16668, section 2.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from pipeback.private import FakeTensor
from pipeback.stages.tracing_lock import TRACING
from pipeback.tensor_parallel.collectives import assemble, replicate
from pipeback.tensor_parallel.cuts import Cut
from pipeback.tensor_parallel.group import TensorGroup, group_of

KINDS = ("MixtralSparseMoeBlock",)


class ExpertLoad:
    """`Pipeline.expert_load()`: how many tokens a block has given to each expert, and how many it has dropped.

    tokens: (E,) int64, choices that were computed, by expert. dropped: choices that were not.
    """

    def __init__(self) -> None:
        self.tokens: Tensor | None = None
        self.dropped = 0

    def __repr__(self) -> str:
        tokens = None if self.tokens is None else self.tokens.tolist()
        return f"ExpertLoad(tokens={tokens}, dropped={self.dropped})"

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertLoad:
        return ExpertLoad()

    def add(self, taken: Tensor, dropped: int) -> None:
        """Count a forward."""
        self.tokens = taken.clone() if self.tokens is None else self.tokens + taken
        self.dropped += dropped


class SpreadExperts:
    """Mixed into the class of a block with a router `gate` and `experts`, of which each rank holds its own."""

    tensor_group: TensorGroup
    capacity: float | None
    load: ExpertLoad
    gate: Any
    experts: Any
    one_call = True  # a trace does not look into it

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, FakeTensor):  # a trace by shapes alone
            return x.clone()
        group = self.tensor_group
        rows = x.reshape(-1, x.shape[-1])
        short = -len(rows) % group.count
        mine = _own(torch.nn.functional.pad(rows, (0, 0, 0, short)), group)
        real = max(0, min(len(mine), len(rows) - group.index * len(mine)))  # the last rows may be padding
        _, weights, chosen = summed(self.gate, mine, group)
        k, each = chosen.shape[1], self.experts.num_experts
        expert = chosen.reshape(-1)
        held = torch.arange(len(expert), device=x.device) < real * k
        kept = held & self._fits(expert, held, len(rows) * k, each * group.count)
        order = torch.argsort(torch.where(kept, expert, each * group.count), stable=True)[: int(kept.sum())]
        sent = torch.bincount(expert[order], minlength=each * group.count).view(group.count, each)
        taken = torch.stack(group.gather(sent))[:, group.index] if group.talks else sent.clone()
        here = _exchange(mine[order // k], sent.sum(1).tolist(), taken.sum(1).tolist(), group)
        local = torch.arange(each, device=x.device).repeat(group.count).repeat_interleave(taken.flatten())
        done = self.experts(here, local[:, None], torch.ones_like(here[:, :1]))
        if not len(here):  # all the same its weights have a gradient, and the other ranks wait for that of the rows
            done = here + sum(p.flatten()[:0].sum() for p in self.experts.parameters())
        back = _exchange(done, taken.sum(1).tolist(), sent.sum(1).tolist(), group)
        gains = weights.reshape(-1)[order, None].to(back.dtype)
        total = torch.zeros_like(mine).index_add(0, order // k, back * gains)
        return assemble(total, group, 0)[: len(rows)].view(x.shape)

    def _fits(self, expert: Tensor, held: Tensor, choices: int, count: int) -> Tensor:
        """Which choices of this rank's tokens an expert still takes, and note how many."""
        group = self.tensor_group
        hot = torch.nn.functional.one_hot(expert, count) * held[:, None]
        every = torch.stack(group.gather(hot.sum(0)))
        most = choices if self.capacity is None else math.ceil(self.capacity * choices / count)
        place = (hot.cumsum(0) + every[: group.index].sum(0)).gather(1, expert[:, None])[:, 0]
        if group.talks and torch.is_grad_enabled():
            wanted = every.sum(0)
            self.load.add(wanted.clamp(max=most).cpu(), int((wanted - most).clamp(min=0).sum()))
        return place <= most


def inside(block: nn.Module) -> nn.Module:
    """The module that holds the weights of the experts of a block."""
    return block.get_submodule("experts")


def check(path: str, block: nn.Module, count: int) -> None:
    """Raise ValueError unless the block is of a kind that is known, and has experts for every rank alike."""
    if type(block).__name__ not in KINDS:
        raise ValueError(
            f'plan: {path!r} is a {type(block).__name__}, but "experts" spreads a {KINDS[0]} of transformers; leave it '
            "out of the plan"
        )
    number: Any = inside(block).num_experts
    if number % count:
        raise ValueError(
            f"plan: {path!r} has {number} experts, which tensor_parallel={count} does not divide; use a divisor of it"
        )
    if getattr(block, "jitter_noise", 0):
        raise ValueError(
            f"plan: {path!r} has router_jitter_noise, which each rank would draw otherwise; set it to 0 in the config"
        )


def shard(experts: nn.Module, count: int) -> tuple[dict[str, Any], dict[str, Cut], dict[str, Any]]:
    """Numbers of the module that a rank has others of, and the cuts of its weights."""
    number: Any = experts.num_experts
    return {"num_experts": number // count}, {name: Cut(0) for name in experts._parameters}, {}


def summed(module: nn.Module, x: Tensor, group: TensorGroup) -> Any:
    """Run a module on weights whose gradients are summed over the ranks.

    They stand in its places meanwhile, so that other threads that look there have to wait.
    """
    values = {name: replicate(p, group) for name, p in module.named_parameters()}
    with TRACING:
        return torch.func.functional_call(module, values, (x,))


def _own(x: Tensor, group: TensorGroup) -> Tensor:
    """This rank's share of the rows that all ranks have; the gradient is put together from all shares."""
    found: Tensor = _Own.apply(x, group.number)
    return found


class _Own(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int) -> Tensor:
        group = group_of(number)
        ctx.number = number
        return x.chunk(group.count)[group.index].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.cat(group_of(ctx.number).gather(gradient)), None


def _exchange(x: Tensor, sent: Sequence[int], received: Sequence[int], group: TensorGroup) -> Tensor:
    found: Tensor = _Exchange.apply(x, list(sent), list(received), group.number)
    return found


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], number: int) -> Tensor:
        ctx.number, ctx.sent, ctx.received = number, tuple(sent), tuple(received)
        return group_of(number).exchange(x, sent, received)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return group_of(ctx.number).exchange(gradient, ctx.received, ctx.sent), None, None, None
