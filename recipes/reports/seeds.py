"""Seeds: of the runs of one method, seed and configuration one counts; a run that was stopped is no second seed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipeback.recipes.reports import options
from pipeback.recipes.reports.runs import SAMPLES, end
from pipeback.recipes.reports.sources import Run


def once(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Return the runs without those that repeat a seed, and a note on each of these.

    The run that ended counts; of several, the one that has seen most samples. Runs without a seed are all kept.
    """
    left: dict[int, str] = {}
    for same in options.told_apart(runs).values():
        by_seed: dict[tuple[str, ...], list[Run]] = {}
        for run in same:
            if run.facts.get("seed") is not None:
                by_seed.setdefault((options.text(run.facts["seed"]), str(run.facts.get("metric"))), []).append(run)
        for (seed, _), several in by_seed.items():
            kept = max(several, key=lambda run: (_ended(run), run.last(SAMPLES) or 0.0))
            told = f"{kept.origin} is a run of the same method, seed {seed} and configuration"
            for run in several:
                if run is not kept:
                    stopped = "did not end, and is left out" if _ended(run) < _ended(kept) else "is left out"
                    left[id(run)] = f"{run.origin} {stopped}: {told}"
    return [run for run in runs if id(run) not in left], list(left.values())


def _ended(run: Run) -> int:
    """2: it ended by itself; 1: nobody knows, as of a run of `pipeback train`; 0: it was stopped, or goes on."""
    return 2 if run.progress in ("finished", "diverged") or math.isfinite(end(run)) else 1 - bool(run.progress)
