"""Search: the best options for a job, ranked by the days to the target.

    found = search(Model.named("gpt:13b"), "64xA100", tokens=300e9)
    print(found)
    found.best, found[2].timeline(), found.frontier()

Of every method the best few are found exactly: candidates are simulated in the order of the fewest days that they can
take, until no other can be better. So a rank is exact, though few are simulated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipeback.planner.candidates import Asked, Candidate, candidates
from pipeback.planner.constants import Constants, constants
from pipeback.planner.costs import Costs
from pipeback.planner.estimates import Estimate, Job, complete
from pipeback.planner.found import Found
from pipeback.planner.hardware import Cluster, Device, devices
from pipeback.planner.loss import Loss
from pipeback.planner.memory import places
from pipeback.planner.models import Model
from pipeback.planner.options import Option
from pipeback.planner.precisions import precision
from pipeback.planner.quantities import count
from pipeback.planner.techniques import Technique, names, technique

EACH = 3  # options of a method that are ranked
TOKENS = 20  # per parameter, if nothing is asked: Hoffmann et al., arXiv 2203.15556


def search(
    model: Model | str,
    on: str | Cluster | Device,
    *,
    tokens: float | str | None = None,
    methods: str | Iterable[str] = "all",
    optimizer: str = "adamw",
    numbers: str = "mixed",
    target: Loss | None = None,
    asked: Asked | None = None,
    using: Constants | None = None,
    price: float = 0.0,
    link: str | float | None = None,
    host: str | float | None = None,
) -> Found:
    """The options for a model on a cluster, best first.

    tokens: to train on; None: 20 per parameter. methods: names, or "all". numbers: "mixed" or "float" (`precisions`).
    target: what delays and batches cost. asked: what is fixed. price: of a device per hour. link, host: as `devices`.
    Raises ValueError for what contradicts itself; and where nothing fits, with the nearest that does.
    """
    model = Model.named(model) if isinstance(model, str) else model
    cluster = devices(on, link=link, host=host)
    wanted = TOKENS * model.parameters if tokens is None else count("tokens", tokens)
    job = Job(
        model, Costs(cluster, using or constants()), precision(numbers, optimizer), wanted, target or Loss(), optimizer,
        price,
    )  # fmt: skip
    fixed = asked or Asked()
    return _found(job, _techniques(methods, optimizer), fixed)


def _techniques(methods: str | Iterable[str], optimizer: str) -> list[Technique]:
    if methods == "all":
        every = [technique(name) for name in names() if name != "sgd"]
        return [one for one in every if not one.needs or optimizer in one.needs]
    found = [technique(name) for name in (methods.split(",") if isinstance(methods, str) else methods)]
    for one in found:
        if one.needs and optimizer not in one.needs:
            raise ValueError(f"method={one.name} is for {', '.join(one.needs)}; give optimizer={one.needs[0]}")
    return found


def _found(job: Job, techniques: Sequence[Technique], asked: Asked) -> Found:
    by_method: dict[str, list[Candidate]] = {}
    refused: dict[str, Candidate] = {}
    for one in candidates(job, techniques, asked):
        name = one.option.technique.name
        if one.days < float("inf"):
            by_method.setdefault(name, []).append(one)
        elif name not in refused or one.required < refused[name].required:
            refused[name] = one
    ranked = [whole for some in by_method.values() for one in _best(job, some) if (whole := _whole(job, one)).fits]
    left = [refused[name] for name in refused if name not in {best.option.technique.name for best in ranked}]
    return Found(job, sorted(ranked, key=lambda one: one.days), [_whole(job, one) for one in left])


def _best(job: Job, some: Sequence[Candidate]) -> list[Estimate]:
    """The best few, no two of which differ in micro-batches alone."""
    found: list[Estimate] = []
    for one in sorted(some, key=lambda one: one.days):
        if len(found) == EACH and one.days >= found[-1].days:
            break
        whole = complete(job, one.option, one.loads, one.places)
        alike = [other for other in found if _way(other.option) == _way(whole.option)]
        if not alike or whole.days < alike[0].days:
            found = sorted([other for other in found if other not in alike] + [whole], key=lambda one: one.days)[:EACH]
    return found


def _way(option: Option) -> tuple[object, ...]:
    return option.data, option.pipeline, option.tensor, option.chunks, option.shard, option.store


def _whole(job: Job, one: Candidate | Estimate) -> Estimate:
    """With the bytes of all workers, where only those that are likely the fullest were looked at."""
    return complete(job, one.option, one.loads, places(one.option, one.loads, job.precision))
