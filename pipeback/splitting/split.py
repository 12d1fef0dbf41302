"""Split: cuts a model into stages, by the first of four rungs that applies.

a  an nn.Sequential or a list: one stage per module
b  a module with a method pipeline_stages(), which returns its stages
c  a known family (torchvision, torch.nn.Transformer, transformers): its own forward is traced, and cut at its blocks
d  any other module: its own forward is traced, and cut at blocks or layers
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipeback.counts import counted
from pipeback.notebook import Drawing, bars, table
from pipeback.splitting.cut_points import Cuts, chosen, family
from pipeback.splitting.module_hooks import dressed
from pipeback.splitting.module_restore import untouched
from pipeback.splitting.partition import StagePart, declared, join, plain, split
from pipeback.splitting.traced_model import TracedModel
from pipeback.splitting.uncompiled import uncompiled
from pipeback.splitting.whole_model import PATH, WholeModel, check_one, warn_of_one
from pipeback.tensors.copies import replica


@dataclass(repr=False)
class Split:
    """A model's stages. `print` shows the rung that applied, why earlier rungs did not, and the names of the stages."""

    rung: str
    parts: list[StagePart]
    model: nn.Module  # the model that was split
    program: TracedModel | None = None  # None unless a forward was traced
    reasons: dict[str, str] = field(default_factory=dict)  # why a rung did not apply, by its letter
    spread: Any = None  # how its weights were spread over ranks before it was split (tensor_parallel.spread)
    rest: Callable[[], AbstractContextManager[object]] = nullcontext  # around each call of the pipeline

    def __str__(self) -> str:
        reasons = "".join(f"\n  not {letter}: {reason}" for letter, reason in self.reasons.items())
        names = ", ".join(part.name for part in self.parts)
        return f"{counted(len(self.parts), 'stage')} by {self.rung}{reasons}\n  {names}"

    def __repr__(self) -> str:
        return f"Split({counted(len(self.parts), 'stage')} by {self.rung})"

    def _repr_html_(self) -> str:
        rows = [(n, part.name, type(part.module).__name__, f"{_size(part):,}") for n, part in enumerate(self.parts)]
        notes = " ".join(f"Not {letter}: {reason}." for letter, reason in self.reasons.items())
        return table(repr(self), ["stage", "name", "module", "parameters"], rows, notes)

    def draw(self) -> Drawing:
        """A picture of the stages, with one bar per stage, as long as it has parameters; a notebook shows it."""
        rows = [
            (part.name if part.name == str(n) else f"{n} {part.name}", float(_size(part)), f"{_size(part):,}")
            for n, part in enumerate(self.parts)
        ]
        return bars(f"Parameters of {counted(len(self.parts), 'stage')}", rows)


def split_model(
    model: nn.Module | Sequence[nn.Module],
    stages: Cuts = "auto",
    example: Any = None,
    leaves: Sequence[str] = (),
    balance: str = "time",
) -> Split:
    """Split a model into stages.

    stages: see `cut_points`. example: the input of a push, which models need whose forward is traced. leaves: paths of
    modules that are not traced into. balance: "time" or "memory", by which a number of stages is balanced.

    Raises TypeError or ValueError naming the layer, what was found and the cure; the model is not changed.
    """
    cuts, reasons, model = chosen(stages), dict[str, str](), uncompiled(model)
    if not isinstance(model, nn.Module) or isinstance(model, nn.ModuleList):
        if not _whole(cuts):
            raise ValueError(f'stages={cuts!r}: a list has its modules for stages; give "auto", a number or one module')
        parts = join(split(model), _count(cuts))
        return Split("a: a list of modules", parts, model if isinstance(model, nn.Module) else nn.Sequential(*model))
    found = at_once(model, cuts, leaves, reasons, example, strict=example is None)
    if found is not None:
        return found
    if example is None:
        raise TypeError(
            f"{type(model).__name__}: {reasons['a']}, so stages are cut from its forward, which needs an input: give "
            "example=, what one push brings; or give its modules as a list, or it a method pipeline_stages() that "
            "returns them, in the order in which they run"
        )
    if "" in leaves:
        check_one(cuts)
        program = TracedModel(WholeModel(model), example, "layer", [PATH], balance)
        reasons["c"] = "leaves has the whole model"
        return Split("d: its forward, as one stage", program.parts, model, program, reasons)
    known = family(model)
    if plain(model) and cuts == "auto":
        children = [name for name, _ in model.named_children()]
        program = TracedModel(model, example, children, [*children, *leaves], balance)
    else:
        program = TracedModel(model, example, cuts, leaves, balance)
    if leaves and len(program.segments) == 1:
        warn_of_one(model, cuts, leaves)
    if known is None:
        reasons["c"] = "it is of no family that is known"
        rung = "d: its forward, traced"
    else:
        rung = f"c: {known.name}, its forward traced"
    return Split(rung, program.parts, model, program, reasons)


def at_once(
    model: nn.Module,
    cuts: Cuts,
    leaves: Sequence[str] = (),
    reasons: dict[str, str] | None = None,
    example: Any = None,
    strict: bool = False,
) -> Split | None:
    """Try the rungs that need no trace, a and b; None if neither applies, with the reasons in `reasons`.

    example: an input, with which a sequence is run to see whether only tensors cross its boundaries. strict: shared
    weights in the stages of a sequence are an error; otherwise they are a reason to trace it.
    """
    reasons = {} if reasons is None else reasons
    around = dressed(model)
    if plain(model) and around:
        reasons["a"] = f"{around}, which a sequence of stages would not run"
    elif plain(model) and _whole(cuts) and not leaves:
        try:
            parts = split(model)
        except ValueError as error:
            if strict or "share a parameter" not in str(error):
                raise
            reasons["a"] = str(error).partition(";")[0]
        else:
            odd = None if example is None else _odd(parts, example)
            if odd is None:
                return Split("a: the children of an nn.Sequential", join(parts, _count(cuts)), model)
            reasons["a"] = odd
    elif plain(model):
        reasons["a"] = f"stages={cuts!r} looks into its children" if not leaves else "leaves are given"
    else:
        reasons["a"] = f"{type(model).__name__} has a forward of its own"
    if not callable(getattr(model, "pipeline_stages", None)):
        reasons["b"] = "it has no pipeline_stages()"
    elif _whole(cuts):
        if around:
            raise ValueError(
                f"{type(model).__name__}: {around}, but its stages are what its pipeline_stages() returns, and nobody "
                "calls it; leave that to a module in its first or last stage, or have its forward traced: "
                'stages="layer" and example='
            )
        parts = split(declared(type(model).__name__, model))
        return Split("b: its pipeline_stages()", join(parts, _count(cuts)), model, None, reasons)
    else:
        reasons["b"] = f"stages={cuts!r} asks for other stages"
    return None


def _size(part: StagePart) -> int:
    """How many parameters a stage has."""
    return sum(p.numel() for p in part.module.parameters())


def _whole(cuts: Cuts) -> bool:
    """Whether the cuts keep each module of a list whole."""
    return cuts == "auto" or isinstance(cuts, int)


def _count(cuts: Cuts) -> int | None:
    return cuts if isinstance(cuts, int) else None


def _odd(parts: Sequence[StagePart], example: Any) -> str | None:
    """Say which value crosses a boundary and is neither a tensor nor a tuple of tensors; None if there is none."""
    value = example
    if any(t.is_meta for part in parts for t in part.module.parameters()):
        return None if _simple(value) else "its input is a structure"
    for part in parts:
        if not _simple(value):
            return f"a {type(value).__name__} goes into {part.name!r}"
        with untouched(part.module), torch.random.fork_rng([]), torch.no_grad():
            value = part.module(_apart(value))
    return None


def _apart(value: Any) -> Any:
    """Return the value with copies of its tensors, since a module may change its input."""
    return tuple(replica(part) for part in value) if isinstance(value, tuple) else replica(value)


def _simple(value: Any) -> bool:
    parts = value if isinstance(value, tuple) else (value,)
    return bool(parts) and all(isinstance(part, Tensor) for part in parts)
