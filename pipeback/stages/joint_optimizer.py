"""One optimizer over several stages, which steps them in one call.

Schedulers and readers see the user's optimizers, one per stage. Their learning rates are copied when a micro-batch is
pushed, and never written. A twin of these optimizers, on the same parameters and the same state, makes the step.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from inspect import unwrap
from itertools import chain, zip_longest
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pipeback.methods.momentum import fused_sgd, fused_step, lay_velocities, plain_sgd, sgd_step
from pipeback.private import hooked, step_hooks
from pipeback.stages.optimizer_counters import OptimizerCounters, counted_by, stepped
from pipeback.stages.rebound_weights import staying
from pipeback.tensors.fused_steps import fitting, lay_state
from pipeback.tensors.weight_list import WeightList

Group = dict[str, Any]
# Optimizers that treat every entry of every parameter on its own: joining stages changes no bit.
_SEPARABLE = {
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop")
}
# Those whose foreach implementation has the bits of their loop on the CPU, in 32 or 64 bits (a test compares them all).
_FOREACH = {getattr(torch.optim, name) for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad")}


class Options:
    """The options of every stage's parameter groups at one moment, and the weights that they held.

    since: the number of micro-batches that had arrived at that moment. It is the same on every worker, so that a saved
    state identifies options by it.
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], since: int, groups: list[list[Group]] | None = None
    ) -> None:
        self.since = since
        self._told = all(map(separable, optimizers))
        self.groups = groups or [[{k: _value(v) for k, v in g.items()} for g in opt.param_groups] for opt in optimizers]
        params = [group["params"] for groups in self.groups for group in groups]
        self._sizes, self._weights = list(map(len, params)), list(chain.from_iterable(params))

    @cached_property
    def mark(self) -> int:
        """A hash that tells these options from others: 15 bits for the rates, 12 for the rest. It is 0 if an optimizer
        may change its options itself, so that they differ from rank to rank.
        """
        every = [group for groups in self.groups for group in groups] if self._told else []
        rates = [float(group["lr"]) for group in every]
        apart = "params", "lr", "foreach", "fused"
        others = [[str(v) for k, v in sorted(group.items()) if k not in apart] for group in every]
        return zlib.crc32(repr(rates).encode()) % 32749 | zlib.crc32(repr(others).encode()) % 4093 << 15

    def current(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Whether the optimizers still have these options, apart from counters of their own steps."""
        return self.same_weights([opt.param_groups for opt in optimizers]) and all(
            opt.param_groups == groups or (opt in counted_by and _same(counted_by[opt], opt.param_groups, groups))
            for opt, groups in zip(optimizers, self.groups, strict=True)
        )

    def same_weights(self, groups: list[list[Group]]) -> bool:
        """Whether groups hold the same weights as these, in the same order."""
        params = [group["params"] for some in groups for group in some]
        return list(map(len, params)) == self._sizes and all(map(is_, chain.from_iterable(params), self._weights))


def _same(counted: OptimizerCounters, mine: list[Group], others: list[Group]) -> bool:
    return bool(counted) and counted.without(mine) == counted.without(others)


def groups_of(stage: Any, options: Options) -> list[Group | None]:
    """Return the options of every weight of a stage (or a replica of it); None for weights that are not stepped."""
    places = {id(w): mine for params, mine in _members(stage, options) for w in params}
    return [places.get(id(w)) for w in stage.weights]


def _members(stage: Any, options: Options) -> list[tuple[list[Tensor], Group]]:
    """The weights of each group of a stage, as they were then, and its options. Of a replica, the present ones."""
    known = options.groups[stage.index]
    first = next((w for group in known for w in group["params"]), None)
    groups = known if any(w is first for w in stage.weights) else stage.optimizer.param_groups
    return [(group["params"], mine) for group, mine in zip(groups, known, strict=True)]


def rates_of(stage: Any, options: Options) -> list[float]:
    """Return the rate η of every weight of a stage (or a replica of it); 0 for weights that are not stepped."""
    return [float(group.get("lr", 0.0)) if group else 0.0 for group in groups_of(stage, options)]


def plain_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: _plain(v) for k, v in g.items() if k != "params"} for g in groups]


def _plain(value: Any) -> Any:
    if type(value) is tuple:
        return tuple(map(_plain, value))
    return value.tolist() if isinstance(value, Tensor) else value


def restored(saved: dict[str, Any], mine: dict[str, Any]) -> dict[str, Any]:
    """The saved options, in the types that this optimizer uses."""
    fixed = {"params": mine["params"]}
    for key, value in saved.items():
        fixed[key] = _typed(value, mine.get(key))
    return fixed


def _typed(value: Any, mine: Any) -> Any:
    if isinstance(mine, Tensor):
        return torch.as_tensor(value, dtype=mine.dtype, device=mine.device)
    if isinstance(mine, tuple):
        return tuple(_typed(each, own) for each, own in zip_longest(value, mine[: len(value)]))
    return value


def _value(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else list(value) if type(value) is list else value


def replaced_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer is of a subclass of torch's SGD, Adam or AdamW with a step of its own."""
    known = [kind for kind in (torch.optim.SGD, torch.optim.Adam) if isinstance(optimizer, kind)]
    return any(unwrap(type(optimizer).step) is not unwrap(kind.step) for kind in known)


def own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's step is that of its class, apart from the wrapper that a scheduler puts around it."""
    return unwrap(vars(optimizer).get("step", type(optimizer).step)) is unwrap(type(optimizer).step)


def joinable(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Whether one step over all equals one step per optimizer: they are of one separable class, without step hooks."""
    kind = type(optimizers[0])
    return kind in _SEPARABLE and all(type(opt) is kind and not hooked(opt) for opt in optimizers)


def separable(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer treats every entry of a parameter on its own; only classes of torch are known to do so."""
    return type(optimizer) in _SEPARABLE


def _apart(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return a subclass whose objects may share all attributes of another object but its parameter groups."""
    groups: WeakKeyDictionary[Any, list[Group]] = WeakKeyDictionary()
    mine = property(groups.__getitem__, groups.__setitem__)
    return type(kind.__name__, (kind,), {"param_groups": mine, "__module__": kind.__module__, "__doc__": kind.__doc__})


class JointOptimizer:
    """The twin of the optimizers of `stages`: has `.step()`, `.param_groups` and `.state` like any optimizer."""

    def __init__(self, stages: Sequence[Any], weights: WeightList) -> None:
        self._stages, self._weights = stages, weights
        first = stages[0].optimizer
        self._own = not separable(first)  # whether its class may keep more state than that of its weights
        self._twin: Any
        if self._own:
            self._twin = object.__new__(_apart(type(first)))
            self._twin.__dict__ = first.__dict__
        else:
            self._twin = object.__new__(type(first))  # not copy.copy, which keeps hooks back
            self._twin.__dict__.update(first.__dict__)
            self._twin.__dict__.pop("step", None)  # a scheduler's wrapper is bound to the original
        self._twin.param_groups = []
        self._known: list[Any] = []
        self._chosen: list[Options] = []

    @property
    def param_groups(self) -> list[Group]:
        groups: list[Group] = self._twin.param_groups
        return groups

    @property
    def state(self) -> Any:
        return self._twin.state

    def step(self) -> None:
        listened = hooked(self._twin)
        if self._fused_sgd and not listened and fused_step(self):
            return
        if self._plain_sgd and not listened:
            sgd_step(self)
        elif self._own or listened:
            with staying(self._weights):
                if self._own:
                    stepped(self._stages[0].optimizer, self._twin.param_groups, self._torchs_step)
                else:
                    self._torchs_step()
        else:
            self._torchs_step()

    def _torchs_step(self) -> None:
        with fitting(self._twin) if self._fused else nullcontext():
            type(self._twin).step(self._twin)  # not what a scheduler has put around the original's

    @contextmanager
    def heard(self, itself: bool) -> Iterator[None]:
        """A context around a step that a method makes `itself`: it calls the optimizer's step hooks, as torch would."""
        before, after = step_hooks(self._twin) if itself else ((), ())
        self._call(before)
        yield
        self._call(after)

    def _call(self, hooks: Sequence[Any]) -> None:
        if hooks:
            with staying(self._weights):
                for hook in hooks:
                    hook(self._twin, (self._twin,), {})

    def at(self, options: Sequence[Options]) -> JointOptimizer:
        """Set the options that each stage's update uses, and follow a state that was loaded into an optimizer."""
        if len(options) != len(self._chosen) or not all(map(is_, options, self._chosen)):
            self._chosen = list(options)
            self._twin.param_groups = self._groups(options)
            self._fused = any(group.get("fused") for group in self._twin.param_groups)
            momentum_sgd = type(self._twin) is torch.optim.SGD
            self._fused_sgd = momentum_sgd and all(map(fused_sgd, self._twin.param_groups))
            self._plain_sgd = momentum_sgd and all(
                plain_sgd(group) and not _half(group["params"]) for group in self._twin.param_groups
            )
            for group in self._twin.param_groups if self._plain_sgd and not self._own else ():
                group["rates"] = None  # `sgd_step` can step each weight at a rate of its own
        seen = self._seen()
        if len(self._known) != len(seen) or not all(map(is_, seen, self._known)) or self._begun:
            self._follow()
        return self

    @property
    def _begun(self) -> bool:
        """Whether velocities have come into a state that had none when it was last seen: it may be empty once more."""
        return self._weights.velocities is not None and any(entry is None for entry in self._known[1::3])

    def _seen(self) -> list[Any]:
        """Return objects that are replaced when somebody puts other values into an optimizer's state."""
        found = []
        for stage in self._stages:
            state = stage.optimizer.state
            first = state.get(stage.weights[0])
            found += [state, first, first and first.get("momentum_buffer")]
        return found

    def _follow(self) -> None:
        """Share the state of every weight with its stage's own optimizer."""
        for stage in self._stages:
            lay_velocities(stage.optimizer, stage.weights)
            stage.weights.forget_velocities()
        if len(self._stages) > 1:
            shared: defaultdict[Tensor, Any] = defaultdict(dict)
            for stage in self._stages:
                shared.update({w: stage.optimizer.state[w] for w in stage.weights})
            self._twin.state = shared
        elif not self._own:  # else the twin has all attributes of the only one
            self._twin.state = self._stages[0].optimizer.state
        lay_state(self._twin.state, self._twin.param_groups)
        self._known = self._seen()
        for bundle in (self._weights, *(group["params"] for group in self._twin.param_groups)):
            bundle.forget_velocities()

    def _groups(self, options: Sequence[Options]) -> list[Group]:
        pairs = [
            ({k: v for k, v in mine.items() if k != "params"}, params)
            for stage, chosen in zip(self._stages, options, strict=True)
            for params, mine in _members(stage, chosen)
            if stage.weights
        ]
        if self._own:  # groups of its own, as many as it has
            return [{**mine, "params": self._bundle(params)} for mine, params in pairs]
        pairs = [(mine, params) for mine, params in pairs if params]
        for mine, params in pairs:
            if type(self._twin) in _FOREACH and params[0].is_cpu and not _half(params) and _looped(mine):
                mine["foreach"] = True
        if pairs and all(mine == pairs[0][0] for mine, _ in pairs):
            return [{**pairs[0][0], "params": self._bundle([w for _, params in pairs for w in params])}]
        return [{**mine, "params": self._bundle(params)} for mine, params in pairs]

    def _bundle(self, params: list[Tensor]) -> WeightList:
        same = len(params) == len(self._weights) and all(a is b for a, b in zip(params, self._weights, strict=True))
        return self._weights if same else WeightList(params)


def _half(params: Sequence[Tensor]) -> bool:
    """Whether foreach rounds these otherwise than a loop: in 16 bits it does."""
    return any(p.element_size() < 4 for p in params)


def _looped(group: Group) -> bool:
    """Whether torch would step this group in a loop where foreach has the same bits; fused is never switched on."""
    odd = any(group.get(name) for name in ("fused", "differentiable", "capturable")) or isinstance(group["lr"], Tensor)
    return group["foreach"] is None and not odd
