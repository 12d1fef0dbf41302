"""Plans: which modules are spread over the ranks and how: the user's, or that of a known family.

    plan={"*.attention.qkv": ByColumns(parts=3), "*.attention.out": "rowwise", "*.up": "colwise", "*.down": "rowwise"}

Keys are paths as in `named_modules()`; a `*` stands for one step of a path, and one at the beginning for any number.
The words, and the classes `ColwiseParallel` and `RowwiseParallel` of torch.distributed.tensor.parallel with their
default layouts, mean the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from torch import nn


class ByColumns(NamedTuple):
    """A layer is cut by its outputs, which stay spread; the layer that takes them is cut by its inputs.

    parts      blocks of outputs that are cut each by itself: 3 for query, key and value in one layer
    assembled  whether its output is put together again on every rank, as that of a head is
    """

    parts: int = 1
    assembled: bool = False


class ByRows(NamedTuple):
    """A layer is cut by its inputs, which are spread; its output is the sum over the ranks, and whole."""


class Local(NamedTuple):
    """Whole numbers of a module, such as its number of heads, that are divided by the number of ranks."""

    names: tuple[str, ...]


class Experts(NamedTuple):
    """A block of experts is spread: each rank holds as many of them, and tokens travel to their experts and back.

    capacity  the most tokens that an expert takes of a micro-batch, as a multiple of the mean; what comes later is
              dropped, and passes the block by. None: no limit
    """

    capacity: float | None = None


Style = ByColumns | ByRows | Local | Experts
Plan = Mapping[str, Any]

WORDS: dict[str, Style] = {
    "colwise": ByColumns(),
    "rowwise": ByRows(),
    "colwise_gather_output": ByColumns(assembled=True),
    "experts": Experts(),
}

_TORCH: dict[str, Style] = {"ColwiseParallel": ByColumns(), "RowwiseParallel": ByRows()}

GPT2: dict[str, Style] = {
    "*.attn": Local(("split_size", "num_heads")),
    "*.attn.c_attn": ByColumns(parts=3),
    "*.attn.c_proj": ByRows(),
    "*.mlp.c_fc": ByColumns(),
    "*.mlp.c_proj": ByRows(),
}
SEPARATE: dict[str, Style] = {
    "*.q_proj": ByColumns(),
    "*.k_proj": ByColumns(),
    "*.v_proj": ByColumns(),
    "*.o_proj": ByRows(),
}
LLAMA: dict[str, Style] = SEPARATE | {"*.gate_proj": ByColumns(), "*.up_proj": ByColumns(), "*.down_proj": ByRows()}
VIT: dict[str, Style] = SEPARATE | {"*.fc1": ByColumns(), "*.fc2": ByRows()}
MIXTRAL: dict[str, Style] = SEPARATE | {"*.mlp": Experts()}
FAMILIES: dict[str, dict[str, Style]] = {"GPT2": GPT2, "Llama": LLAMA, "ViT": VIT, "Mixtral": MIXTRAL}


def known(model: nn.Module) -> dict[str, Style] | None:
    """The plan of the family that a model of transformers belongs to; None: there is none."""
    name = type(model).__name__
    if not type(model).__module__.startswith("transformers."):
        return None
    return next((FAMILIES[f] for f in FAMILIES if re.match(rf"{f}(?![a-z0-9])", name)), None)


def styles(model: nn.Module, plan: Plan | None, count: int) -> dict[str, Style]:
    """The style of each module that the plan spreads, by path. Raises ValueError or TypeError naming the entry."""
    if plan is None and (plan := known(model)) is None:
        raise ValueError(
            f"tensor_parallel={count}: {type(model).__name__} is of no family that has a plan; give one, for example "
            f'tensor_parallel=pipeback.TensorParallel({count}, plan={{"*.up": "colwise", "*.down": "rowwise"}})'
        )
    if not isinstance(plan, Mapping) or not plan:
        raise TypeError(
            f"plan must be a dict of styles by path of a module, but is {plan!r}; give one, or leave it out"
        )
    paths, found = [path for path, _ in model.named_modules() if path], dict[str, Style]()
    for key, value in plan.items():
        style = style_of(key, value)
        matching = [path for path in paths if _pattern(key).fullmatch(path)]
        if not matching:
            near = get_close_matches(key, paths, n=1, cutoff=0.3)
            cure = f"; did you mean {near[0]!r}?" if near else "; print(model) shows the names"
            raise ValueError(f"plan names {key!r}, but the model has no such module{cure}")
        found.update(dict.fromkeys(matching, style))
    return found


def _pattern(key: str) -> re.Pattern[str]:
    text = re.escape(key).replace(r"\*", r"[^.]+")
    return re.compile(r"(?:.+\.)?" + text.removeprefix(r"[^.]+\.") if key.startswith("*.") else text)


def style_of(key: str, value: Any) -> Style:
    """The style that a plan gives to a module. Raises ValueError or TypeError naming the entry."""
    if isinstance(value, str) and value in WORDS:
        return WORDS[value]
    if isinstance(value, (ByColumns, ByRows, Local, Experts)):
        return value
    kind = type(value)
    if kind.__module__.startswith("torch.distributed.tensor.parallel") and kind.__name__ in _TORCH:
        plain, whole = _layouts(kind()), _layouts(kind(output_layouts=kind().input_layouts[0]))
        if _layouts(value) == plain:
            return _TORCH[kind.__name__]
        if kind.__name__ == "ColwiseParallel" and _layouts(value) == whole:
            return ByColumns(assembled=True)
        raise ValueError(
            f"plan: {key!r} has a {kind.__name__} with layouts of its own, but only the default ones are known; "
            'leave them out, or use "colwise_gather_output" for an output that all ranks have'
        )
    raise TypeError(
        f"plan: the style of {key!r} must be one of {', '.join(map(repr, WORDS))}, a style of "
        f"pipeback.tensor_parallel, or a ColwiseParallel or RowwiseParallel of torch, but is {value!r}"
    )


def _layouts(style: Any) -> tuple[Any, ...]:
    return style.input_layouts, style.output_layouts, style.use_local_output
