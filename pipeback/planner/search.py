"""Search: the best options for a job, ranked by the days to the target; and how many devices a target takes.

found = search("gpt:13b", "64xA100", tokens=300e9)
print(found)
found.best, found[2].timeline(), found[2].explain()
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pipeback.planner.candidates import Fixed
from pipeback.planner.constants import Constants
from pipeback.planner.estimates import Job
from pipeback.planner.found import Found
from pipeback.planner.hardware import Cluster, Device, devices
from pipeback.planner.loss import Loss
from pipeback.planner.models import Model
from pipeback.planner.precisions import precision
from pipeback.planner.quantities import cost, count, days
from pipeback.planner.ranking import ranked
from pipeback.planner.refusals import MOST, NothingFits, nothing_fits
from pipeback.planner.techniques import Technique, names, technique

TOKENS = 20  # per parameter, if none are given: Hoffmann et al., arXiv 2203.15556


@dataclass(frozen=True)
class Question:
    """What is to be found out, but for the devices. Fields are those of `search`."""

    model: Model
    tokens: float
    techniques: tuple[Technique, ...]
    optimizer: str = "adamw"
    numbers: str = "mixed"
    target: Loss = field(default_factory=Loss)
    fixed: Fixed = field(default_factory=Fixed)
    using: Constants | None = None
    price: float = 0.0

    def job(self, cluster: Cluster) -> Job:
        return Job(
            self.model, cluster, precision(self.numbers, self.optimizer), self.tokens, self.target, self.optimizer,
            self.price, self.using,
        )  # fmt: skip

    def answer(self, cluster: Cluster) -> Found:
        """Raises ValueError for what contradicts itself; and where nothing fits, with the nearest that does."""
        job = self.job(cluster)
        self.fixed.check(job)
        found = ranked(job, self.techniques, self.fixed)
        if not found:
            raise nothing_fits(job, self.techniques, self.fixed, found)
        found.again = self.best
        return found

    def best(self, cluster: Cluster) -> Found | None:
        """The same; None where nothing fits."""
        found = ranked(self.job(cluster), self.techniques, self.fixed)
        found.again = self.best
        return found or None


def question(
    model: Model | str,
    *,
    tokens: float | str | None = None,
    methods: str | Iterable[str] = "all",
    optimizer: str = "adamw",
    numbers: str = "mixed",
    target: Loss | None = None,
    fixed: Fixed | None = None,
    using: Constants | None = None,
    price: float = 0.0,
) -> Question:
    """A question about a model; arguments as those of `search`."""
    model = Model.named(model) if isinstance(model, str) else model
    wanted = TOKENS * model.parameters if tokens is None else count("tokens", tokens)
    some, paid = tuple(_techniques(methods, optimizer)), cost("price", price)
    return Question(model, wanted, some, optimizer, numbers, target or Loss(), fixed or Fixed(), using, paid)


def search(
    model: Model | str,
    on: str | Cluster | Device,
    *,
    tokens: float | str | None = None,
    methods: str | Iterable[str] = "all",
    optimizer: str = "adamw",
    numbers: str = "mixed",
    target: Loss | None = None,
    fixed: Fixed | None = None,
    using: Constants | None = None,
    price: float = 0.0,
    link: str | float | None = None,
    host: str | float | None = None,
) -> Found:
    """The options for a model on a cluster, best first.

    tokens: to train on; None: 20 per parameter. methods: names, or "all". optimizer: adamw or sgd (with momentum).
    numbers: "mixed" or "float" precision. target: what delays and batches cost. fixed: what is fixed.
    using: constants of the cost model; None: the catalogue's. price: of a device per hour. link, host: as `devices`.
    Raises ValueError for what contradicts itself; and where nothing fits, with the nearest that does.
    """
    asking = question(
        model, tokens=tokens, methods=methods, optimizer=optimizer, numbers=numbers, target=target, fixed=fixed,
        using=using, price=price,
    )  # fmt: skip
    return asking.answer(devices(on, link=link, host=host))


def _techniques(methods: str | Iterable[str], optimizer: str) -> list[Technique]:
    if methods == "all":
        every = [technique(name) for name in names() if name != "sgd"]
        return [one for one in every if not one.needs or optimizer in one.needs]
    found = [technique(name.strip()) for name in (methods.split(",") if isinstance(methods, str) else methods)]
    for one in found:
        if one.needs and optimizer not in one.needs:
            raise ValueError(f"method={one.name} is written for {', '.join(one.needs)}; give optimizer={one.needs[0]}")
    return found


def within(asking: Question, device: Device, seconds: float) -> Found:
    """The fewest devices with which the target is reached in so many seconds.

    Raises ValueError, with the best there is, where no number of devices is enough.
    """
    best: Found | None = None
    number, fits = 1, False
    while number <= MOST:
        found = asking.best(Cluster(device, number))
        if found is not None:
            best = found if best is None or found.best.days < best.best.days else best
            if fits := found.best.days * 86_400 <= seconds:
                break
        number *= 2
    if best is None:
        raise NothingFits(
            f"{asking.model.name} fits on no number of {device.name}; give devices= with more memory than "
            f"{device.memory / 1e9:.0f} GB each"
        )
    if not fits:
        least = best.best.days
        raise ValueError(
            f"{asking.model.name} takes {days(86_400 * least)} at least, on {best.job.cluster}; with more devices, the "
            f"{best.best.binds} binds; give in={least * 1.01:.3g}d"
        )
    step = max(1, number // 16)
    for fewer in range(number // 2 + step, number, step):
        found = asking.best(Cluster(device, fewer))
        if found is not None and found.best.days * 86_400 <= seconds:
            return found
    return best
