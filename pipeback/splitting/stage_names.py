"""Stage names: the names that the stages of a traced model have in reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pipeback.splitting.cut_points import Cuts, Unit


def label(unit: Unit, kind: Cuts) -> str:
    """Return a unit's name: that of its layer, or, of several, the longest path that contains them, or a range."""
    if not unit.names or kind in ("layer", "sublayer"):
        return unit.names[0] if unit.names else unit.start or "input"
    paths = [name.split(".") for name in unit.names]
    common = []
    for steps in zip(*paths, strict=False):
        if len(set(steps)) > 1:
            break
        common.append(steps[0])
    return ".".join(common) or f"{paths[0][0]}…{paths[-1][0]}"


def labels(units: Sequence[Unit], kind: Cuts) -> list[str]:
    """Return the names of all units; no two are the same."""
    found = [label(unit, kind) for unit in units]
    counts = Counter(found)
    for s, unit in enumerate(units):
        if counts[found[s]] > 1:
            found[s] = unit.names[0] if unit.names and unit.names[0] not in found else f"{found[s]}#{s}"
    return found
