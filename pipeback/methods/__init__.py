"""The methods by name: ours, and other packages' entry points in the group `pipeback.methods`."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from pipeback.method import Method

GROUP = "pipeback.methods"

# imported when first asked for, so that a broken plug-in breaks only itself
_OURS = {
    "sgd": "sgd:Sequential",
    "gpipe": "gpipe:GPipe",
    "one_f_one_b": "one_f_one_b:OneForwardOneBackward",
    "pb": "pb:PipelinedBackpropagation",
    "pipedream": "pipedream:PipeDream",
    "pipedream_2bw": "pipedream_2bw:PipeDream2BW",
    "pipemare": "pipemare:PipeMare",
    "spectrain": "spectrain:SpecTrain",
    "lwp": "lwp:LinearWeightPrediction",
    "sc": "sc:SpikeCompensation",
    "cerebras": "cerebras:Cerebras",
}


def available() -> list[str]:
    """Names that `create` and `Pipeline(method=...)` take; ours first, then those of other packages."""
    return [*_OURS, *sorted({point.name for point in entry_points(group=GROUP)} - set(_OURS))]


def create(name: str, **options: Any) -> Method:
    """Build a method: `create("gpipe", micro_batches=4)`.

    Raises ValueError for an unknown name or option and suggests the nearest.
    """
    build = _find(name)
    parameters = inspect.signature(build).parameters.values()
    known = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for option in options:
        if option not in known and not open_ended:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise ValueError(f"method {name!r} has no option {option!r}{_nearest(option, known)}; {takes}")
    missing = [p.name for p in parameters if p.name in known and p.default is p.empty and p.name not in options]
    if missing:
        raise ValueError(f"method {name!r} needs the option {missing[0]}=")
    method = build(**options)
    if not isinstance(method, Method):
        raise ValueError(f"method {name!r} built a {type(method).__name__}; a plug-in must build a pipeback.Method")
    return method


def options(name: str) -> dict[str, inspect.Parameter]:
    """The options that `create(name)` takes, by name, with their defaults."""
    return dict(inspect.signature(_find(name)).parameters)


def _find(name: str) -> Callable[..., Any]:
    if name in _OURS:
        module, _, attribute = _OURS[name].partition(":")
        return getattr(import_module(f"{__name__}.{module}"), attribute)
    for point in entry_points(group=GROUP):
        if point.name == name:
            return point.load()
    raise ValueError(f"unknown method {name!r}{_nearest(name, available())}; available: {', '.join(available())}")


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""
