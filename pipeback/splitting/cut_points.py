"""Cut points: where a model is cut into stages.

layer      one stage per layer with weights, together with the norms, activations and functions that follow it
sublayer   the same, but norms are stages of their own
block      one stage per block of a repeated structure, and stages for the layers before, between and after blocks
n          n stages of neighbouring units, balanced by time or by memory
names      a stage begins where the module of that name is first called
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple, cast

from torch import nn

from pipeback.counts import counted
from pipeback.splitting.call_trace import Call, CallTrace
from pipeback.splitting.module_walk import walked
from pipeback.splitting.partition import balance

Cuts = str | int | Sequence[str]
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
OPEN = ("Transformer", "TransformerEncoder", "TransformerDecoder")  # torch's own modules that hold layers
# block classes of known families, by the package that they come from
FAMILIES: dict[str, dict[str, tuple[str, ...]]] = {
    "torchvision": {
        "ResNet": ("BasicBlock", "Bottleneck"),
        "VisionTransformer": ("EncoderBlock",),
        "ConvNeXt": ("CNBlock",),
        "VGG": (),
    },
    "torch": {"Transformer": ("TransformerEncoderLayer", "TransformerDecoderLayer")},
}


class Family(NamedTuple):
    """A known family of models."""

    name: str
    blocks: tuple[str, ...]  # names of the classes of its blocks


def family(model: nn.Module) -> Family | None:
    """Return the family of a model of torch, torchvision or transformers; None for any other model."""
    package = type(model).__module__.partition(".")[0]
    for kind in type(model).__mro__:
        if (blocks := FAMILIES.get(package, {}).get(kind.__name__)) is not None:
            return Family(f"{package}'s {kind.__name__}", blocks)
    if package == "transformers" and (blocks := getattr(model, "_no_split_modules", None)):
        return Family(f"transformers' {type(model).__name__}", tuple(blocks))
    return None


def blocks_of(model: nn.Module) -> list[str]:
    """Return the paths of the blocks: those of a known family, or else the composite modules that stand in lists."""
    known = family(model)
    if known is not None:
        found = [path for path, module in walked(model).items() if type(module).__name__ in known.blocks]
        if found:
            return found
    found = []
    for path, module in walked(model).items():
        if type(module) not in CONTAINERS:
            continue
        for name, child in module.named_children():
            composite = any(True for _ in child.children()) and type(child) not in CONTAINERS
            if composite and _weights(child) and not isinstance(child, nn.MultiheadAttention):
                found.append(f"{path}.{name}".lstrip("."))
    return [path for path in found if not any(path.startswith(f"{other}.") for other in found)]


def layer(module: nn.Module) -> bool:
    """Whether a module is a layer, which is not traced into: torch's own modules, and all modules without children."""
    if type(module) in CONTAINERS or (type(module).__module__.startswith("torch.nn") and type(module).__name__ in OPEN):
        return False
    own = type(module).__module__.startswith("torch.nn") and not isinstance(module, CONTAINERS)
    return own or getattr(module, "one_call", False) is True or not any(True for _ in module.children())


def leaves(
    blocks: Iterable[str], whole: Container[str], opened: Container[str] = ()
) -> Callable[[str, nn.Module], bool]:
    """Return a function that says of a path and a module whether it is one call of the trace.

    Blocks, layers, the modules in `whole` and the children of the modules in `opened` are one call each. The last two
    may change later.
    """
    kept = set(blocks)

    def leaf(path: str, module: nn.Module) -> bool:
        if not path or path in opened:
            return False
        return path in kept or path in whole or layer(module) or path.rpartition(".")[0] in opened

    return leaf


class Unit(NamedTuple):
    """Neighbouring calls that stay together."""

    begin: int  # the number of its first call
    start: str  # the module (path) or parameter (name) of that call
    work: float  # see `call_cost`; 0 where it was not counted
    weights: int  # bytes of the weights that are first used here
    names: tuple[str, ...]  # names of its modules with weights, and of its parameters


def cut_units(model: nn.Module, record: CallTrace, cuts: Cuts, blocks: Sequence[str]) -> list[Unit]:
    """Return the units of this granularity in the order of the calls. cuts: "layer", "sublayer", "block" or names."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    seen: set[int] = set()
    begins: list[tuple[int, str, list[str]]] = []
    last_block, called = None, set[Any]()
    names = [] if isinstance(cuts, (str, int)) else list(cuts)
    within = _by_module(parameters)
    # names of the parameters that a call computes with
    touched = [(within.get(call.target, []) if call.module else []) + given(parameters, call) for call in record.calls]
    for n, call in enumerate(record.calls):
        mine = [name for name in touched[n] if id(parameters[name]) not in seen]
        seen |= {id(parameters[name]) for name in mine}
        if not isinstance(cuts, (str, int)):
            hit = next((name for name in names if _reached(call, name)), None)
            if hit is not None:
                names.remove(hit)
            starts = hit is not None
        elif not mine and (not call.module or call.target in called or not touched[n]):
            continue  # a layer with tied weights is a unit of its own
        elif cuts == "block":
            block = _within(call, blocks)
            starts, last_block = block != last_block or (call.module and call.target == block), block
        else:
            starts = cuts == "sublayer" or (call.module and not norm(model.get_submodule(call.target)))
        if not begins:
            begins.append((0, "", []))
        elif starts and begins[-1][2]:
            begins.append((n, call.target if call.module else (mine or call.attributes())[0], []))
        if call.module and touched[n] and call.target not in called:
            begins[-1][2].append(call.target)
        elif mine:
            begins[-1][2].extend(mine)
        called.add(call.target)
    if names:
        raise ValueError(_unknown(model, names[0], record))
    found, ends = [], [n for n, *_ in begins[1:]] + [len(record.calls)]
    counted: set[int] = set()
    for (begin, start, held), end in zip(begins, ends, strict=True):
        fresh = {
            id(parameters[k]): parameters[k] for own in touched[begin:end] for k in own
            if id(parameters[k]) not in counted
        }  # fmt: skip
        counted |= set(fresh)
        size = sum(p.numel() * p.element_size() for p in fresh.values())
        found.append(Unit(begin, start, sum(record.costs[begin:end]), size, tuple(held)))
    return found


def joined(units: Sequence[Unit], count: int, by: str) -> list[Unit]:
    """Join neighbouring units to `count` stages, of which the largest is as small as possible.

    by: "time" or "memory". Raises ValueError if there are fewer units than stages.
    """
    if count > len(units):
        raise ValueError(
            f"stages={count}, but the model has {counted(len(units), 'layer')} to share out; use that or less, or "
            '"auto"'
        )
    costs = [unit.work if by == "time" else float(unit.weights) for unit in units]
    owner = balance([cost + 1e-9 for cost in costs], count)
    groups = [[unit for unit, s in zip(units, owner, strict=True) if s == n] for n in range(count)]
    return [
        Unit(g[0].begin, g[0].start, sum(u.work for u in g), sum(u.weights for u in g),
             tuple(name for u in g for name in u.names))
        for g in groups
    ]  # fmt: skip


def _by_module(parameters: Mapping[str, nn.Parameter]) -> dict[str, list[str]]:
    """Return, for the path of every module, the names of the parameters within it, each once."""
    found: dict[str, dict[int, str]] = {}
    for name, p in parameters.items():
        path = name.rpartition(".")[0]
        while path:
            found.setdefault(path, {}).setdefault(id(p), name)
            path = path.rpartition(".")[0]
    return {path: list(own.values()) for path, own in found.items()}


def given(parameters: Container[str], call: Call) -> list[str]:
    """Return the names of the parameters among the arguments of a call."""
    return [name for name in call.attributes() if name in parameters]


def _within(call: Call, blocks: Collection[str]) -> str | None:
    """Return the path of the block that a call belongs to; None outside of blocks."""
    steps = (call.target if call.module else call.where).split(".")
    paths = (".".join(steps[:n]) for n in range(1, len(steps) + 1))
    return next((path for path in paths if path in blocks), None)


def norm(module: nn.Module) -> bool:
    """Whether a module is a normalisation layer."""
    return "Norm" in type(module).__name__


def chosen(cuts: Any) -> Cuts:
    """Return `stages` if it is valid. Raises ValueError, with the nearest valid word, if it is not."""
    words = ("auto", "block", "layer", "sublayer")
    names = isinstance(cuts, (list, tuple)) and bool(cuts) and all(isinstance(name, str) for name in cuts)
    number = isinstance(cuts, int) and not isinstance(cuts, bool) and cuts >= 1
    if cuts in words or names or number:
        return cast(Cuts, cuts)
    near = get_close_matches(cuts, words, n=1) if isinstance(cuts, str) else ()
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"stages must be one of {', '.join(words)}, a number of at least 1, or names of modules where stages begin, "
        f"but is {cuts!r}{hint}"
    )


def _reached(call: Call, name: str) -> bool:
    places = [call.target] if call.module else call.attributes()
    return any(place == name or place.startswith(f"{name}.") for place in places)


def _unknown(model: nn.Module, name: str, record: CallTrace) -> str:
    called = [call.target for call in record.calls if call.module]
    if name in dict(model.named_modules()) and name:
        return f"stages: {name!r} is not called by itself; cut at one of {', '.join(called[:20])}"
    near = get_close_matches(name, [path for path, _ in model.named_modules() if path], n=3)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    return f"stages: {type(model).__name__} has no module {name!r}{hint}"


def _weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
