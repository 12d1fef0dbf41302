"""A pipeline by hand: what torch alone takes for the forwards, backwards and steps of `pb`, with as many graphs alive.

The stages are cut as in a Pipeline: each has a graph of its own, whose input is a leaf. At every micro-batch all stages
run forward on it, then all run backward, in one call of autograd, on the micro-batch whose turn it is, then one
optimizer steps all weights. There are no schedule, method, checks, errors, records, states or hooks. What this takes
beyond the plain loop is not the event loop's: a cut graph has more nodes than a whole one, and a graph that waits has
left the caches.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn, ones

from pipeback.private import run_backward
from pipeback.recipes.benches.contenders import Contender, Task
from pipeback.recipes.benches.network import sgd


class ByHand:
    """Stages of `pb`: at stage s of S, `slack` · (S − 1 − s) micro-batches are between forward and backward.

    slack: 1 or 2. On the last stage, `loss` is part of the graph.
    """

    def __init__(self, stages: Sequence[nn.Module], loss: Callable[[Any, Any], Tensor], slack: int = 2) -> None:
        self.stages, self.loss = list(stages), loss
        last = len(self.stages) - 1
        self.ahead = [slack * (last - s) for s in range(last + 1)]
        # inputs and outputs of the graphs that wait for their backward, and the gradients of these outputs
        self.flying: list[deque[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]] = [deque() for _ in self.stages]
        self.gradients: list[deque[list[Tensor | None]]] = [deque() for _ in self.stages]
        self.params = [p for stage in self.stages for p in stage.parameters()]
        self.weights = [nn.Parameter(p.data) for p in self.params]  # on the same memory, with versions of their own
        self.optimizer = sgd(self.weights)

    def train(self, x: Tensor, y: Tensor) -> None:
        """One micro-batch: its forwards, and the backwards and updates that follow."""
        value: Any = x
        last = len(self.stages) - 1
        for s, (stage, flying) in enumerate(zip(self.stages, self.flying, strict=True)):
            several = type(value) is tuple
            leaves = tuple([part.detach() for part in value]) if several else (value.detach(),)
            for leaf in leaves if s else ():
                leaf.requires_grad_()
            value = stage(leaves if several else leaves[0])
            if s == last:
                value = self.loss(value, y)
                self.gradients[s].append([ones(())])
            flying.append((leaves, value if type(value) is tuple else (value,)))
        ready = [s for s, flying in enumerate(self.flying) if len(flying) > self.ahead[s]]
        graphs = [self.flying[s].popleft() for s in ready]
        seeds = [g for s in ready for g in self.gradients[s].popleft()]
        pairs = list(zip([part for _, outputs in graphs for part in outputs], seeds, strict=True))
        roots = tuple([y for y, g in pairs if g is not None and y.requires_grad])
        given = tuple([g for y, g in pairs if g is not None and y.requires_grad])
        run_backward(roots, given, False, False, (), allow_unreachable=True, accumulate_grad=True)
        for s, (leaves, _) in zip(ready, graphs, strict=True):
            if s:
                self.gradients[s - 1].append([leaf.grad for leaf in leaves])
        for w, p in zip(self.weights, self.params, strict=True):
            w.grad, p.grad = p.grad, None
        self.optimizer.step()

    def push(self, x: Tensor, y: Tensor) -> None:
        """Train on micro-batches of one sample."""
        for some, target in zip(x.split(1), y.split(1), strict=True):
            self.train(some, target)


def by_hand(task: Task, slack: int = 2) -> Contender:
    """`pb` by hand. It is full before the first turn."""
    pipe = ByHand(list(task.model()), task.loss, slack)
    x, y = task.data()

    def run(count: int = task.turn) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            pipe.train(x, y)
        return time.perf_counter() - begin

    run(max(pipe.ahead) + 2)
    return Contender(run, task.turn)
