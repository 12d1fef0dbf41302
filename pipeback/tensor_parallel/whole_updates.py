"""Whole updates: a method that looks at whole weights updates them whole, on every rank alike.

    w, g, m = the shards of all ranks side by side      U: w, m ← update(w, g, m)      each rank keeps its shard

The tensors keep their objects, and have other memory meanwhile, so that optimizer and state know them as before.
Tensors of the method's state that have the shape of a weight are cut as the weight is; others, such as a basis, are
whole on every rank. It takes memory for one worker's whole weights, and the time of an update that is not cut.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from pipeback.stages.stage import Stage
from pipeback.tensor_parallel.cuts import Cut
from pipeback.tensor_parallel.group import TensorGroup
from pipeback.tensor_parallel.sharding import Sharding


class WholeUpdates:
    """The updates of a method that looks at whole weights.

    seeing: a copy of the method, whose update sees them.
    """

    def __init__(self, method: Any, group: TensorGroup) -> None:
        self._method, self._group = method, group
        self._cuts: dict[int, Cut] = {}  # by the identity of a weight
        self._whole_keys: dict[int, Callable[[str], None]] = {}  # notes what is whole in a state of its stage
        self.seeing = copy.copy(method)
        self.seeing.update, self.seeing.init = self._update, self._init

    def begin(self, stage: Stage, sharding: Sharding) -> None:
        """Give a stage the method's state for whole weights; before the first micro-batch."""
        for w, name in zip(stage.weights, sharding.trained, strict=True):
            if name in sharding.cuts:
                self._cuts[id(w)], self._whole_keys[id(w)] = sharding.cuts[name], sharding.keep_whole
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
                    self._whole_keys[id(weights[n])](f"method/{key}/{n}")
        return state

    def _update(self, weights: Sequence[Tensor], optimizer: Any, state: dict[str, Any], when: Any) -> dict[str, Any]:
        cuts = {n: self._cuts[id(w)] for n, w in enumerate(weights) if id(w) in self._cuts}
        with ExitStack() as stack:
            for n, cut in cuts.items():
                stack.enter_context(self._whole(weights[n], cut, optimizer.state))
                of = [value[n] for _, value in sorted(state.items()) if isinstance(value, list)]
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
        known = {k: v for k, v in sorted(state.get(w, {}).items()) if isinstance(v, Tensor) and v.shape == shape}
        w.grad = None
        with self._wholes([w, *known.values()], cut):
            w.grad, whole = given, w.shape
            yield
            w.grad = None
        for tensor in state.get(w, {}).values():
            if isinstance(tensor, Tensor) and tensor.shape == whole:  # it has been made by this update
                tensor.data = self._cut(tensor, cut)
        w.grad = grad

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
