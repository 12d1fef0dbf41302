"""Activations: what a stage keeps of a micro-batch from its forward (F) to its backward (B), and where it keeps it.

device      keeps the graph and all that autograd has saved, where they were computed
recompute   keeps the input; B runs the forward once more (`recompute`)
host        keeps the graph; the tensors that autograd has saved wait in host memory (`offload`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeback.counts import counted
from pipeback.stages.flight import ActivationPolicy
from pipeback.stages.offload import HostActivations
from pipeback.stages.recompute import Recompute

KINDS: dict[str, type[ActivationPolicy] | None] = {
    "device": None,
    "recompute": Recompute,
    "host": HostActivations,
}


def kinds(asked: str | Sequence[str] | Mapping[str | int, str], names: Sequence[str]) -> list[str]:
    """Return the kind of activation keeping of every stage.

    asked: the pipeline's option `activations`: one kind for all stages, a list with one kind per stage, or a dict
    {name or number of a stage: kind}, in which stages that are not named are "device". names: the stages' names.
    Raises ValueError, which names the stage and the kinds that exist.
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
                f"activations has {counted(len(asked), 'kind')} for {counted(len(names), 'stage')}; give one per "
                "stage, one for all, or a "
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
    """Return a new policy of this kind for one stage; None for "device", which the stage does itself."""
    kind = KINDS[activations]
    return None if kind is None else kind()


def recomputes(activations: Any) -> bool:
    """Whether the backward (B) of every stage runs its forward once more; anything but one kind for all is False."""
    kind = KINDS.get(activations) if isinstance(activations, str) else None
    return kind is not None and not kind.stashes
