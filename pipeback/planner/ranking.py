"""Ranking: of every method, and of what has no pipeline, the best few options, exactly.

Candidates are simulated in the order of the fewest days that they can take, until no other can be better. So a rank is
exact, though few are simulated.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeback.planner.candidates import Candidate, Fixed, candidates
from pipeback.planner.estimates import Estimate, Job, complete
from pipeback.planner.found import Found
from pipeback.planner.memory import footprint
from pipeback.planner.options import Option
from pipeback.planner.techniques import Technique

EACH = 3  # options of a method that are ranked


def ranked(job: Job, techniques: Sequence[Technique], fixed: Fixed) -> Found:
    """All that fit, best first; it is empty if nothing does."""
    by_method: dict[str, list[Candidate]] = {}
    refused: dict[str, Candidate] = {}
    for one in candidates(job, techniques, fixed):
        name = one.option.technique.name
        if one.fits:
            by_method.setdefault(name, []).append(one)
        elif name not in refused or one.required < refused[name].required:
            refused[name] = one
    best = [_whole(job, one) for some in by_method.values() for one in _best(job, some)]
    left = [_whole(job, one) for name, one in refused.items() if name not in by_method]
    return Found(job, sorted((one for one in best if one.fits), key=lambda one: one.days), left)


def _best(job: Job, some: Sequence[Candidate]) -> list[Estimate]:
    """The best few, no two of which differ in micro-batches alone."""
    found: list[Estimate] = []
    for one in sorted(some, key=lambda one: one.days):
        if len(found) == EACH and one.days >= found[-1].days:
            break
        whole = complete(job, one.option, one.loads, one.footprint)
        alike = [other for other in found if _way(other.option) == _way(whole.option)]
        if not alike or whole.days < alike[0].days:
            found = sorted([other for other in found if other not in alike] + [whole], key=lambda one: one.days)[:EACH]
    return found


def _way(option: Option) -> tuple[object, ...]:
    return option.data, option.pipeline, option.tensor, option.chunks, option.shard, option.store


def _whole(job: Job, one: Candidate | Estimate) -> Estimate:
    """With the bytes of all workers, where only those that are likely the fullest were looked at."""
    return complete(job, one.option, one.loads, footprint(one.option, one.loads, job.precision))
