"""Spread: cuts the modules of a model that a plan names into this rank's shards, and puts a copy together again.

It happens before the model is traced and split, so that the shapes that a trace sees are those of the shards. The
modules keep their objects and names. An error leaves the model as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from pipeback.private import hooks_on
from pipeback.stages.joint_optimizer import separable
from pipeback.stages.stage import Stage
from pipeback.tensor_parallel import experts, layers
from pipeback.tensor_parallel.cuts import Cut
from pipeback.tensor_parallel.group import TensorGroup
from pipeback.tensor_parallel.plans import ByColumns, Experts, Local, Plan, Style, styles
from pipeback.tensor_parallel.sharding import Sharding
from pipeback.tensor_parallel.whole_updates import LOOKING, WholeUpdates


class _Changed(NamedTuple):
    """A module as it was before it was spread."""

    path: str
    kind: type[nn.Module]
    values: dict[str, Any]  # its attributes that were replaced
    added: tuple[str, ...]  # its attributes that are new
    weights: dict[str, nn.Parameter]
    shapes: dict[str, torch.Size]


class Spread:
    """A model whose modules are spread over the ranks of `group`.

    cuts: how each weight that is cut is, by identity. blocks: the blocks of experts, by path.
    """

    def __init__(self, model: nn.Module, plan: Plan | None, group: TensorGroup) -> None:
        self.group, self.cuts, self._changed = group, dict[int, Cut](), list[_Changed]()
        self.blocks: dict[str, Any] = {}
        planned = styles(model, plan, group.count)
        _check_meta(model)
        counted: dict[int, list[str]] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            counted.setdefault(id(p), []).append(name)
        for path, style in planned.items():
            _check(path, model.get_submodule(path), style, group.count, counted)
        for path, style in planned.items():
            self._spread(path, model.get_submodule(path), style)

    def _spread(self, path: str, module: nn.Module, style: Style) -> None:
        if isinstance(style, Local):
            values = {name: getattr(module, name) // self.group.count for name in style.names}
            self._change(path, module, type(module), values, {}, {})
        elif isinstance(style, Experts):
            self.blocks[path] = module
            inner = experts.inside(module)
            self._change(f"{path}.experts", inner, type(inner), *experts.shard(inner, self.group.count))
            new = {"tensor_group": self.group, "load": experts.ExpertLoad()}
            kind = _mixed(experts.SpreadExperts, module, capacity=style.capacity)
            self._change(path, module, kind, {}, {}, new)
        else:
            columns = isinstance(style, ByColumns)
            cuts = layers.cuts_of(module, columns=columns, parts=style.parts if isinstance(style, ByColumns) else 1)
            numbers = layers.attributes(module, self.group.count, columns=columns)
            if isinstance(style, ByColumns):
                kind = _mixed(layers.CutByColumns, module, assembled=style.assembled)
            else:
                kind = _mixed(layers.CutByRows, module, transposed=layers.transposed(module))
            self._change(path, module, kind, numbers, cuts, {"tensor_group": self.group})

    def _change(
        self, path: str, module: nn.Module, kind: type[nn.Module], values: dict[str, Any], cuts: dict[str, Cut],
        new: dict[str, Any],
    ) -> None:  # fmt: skip
        weights = {name: module._parameters[name] for name in cuts}
        before = {name: getattr(module, name) for name in values}
        there = {name: p for name, p in weights.items() if p is not None}
        self._changed.append(
            _Changed(path, type(module), before, tuple(new), there, {name: p.shape for name, p in there.items()})
        )
        for name, p in there.items():
            shard = nn.Parameter(cuts[name].shard(p.detach(), self.group.index, self.group.count), p.requires_grad)
            vars(shard).update(vars(p))  # what the user has noted on it
            module._parameters[name] = shard
            self.cuts[id(shard)] = cuts[name]
        for name, value in {**values, **new}.items():
            setattr(module, name, value)
        module.__class__ = kind

    def stages(self, stages: Sequence[Stage], method: Any) -> Any:
        """Tell the stages of their shards; return the method as they run it: one that looks at whole weights sees them,
        and so do optimizers that are known to look at them.

        Raises ValueError for another optimizer that may look at whole weights.
        """
        looking = any(type(stage.optimizer) in LOOKING for stage in stages)
        updates = WholeUpdates(method, self.group) if looking or not method.elementwise else None
        for stage in stages:
            routed = any(isinstance(module, experts.SpreadExperts) for module in stage.module.modules())
            sharding = Sharding(list(stage.module.named_parameters()), self.cuts, self.group, routed)
            if sharding.cuts and not separable(stage.optimizer) and type(stage.optimizer) not in LOOKING:
                raise ValueError(
                    f"tensor_parallel: {type(stage.optimizer).__name__} of {stage.label} may look at whole matrices, "
                    "but every rank has a shard of them; use one of torch.optim's elementwise ones, such as SGD or "
                    "AdamW, or leave tensor_parallel out"
                )
            stage.home.spread(sharding)
            if updates is not None:
                updates.begin(stage, sharding)
        return method if updates is None else updates.seeing

    def undo(self) -> None:
        """Put the model back as it was, after an error."""
        for module, changed in reversed(self._known):
            _restore(module, changed, lambda p, _: p)

    def whole(self, copy: nn.Module) -> None:
        """Give a copy of the model its own classes and whole weights, of no certain values, in host memory."""
        for changed in reversed(self._changed):
            _restore(copy.get_submodule(changed.path), changed, _empty)

    def on(self, model: nn.Module) -> Spread:
        """Remember the modules of `model`, for `undo`."""
        self._known = [(model.get_submodule(changed.path), changed) for changed in self._changed]
        return self


def spread(model: nn.Module | Sequence[nn.Module], plan: Plan | None, group: TensorGroup) -> Spread:
    """Spread a model, or a list of modules, over the ranks of a group. Raises ValueError or TypeError naming the module
    of the plan and the cure.
    """
    root = model if isinstance(model, nn.Module) else nn.Sequential(*model)
    return Spread(root, plan, group).on(root)


def _mixed(mixin: type, module: nn.Module, **numbers: Any) -> type[nn.Module]:
    """A class for a module that is spread. Its numbers are of the class: a state knows those of a module alone."""
    own = {"__module__": mixin.__module__, **numbers}
    return type(f"{mixin.__name__}{type(module).__name__}", (mixin, type(module)), own)


def _empty(p: nn.Parameter, shape: torch.Size) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=p.dtype), p.requires_grad)


def _restore(module: nn.Module, changed: _Changed, weight: Callable[[nn.Parameter, torch.Size], nn.Parameter]) -> None:
    module.__class__ = changed.kind
    for name, value in changed.values.items():
        setattr(module, name, value)
    for name in changed.added:
        delattr(module, name)
    for name, p in changed.weights.items():
        module._parameters[name] = weight(p, changed.shapes[name])


def _check_meta(model: nn.Module) -> None:
    if name := next((name for name, p in model.named_parameters() if p.is_meta), None):
        raise ValueError(
            f"tensor_parallel: {name} is on the meta device, but shards are cut from values; build the model on the CPU"
        )


def _check(path: str, module: nn.Module, style: Style, count: int, names: dict[int, list[str]]) -> None:
    """Raise unless the module can be spread so."""
    kind = type(module).__name__
    if isinstance(style, Local):
        for name in style.names:
            value = getattr(module, name, None)
            if not isinstance(value, int):
                raise ValueError(f"plan: {path!r} ({kind}) has no whole number {name!r}; leave it out of Local")
            if value % count:
                raise ValueError(_uneven(path, f"{name}={value}", count))
        return
    if isinstance(style, Experts):
        experts.check(path, module, count)
        for name, weight in experts.inside(module).named_parameters():
            _check_unheard(path, f"experts.{name}", weight)
        return
    if layers.transposed(module) is None:
        raise ValueError(
            f"plan: {path!r} is a {kind}, but only nn.Linear and Conv1D of transformers are cut; give the layers in it"
        )
    parts = style.parts if isinstance(style, ByColumns) else 1
    for name, cut in layers.cuts_of(module, columns=isinstance(style, ByColumns), parts=parts).items():
        weight = module.get_parameter(name)
        if weight.shape[cut.dim] % (count * parts):
            across = "outputs" if isinstance(style, ByColumns) else "inputs"
            raise ValueError(_uneven(path, f"{weight.shape[cut.dim]} {across} in {parts} part(s)", count))
        if len(names[id(weight)]) > 1:
            raise ValueError(
                f"plan: {path}.{name} is also {next(n for n in names[id(weight)] if n != f'{path}.{name}')}, and would "
                "be cut for both; leave it out of the plan"
            )
        _check_unheard(path, name, weight)


def _check_unheard(path: str, name: str, weight: nn.Parameter) -> None:
    if any(hooks_on(weight)):
        raise ValueError(
            f"plan: {path}.{name} has hooks, which would hear of a shard of its gradient only; remove them, or leave "
            f"{path!r} out of the plan"
        )


def _uneven(path: str, what: str, count: int) -> str:
    return f"plan: {path!r} has {what}, which tensor_parallel={count} does not divide; use a divisor of it"
