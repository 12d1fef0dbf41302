"""Activations: what a stage keeps of a micro-batch from its forward to its backward, and where.

device      the graph, and all that autograd has saved, where it was computed
recompute   the input; B does the forward once more (`recompute`)
host        the graph; what autograd has saved waits in host memory (`offload`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeback.stages.offload import HostActivations
from pipeback.stages.recompute import Recompute
from pipeback.stages.stage import ActivationPolicy

KINDS: dict[str, type[Recompute | HostActivations] | None] = {
    "device": None,
    "recompute": Recompute,
    "host": HostActivations,
}


def kinds(asked: str | Sequence[str] | Mapping[str | int, str], names: Sequence[str]) -> list[str]:
    """The kind of every stage, of a pipeline's option; names: of the stages.

    asked: one kind for all, a list with one for each, or {stage's name or number: kind}, "device" for the rest.
    Raises ValueError naming the stage and what there is.
    """
    if isinstance(asked, str):
        found = [asked] * len(names)
    elif isinstance(asked, Mapping):
        found = ["device"] * len(names)
        given: dict[int, Any] = {}
        for key, kind in asked.items():
            s = names.index(key) if key in names else key
            if isinstance(s, bool) or not isinstance(s, int) or not 0 <= s < len(names):
                raise ValueError(
                    f"activations: there is no stage {key!r}; there are {', '.join(names)}, numbered from 0 to "
                    f"{len(names) - 1}"
                )
            if s in given:
                raise ValueError(
                    f"activations: stage {s} ({names[s]}) is named twice, {given[s]!r} and {key!r}; leave one out"
                )
            given[s], found[s] = key, kind
    elif isinstance(asked, (list, tuple)):
        if len(asked) != len(names):
            raise ValueError(
                f"activations has {len(asked)} kinds for {len(names)} stages; give one a stage, one for all, or a "
                "dict of those that are not on the device"
            )
        found = list(asked)
    else:
        raise ValueError(f"activations must be one of {', '.join(KINDS)}, a list or a dict of such, but is {asked!r}")
    for s, kind in enumerate(found):
        if kind not in tuple(KINDS):
            where = "" if isinstance(asked, str) else f" for stage {s} ({names[s]})"
            raise ValueError(f"activations must be one of {', '.join(KINDS)}, but is {kind!r}{where}")
    return found


def keeping(activations: str) -> ActivationPolicy | None:
    """A new one for a stage; None for "device", which the stage does itself."""
    kind = KINDS[activations]
    return None if kind is None else kind()
