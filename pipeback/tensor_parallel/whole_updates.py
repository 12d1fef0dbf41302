"""Whole updates: a method or an optimizer that looks at whole weights updates them whole, on every rank alike.

    w, g, m = the shards of all ranks side by side      U: w, m ← update(w, g, m)      each rank keeps its shard

The tensors keep their objects, and have other memory meanwhile, so that optimizer and state know them as before.
Tensors of their state that have the shape of a weight are cut as the weight is; others, such as a basis, are whole on
every rank. It takes memory for one worker's whole weights, and the time of an update that is not cut.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from pipeback.optim import MuonAdamW, RotatedAdamW
from pipeback.stages.stage import Stage
from pipeback.tensor_parallel.cuts import Cut
from pipeback.tensor_parallel.group import TensorGroup
from pipeback.tensor_parallel.sharding import Sharding

# optimizers that look at whole weights, and the names in their state that every rank has whole
LOOKING: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.Muon: (),
    torch.optim.Adafactor: ("row_var", "col_var"),
    MuonAdamW: (),
    RotatedAdamW: ("left", "right", "left_covariance", "right_covariance"),
}


class WholeUpdates:
    """The updates of a method that looks at whole weights, or whose optimizers do.

    seeing: a copy of the method, whose update sees them.
    """

    def __init__(self, method: Any, group: TensorGroup) -> None:
        self._method, self._group = method, group
        self._cuts: dict[int, Cut] = {}  # by the identity of a weight
        self._notes: dict[int, Callable[[str], None]] = {}  # notes what is whole in a state of its stage
        self._alike: set[tuple[int, str]] = set()  # tensors of the method's state that are whole, by weight and name
        self.seeing = copy.copy(method)
        self.seeing.update, self.seeing.init = self._update, self._init

    def begin(self, stage: Stage, sharding: Sharding) -> None:
        """Give a stage the method's state for whole weights; before the first micro-batch."""
        for n, (w, name) in enumerate(zip(stage.weights, sharding.trained, strict=True)):
            if name in sharding.cuts:
                self._cuts[id(w)], self._notes[id(w)] = sharding.cuts[name], sharding.keep_whole
                for key in LOOKING.get(type(stage.optimizer), ()):
                    sharding.keep_whole(f"optimizer/{n}/{key}")
                    self._alike.add((id(w), f"optimizer/{key}"))
        with torch.no_grad():
            stage.put_state(self._init(stage.weights))

    def _init(self, weights: Sequence[Tensor]) -> dict[str, Any]:
        """The method's state of the weights of one stage. Other ranks' shards have no certain values here."""
        count = self._group.count
        cuts = {n: self._cuts[id(w)] for n, w in enumerate(weights) if id(w) in self._cuts}
        wholes = [cuts[n].whole([w] * count) if n in cuts else w for n, w in enumerate(weights)]
        state: dict[str, Any] = self._method.init(wholes)
        for n, cut in cuts.items():
            for key, value in state.items():
                tensor = value[n] if isinstance(value, list) else None
                if tensor is not None and tensor.shape == wholes[n].shape:
                    value[n] = self._cut(tensor, cut)
                elif tensor is not None:
                    self._notes[id(weights[n])](f"method/{key}/{n}")
                    self._alike.add((id(weights[n]), key))
        return state

    def _update(self, weights: Sequence[Tensor], optimizer: Any, state: dict[str, Any], when: Any) -> dict[str, Any]:
        cuts = {n: self._cuts[id(w)] for n, w in enumerate(weights) if id(w) in self._cuts}
        with ExitStack() as stack:
            for n, cut in cuts.items():
                stack.enter_context(self._whole(weights[n], cut, optimizer.state))
                lists = sorted((key, value) for key, value in state.items() if isinstance(value, list))
                of = [value[n] for key, value in lists if (id(weights[n]), key) not in self._alike]
                if when.used is not None and when.used[n] is not weights[n]:
                    of.append(when.used[n])
                shape = cut.shape(weights[n].shape, self._group.count)
                stack.enter_context(self._wholes([t for t in of if t is not None and t.shape == shape], cut))
            found: dict[str, Any] = self._method.update(weights, optimizer, state, when)
        return found

    @contextmanager
    def _whole(self, w: Tensor, cut: Cut, state: Any) -> Iterator[None]:
        """A context in which a weight, its gradient and the optimizer's state of it are whole."""
        shape, grad = w.shape, w.grad
        given = None if grad is None else self._assembled(grad, cut)
        known = {k: v for k, v in self._entries(w, state) if v.shape == shape}
        w.grad = None
        with self._wholes([w, *known.values()], cut):
            w.grad, whole = given, w.shape
            yield
            w.grad = None
        for _, tensor in self._entries(w, state):
            if tensor.shape == whole:  # it has been made by this update
                tensor.data = self._cut(tensor, cut)
        w.grad = grad

    def _entries(self, w: Tensor, state: Any) -> list[tuple[str, Tensor]]:
        """The tensors of the optimizer's state of a weight, by name, but those that are whole on every rank."""
        every = sorted((key, value) for key, value in state.get(w, {}).items() if isinstance(value, Tensor))
        return [(key, value) for key, value in every if (id(w), f"optimizer/{key}") not in self._alike]

    @contextmanager
    def _wholes(self, tensors: Iterable[Tensor], cut: Cut) -> Iterator[None]:
        """A context in which these shards are whole; their memory has the new values afterwards."""
        mine = [(tensor, tensor.data) for tensor in tensors]
        for tensor, _ in mine:
            tensor.data = self._assembled(tensor, cut)
        try:
            yield
        finally:
            for tensor, memory in mine:
                memory.copy_(self._cut(tensor, cut))
                tensor.data = memory

    def _assembled(self, shard: Tensor, cut: Cut) -> Tensor:
        # not by the group of the forwards, which run meanwhile where a store makes updates in a thread of its own
        return cut.whole([each.to(shard.device) for each in self._group.collect(shard.detach())])

    def _cut(self, whole: Tensor, cut: Cut) -> Tensor:
        return cut.shard(whole.detach(), self._group.index, self._group.count)
