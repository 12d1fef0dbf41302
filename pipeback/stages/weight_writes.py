"""Weight writes: finds forwards that write into the weights of their stage, as `nn.Embedding(max_norm=...)` does.

Where a stage computes with a copy of its weights, what its forward writes would be lost: weights come from a store, or
the method shifts them for F. Where activations are recomputed, a forward that writes something else each time, such as
a teacher that follows its student, would do so twice. And replicas would write what their own micro-batches ask for.

A write is seen where it changes a value in the first micro-batch. An embedding with a largest norm writes as soon as a
row exceeds it, which may come later, so it counts as one that writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from pipeback.methods.base import Method
from pipeback.stages.stage import Stage
from pipeback.tensors.checksum import checksum


def check(stage: Stage, method: Method, delays: Sequence[int], run: Callable[[], object]) -> None:
    """Run the forward of a stage, which has its weights. Raises ValueError, which names the weight and the cure."""
    stored, shifts = stage.home.slot is not None, method.copies == "scratch" and delays[stage.index] > 0
    again = stage.keeping is not None and not stage.keeping.stashes
    bounded = _bounded(stage)
    if bounded is not None and stage.replica:
        raise ValueError(
            f"{stage.label}: {bounded} has max_norm, by which each replica would bound the rows that its own "
            "micro-batches look up, so that replicas drift apart; use replicas=1, or max_norm=None"
        )
    watched = [(n, p) for n, p in stage.module.named_parameters() if stored or again or (shifts and p.requires_grad)]
    before = _read(watched)
    run()
    if again and not stored and not shifts and _changed(watched, before) is not None:
        before = _read(watched)
        run()
    name = _changed(watched, before)
    if name is None and (stored or shifts) and any(n == bounded for n, _ in watched):
        name = bounded
    if name is None:
        return
    lost, between = "so that this would be lost", "write into them between pushes, within pipe.shown(changes=True)"
    if stored:
        why = f"these are copies of those in the store, {lost}; keep them on the device: store=None, or {between}"
    elif shifts:
        why = f'{method!r} has it run on shifted copies of them, {lost}; use method="pb" or "pipedream", or {between}'
    else:
        why = f'activations="recompute" runs it twice; use activations="device", or {between}'
    raise ValueError(f"{stage.label}: its forward writes into its weights ({name}), but {why}")


def _bounded(stage: Stage) -> str | None:
    """The name of the weight of an embedding with a largest norm of its rows, if there is one."""
    kinds = nn.Embedding, nn.EmbeddingBag
    found = [n for n, m in stage.module.named_modules() if isinstance(m, kinds) and m.max_norm is not None]
    return ".".join([*filter(None, found[:1]), "weight"]) if found else None


def _read(watched: Sequence[tuple[str, Tensor]]) -> list[Any]:
    """The values, by checksums; of large weights also by versions, since few of their values may change."""
    return [(checksum([p.detach()]), p._version if p.nbytes > 1 << 20 else 0) for _, p in watched]


def _changed(watched: Sequence[tuple[str, Tensor]], before: Sequence[Any]) -> str | None:
    """The name of a weight that is not as it was."""
    now = zip(watched, before, _read(watched), strict=True)
    return next((name for (name, _), known, found in now if known != found), None)
